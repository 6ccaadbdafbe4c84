"""Two builds that differ are told by the first file, and two that are the same by their digest."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from env import build as builder
from env.engines import Engine
from env.errors import EnvError
from env.reproduce import archive_digest, check_same_twice, first_archive_difference, first_difference
from tests.engine_tools import BUILDAH, DOCKER, PODMAN, SAYS, FakeEngines, caches_of, commit_all, git, make_checkout


def _tree(root: Path) -> Path:
    (root / "etc/apt").mkdir(parents=True)
    (root / "etc/apt/list").write_text("deb\n")
    (root / "etc/passwd").write_text("root\n")
    (root / "bin").symlink_to("usr/bin")
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, (1_000_000, 1_000_000), follow_symlinks=False)
    return root


def _again(path: Path) -> None:
    os.utime(path, (1_000_000, 1_000_000), follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _again(path)


def _remove(path: Path) -> None:
    path.unlink()
    _again(path.parent)


def _relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("usr/biM")
    _again(path)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    _again(path)
    _again(path.parent)


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda root: _write(root / "etc/passwd", "rooT\n"), "etc/passwd (content)"),
        (lambda root: _write(root / "etc/passwd", "root and more\n"), "etc/passwd (size, content)"),
        (lambda root: (root / "etc/passwd").chmod(0o755), "etc/passwd (mode)"),
        (lambda root: (root / "etc/apt").chmod(0o700), "etc/apt (mode)"),
        (lambda root: os.utime(root / "etc/passwd", (5, 5)), "etc/passwd (time)"),
        (lambda root: _relink(root / "bin"), "bin (content)"),
        (lambda root: _remove(root / "etc/passwd"), "etc/passwd is only in the first build"),
        (lambda root: _write(root / "aaa", ""), "aaa is only in the second build"),
        (lambda root: _replace_by_folder(root / "etc/passwd"), "etc/passwd (mode, size, content)"),
    ],
)
def test_the_first_difference_of_two_file_systems_is_named_with_its_kind(
    tmp_path: Path, change: Callable[[Path], Any], difference: str
) -> None:
    """moby#43124: file times are the usual one."""
    a, b = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    assert first_difference(a, b) is None
    change(b)
    assert first_difference(a, b) == difference


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_another_owner_is_a_difference(tmp_path: Path) -> None:
    a, b = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    os.chown(b / "etc/passwd", 10001, 10002)
    assert first_difference(a, b) == "etc/passwd (owner, group)"


def test_of_several_differences_the_first_by_name_counts(tmp_path: Path) -> None:
    a, b = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    for name in ("etc/passwd", "etc/apt/list"):
        _write(b / name, "x\n")
    assert first_difference(a, b) == "etc/apt/list (size, content)"


Member = tuple[str, bytes, dict[str, Any]]
FILES: list[Member] = [("etc/passwd", b"root\n", {}), ("usr/x.py", b"pass\n", {"mode": 0o755})]


