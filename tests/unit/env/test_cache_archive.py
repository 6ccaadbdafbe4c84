"""A key of the compile cache as a file: the same bytes for the same cache, and what an import refuses."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from env.cache_archive import export_key, import_archive
from env.cache_volume import (
    COMPILE_LOCK,
    COMPILE_NOTE,
    USE_LOCK,
    damaged_files,
    listed_files,
    publish_manifest,
)
from env.caches import cache_key
from env.errors import EnvError
from env.files import atomic_write_json

FACTORS = {"torch": "2.11.0", "triton": "3.6.0", "gpu_capability": "9.0"}
KEY = cache_key(FACTORS)[0]
GROUP = "triton/GROUP/__grp__kernel.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published key: a library, and a Triton group that names its children by absolute path, as Triton does."""
    made = tmp_path / "here" / KEY
    for name, content in {
        "inductor/ab/one.so": b"machine code",
        "triton/GROUP/kernel.cubin": b"binary",
        GROUP: json.dumps({"child_paths": {"kernel.cubin": f"{made}/triton/GROUP/kernel.cubin"}}).encode(),
    }.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    atomic_write_json(made / "factors.json", FACTORS)
    publish_manifest(made)
    return made


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    assert export_key(folder, tmp_path / "cache.tar") == 3
    return tmp_path / "cache.tar"