def _tar(members: Sequence[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body, about in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            for key, value in about.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def _oci(path: Path, *layers: Sequence[Member], config: str = "") -> Path:
    """Write an OCI archive of these layers."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    manifest = blob(json.dumps({"layers": [blob(_tar(layer)) for layer in layers], "config": config}).encode())
    index = json.dumps({"manifests": [manifest]}).encode()
    path.write_bytes(_tar([(name, body, {}) for name, body in [*blobs.items(), ("index.json", index)]]))
    return path


def test_equal_archives_have_one_digest_and_no_difference(tmp_path: Path) -> None:
    a, b = _oci(tmp_path / "a", FILES, FILES[:1]), _oci(tmp_path / "b", FILES, FILES[:1])
    assert archive_digest(a) == archive_digest(b) and archive_digest(a).startswith("sha256:")
    assert first_archive_difference(a, b) is None


def _changed(**about: Any) -> list[Member]:
    name, body, before = FILES[1]
    return [FILES[0], (name, body, {**before, **about})]


@pytest.mark.parametrize(
    "second, difference",
    [
        ([FILES[0], ("usr/x.py", b"PASS\n", {"mode": 0o755})], "layer 1: usr/x.py (content)"),
        (_changed(mtime=7), "layer 1: usr/x.py (time)"),
        (_changed(mode=0o644), "layer 1: usr/x.py (mode)"),
        (_changed(uid=1, gid=2), "layer 1: usr/x.py (owner, group)"),
        (FILES[:1], "layer 1: usr/x.py is only in the first build"),
        ([*FILES, ("usr/y", b"", {})], "layer 1: usr/y is only in the second build"),
    ],
)
def test_the_first_difference_of_two_archives_is_named_with_its_layer(
    tmp_path: Path, second: list[Member], difference: str
) -> None:
    """uv#10523: bytecode headers and a file with a time; PR 1461 of cf-ips-to-hcloud-fw: two builds of one commit."""
    a, b = _oci(tmp_path / "a", FILES, FILES), _oci(tmp_path / "b", FILES, second)
    assert archive_digest(a) != archive_digest(b)
    assert first_archive_difference(a, b) == difference


def test_a_layer_that_only_one_archive_has_is_a_difference(tmp_path: Path) -> None:
    a, b = _oci(tmp_path / "a", FILES), _oci(tmp_path / "b", FILES, [("late", b"", {})])
    assert first_archive_difference(a, b) == "layer 1: late is only in the second build"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    (tmp_path / "fake").mkdir()
    made = FakeEngines.make(tmp_path / "fake", "docker", "podman", "buildah")
    made.use(monkeypatch)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "project")


def _check(root: Path, engine: Engine, say: Callable[[str], None] = lambda line: None) -> str:
    caches_of(root).root.mkdir(exist_ok=True)
    return check_same_twice(root, caches_of(root), engine, base="registry", say=say)


@pytest.mark.parametrize("engine", [PODMAN, BUILDAH])
def test_two_builds_with_one_digest_pass_and_the_second_takes_nothing_of_the_first(
    root: Path, fakes: FakeEngines, engine: Engine
) -> None:
    said: list[str] = []
    assert _check(root, engine, said.append) == "digest-same"
    assert said[-1] == "Built again from nothing, same digest: digest-same"
    assert ["--no-cache" in call for call in fakes.calls("build")] == [False, True]
    assert not list((fakes.state / "images").glob("*-first*"))


def test_a_later_commit_that_changes_nothing_of_the_image_makes_no_difference(root: Path, fakes: FakeEngines) -> None:
    """The tag is the content's: the first build may be of an earlier commit, which its label and image.json name."""
    commit_all(root)
    builder.build(root, caches_of(root), PODMAN, base="registry", say=lambda line: None)
    (root / "README.md").write_text("another text")
    commit_all(root)
    assert _check(root, PODMAN) == "digest-same"
    first, second = (json.loads((fakes.context(n) / "image.json").read_text()) for n in (1, 2))
    assert first == second
    assert first["commit"] != git(root, "rev-parse", "HEAD"), "the second build was of a later commit"


def _mounts(fakes: FakeEngines, tag: str, a: Path, b: Path) -> None:
    for prefix in ("", "container-of-"):
        (fakes.state / f"mounts/{prefix}dflash:{tag}-first").write_text(str(a))
        (fakes.state / f"mounts/{prefix}dflash:{tag}").write_text(str(b))


@pytest.mark.parametrize("engine", [PODMAN, BUILDAH])
def test_two_builds_that_differ_are_an_error_that_names_file_and_packages(
    root: Path, fakes: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    (fakes.state / "always_new").touch()
    a, b = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    _write(b / "etc/apt/list", "deb http\n")
    first = builder.build(root, caches_of(root), engine, base="registry", say=lambda line: None)
    _mounts(fakes, first["tag"], a, b)
    fakes.prints(SAYS | {"debian": {"tini": "0.20", "new": "1"}})
    with pytest.raises(EnvError) as caught:
        _check(root, engine)
    what = "two builds differ: digest-1 and digest-2; first difference: etc/apt/list (size, content)."
    packages = " Packages that changed on the index meanwhile: new None -> 1, tini 0.19 -> 0.20."
    assert str(caught.value) == f"{first['name']}: {what}{packages} Find what writes it in the Dockerfile."
    assert not list((fakes.state / "images").glob("*-first*"))


@pytest.mark.parametrize("engine", [PODMAN, BUILDAH])
def test_file_systems_that_cannot_be_mounted_are_one_line(root: Path, fakes: FakeEngines, engine: Engine) -> None:
    (fakes.state / "always_new").touch()
    with pytest.raises(EnvError, match=r"the image's files cannot be mounted.*podman unshare"):
        _check(root, engine)
    assert not list((fakes.state / "images").glob("*-first*"))


def test_a_second_build_that_fails_leaves_the_first_image_under_its_name_alone(root: Path, fakes: FakeEngines) -> None:
    builder.build(root, caches_of(root), PODMAN, base="registry", say=lambda line: None)
    (fakes.state / "build_fails").write_text("no space left on device\n")
    with pytest.raises(EnvError, match="the build failed"):
        _check(root, PODMAN)
    assert [p.name for p in (fakes.state / "images").iterdir() if "first" in p.name] == []
    assert builder.built_image(root, caches_of(root), PODMAN) is not None


def test_dockers_two_archives_are_compared_and_removed(root: Path, fakes: FakeEngines) -> None:
    archive = _oci(fakes.state / "archives/1", FILES)
    _oci(fakes.state / "archives/2", FILES)
    said: list[str] = []
    assert _check(root, DOCKER, said.append) == archive_digest(archive)
    assert said == [f"Built twice from nothing, one digest: {archive_digest(archive)}"]
    assert list(caches_of(root).root.iterdir()) == []


def test_dockers_archives_that_differ_are_told_by_the_first_file(root: Path, fakes: FakeEngines) -> None:
    one, two = _oci(fakes.state / "archives/1", FILES), _oci(fakes.state / "archives/2", _changed(mtime=1))
    with pytest.raises(EnvError) as caught:
        _check(root, DOCKER)
    digests = f"{archive_digest(one)} and {archive_digest(two)}"
    assert f"two builds differ: {digests}; first difference: layer 0: usr/x.py (time)" in str(caught.value)
    _oci(fakes.state / "archives/3", FILES)
    _oci(fakes.state / "archives/4", FILES, config="other")
    with pytest.raises(EnvError, match="first difference: no file; the configuration differs"):
        _check(root, DOCKER)