def rewritten(archive: Path, changes: Mapping[str, bytes | None], extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    """Return a copy with other members; None leaves one out."""
    with tarfile.open(archive) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    out = archive.with_name("changed.tar")
    with tarfile.open(out, "w") as tar:
        for name, content in {**members, **changes}.items():
            if content is not None:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        for info in extra:
            tar.addfile(info)
    return out


def refused(archive: Path, compile_dir: Path, factors: dict[str, str] = FACTORS) -> str:
    """Return the message of the refusal; nothing may be left of the archive."""
    with pytest.raises(EnvError) as caught:
        import_archive(archive, compile_dir, factors, print)
    assert not compile_dir.exists() or list(compile_dir.iterdir()) == []
    return str(caught.value)


def test_one_cache_gives_the_same_bytes_whenever_it_is_exported(folder: Path, archive: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    publish_manifest(folder)
    export_key(folder, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    with tarfile.open(archive) as tar:
        assert [m.name for m in tar] == ["factors.json", "manifest.json", "inductor/ab/one.so", GROUP,
                                         "triton/GROUP/kernel.cubin"]  # fmt: skip
        assert all((m.mtime, m.uid, m.gid, m.uname, m.mode) == (0, 0, 0, "", 0o644) for m in tar)
    assert str(tmp_path).encode() not in archive.read_bytes()


def test_an_import_gives_the_same_files_with_the_paths_of_their_new_place(archive: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    made = import_archive(archive, tmp_path / "there", FACTORS, lines.append)
    assert made == tmp_path / "there" / KEY
    assert (made / "inductor/ab/one.so").read_bytes() == b"machine code"
    # Triton compiles again where this path leads nowhere.
    assert Path(json.loads((made / GROUP).read_text())["child_paths"]["kernel.cubin"]).read_bytes() == b"binary"
    assert str(made) in (made / GROUP).read_text()
    assert json.loads((made / "factors.json").read_text()) == FACTORS
    assert len(listed_files(made)) == 3 and damaged_files(made) == set()
    assert lines == [f"compile cache: {KEY} imported, 3 files"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == [KEY]


def test_an_archive_goes_round_unchanged(archive: Path, tmp_path: Path) -> None:
    export_key(import_archive(archive, tmp_path / "there", FACTORS, print), tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()


# -- what cannot be exported


def test_a_key_that_was_never_published_is_not_exported(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(EnvError, match="holds nothing that a finished compile published"):
        export_key(folder, tmp_path / "out.tar")
    with pytest.raises(EnvError, match="holds nothing"):
        export_key(tmp_path / "none", tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


def test_a_damaged_key_is_not_exported(folder: Path, tmp_path: Path) -> None:
    (folder / "inductor/ab/one.so").write_bytes(b"mach")
    with pytest.raises(EnvError, match=r"inductor/ab/one\.so is damaged"):
        export_key(folder, tmp_path / "out.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_key_that_is_compiled_for_is_not_exported(folder: Path, tmp_path: Path) -> None:
    (folder / COMPILE_NOTE).write_text("process 4711 on elsewhere")
    with (folder / COMPILE_LOCK).open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(EnvError, match="process 4711 on elsewhere compiles for it"):
            export_key(folder, tmp_path / "out.tar")


# -- what is not taken in


def test_every_factor_that_differs_is_named(archive: Path, tmp_path: Path) -> None:
    """pytorch/pytorch#144859: a copied cache went unused, and nothing said which factor was another one."""
    here = FACTORS | {"triton": "3.9.0", "gpu_capability": "12.0"}
    message = refused(archive, tmp_path / "there", here)
    assert "was made for another key: gpu_capability 9.0 -> 12.0, triton 3.6.0 -> 3.9.0" in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../outside.so", "no place in a compile cache"),
        ("/inductor/x.so", "no place in a compile cache"),
        ("inductor/../../x.so", "no place in a compile cache"),
        ("inductor/./x.so", "no place in a compile cache"),
        (".in-use.lock", "no place in a compile cache"),
        ("cuda/index", "no place in a compile cache"),
        ("inductor/new.so", "its manifest and its content differ in 'inductor/new.so'"),
    ],
)
def test_a_member_that_would_lie_elsewhere_or_is_not_listed_is_refused(
    archive: Path, tmp_path: Path, name: str, reason: str
) -> None:
    assert reason in refused(rewritten(archive, {name: b"x"}), tmp_path / "there")
    assert not (tmp_path / "outside.so").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_devices_and_folders_are_refused(archive: Path, tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("inductor/link")
    info.type, info.linkname = kind, "factors.json"
    assert "no plain file" in refused(rewritten(archive, {}, (info,)), tmp_path / "there")


def test_a_name_that_comes_twice_is_refused(archive: Path, tmp_path: Path) -> None:
    twice = rewritten(archive, {}, (tarfile.TarInfo("inductor/ab/one.so"),))
    assert "'inductor/ab/one.so' twice" in refused(twice, tmp_path / "there")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inductor/ab/one.so": b"machine c0de"}, "inductor/ab/one.so is damaged"),
        ({"inductor/ab/one.so": None}, "differ in 'inductor/ab/one.so'"),
        ({"manifest.json": None}, "has no manifest.json"),
        ({"factors.json": None}, "has no factors.json"),
        ({"manifest.json": b"[]"}, "is no archive of a compile cache"),
        ({"manifest.json": b'{"files": 3}'}, "is no archive of a compile cache"),
        ({"factors.json": b"\xff"}, "is no archive of a compile cache"),
        ({"factors.json": b"[]"}, "is no archive of a compile cache"),
    ],
)
def test_a_damaged_archive_is_refused(archive: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(rewritten(archive, changes), tmp_path / "there")


def test_a_cut_archive_another_file_and_none_are_refused(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    for name, content in {"cut.tar": whole[:3000], "text.tar": b"hello", "empty.tar": b""}.items():
        (tmp_path / name).write_bytes(content)
        assert refused(tmp_path / name, tmp_path / "there").startswith(f"{tmp_path / name}: ")
    assert "there is no such file" in refused(tmp_path / "none.tar", tmp_path / "there")


# -- a key that is there already


def test_a_whole_key_is_kept_and_a_damaged_one_goes_to_quarantine(archive: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    made = import_archive(archive, there, FACTORS, print)
    number = made.stat().st_ino
    lines: list[str] = []
    import_archive(archive, there, FACTORS, lines.append)
    assert made.stat().st_ino == number and "kept" in lines[0]

    (made / "inductor/ab/one.so").write_bytes(b"x")
    import_archive(archive, there, FACTORS, lines.append)
    assert made.stat().st_ino != number and damaged_files(made) == set()
    assert (there / "quarantine" / f"{KEY}-1" / "inductor/ab/one.so").read_bytes() == b"x"


def test_a_damaged_key_in_use_is_not_replaced(archive: Path, tmp_path: Path) -> None:
    made = import_archive(archive, tmp_path / "there", FACTORS, print)
    (made / "inductor/ab/one.so").write_bytes(b"x")
    with (made / USE_LOCK).open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        with pytest.raises(EnvError, match="a process uses it"):
            import_archive(archive, tmp_path / "there", FACTORS, print)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [KEY]


def test_it_is_the_checksum_that_refuses_a_changed_file(archive: Path, tmp_path: Path) -> None:
    changed = {"inductor/ab/one.so": b"machine c0de"}
    assert "is damaged" in refused(rewritten(archive, changed), tmp_path / "there")
    with tarfile.open(archive) as tar:
        manifest = json.loads(tar.extractfile("manifest.json").read())  # type: ignore[union-attr]
    manifest["files"]["inductor/ab/one.so"]["sha256"] = hashlib.sha256(b"machine c0de").hexdigest()
    listed = rewritten(archive, changed | {"manifest.json": json.dumps(manifest).encode()})
    assert (import_archive(listed, tmp_path / "there", FACTORS, print) / "inductor/ab/one.so").is_file()
