"""What may be loaded from a key of the compile cache."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from env import cache_volume
from env.cache_volume import MANIFEST, damaged_files, explain_miss, listed_files, open_key, publish_manifest
from tests.key_folder import FACTORS, FILES, KEY, Volume, own_process


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    """A published key that no process uses."""
    with own_process():
        yield Volume.published(tmp_path / "compile")


# -- a miss is explained -----------------------------------------------------------------------------------------------


def test_the_first_key_says_that_the_cache_is_empty(tmp_path: Path) -> None:
    fresh = Volume(tmp_path / "compile")
    with own_process():
        fresh.open()
    assert fresh.lines == ["compile cache: empty, so this start compiles"]
    assert json.loads((fresh.folder / "factors.json").read_text()) == FACTORS


def test_a_known_key_says_nothing(volume: Volume) -> None:
    volume.open()
    assert volume.lines == []


def test_a_miss_names_what_differs_from_the_nearest_key(volume: Volume) -> None:
    """pytorch/pytorch#144859: 3.8 GB of cache went unused, silently."""
    far = {name: "other" for name in FACTORS}
    open_key(volume.compile_dir, "f" * 16, far, volume.lines.append)
    volume.lines.clear()
    new = FACTORS | {"triton": "3.9.0", "gpu_capability": "12.0", "drafter": "x"}
    assert explain_miss(volume.compile_dir, new) == (
        f"compile cache: nothing for these factors yet; nearest {KEY}: "
        "drafter none -> x, gpu_capability 9.0 -> 12.0, triton 3.6.0 -> 3.9.0"
    )
    assert "source abababababab -> none" in explain_miss(volume.compile_dir, {**new, "source": None})  # type: ignore[dict-item]


def test_of_two_keys_that_are_as_near_the_newer_one_is_named(volume: Volume) -> None:
    open_key(volume.compile_dir, "f" * 16, FACTORS | {"torch": "2.12.0"}, volume.lines.append)
    wanted = FACTORS | {"torch": "2.13.0"}
    for key, seconds in ((KEY, 1000), ("f" * 16, 2000)):
        os.utime(volume.compile_dir / key / "factors.json", (seconds, seconds))
    assert "torch 2.12.0 -> 2.13.0" in explain_miss(volume.compile_dir, wanted)
    os.utime(volume.folder / "factors.json", (3000, 3000))
    assert "torch 2.11.0 -> 2.13.0" in explain_miss(volume.compile_dir, wanted)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_truncated_library_is_moved_away_and_said(volume: Volume) -> None:
    """bug-reports.md, checked 16: a truncated shared object of the Inductor cache ends the process that loads it."""
    (volume.folder / "inductor/ab/one.so").write_bytes(b"mach")
    volume.open()
    assert volume.in_quarantine() == {"inductor/ab/one.so"}
    assert volume.there() == FILES.keys() - {"inductor/ab/one.so"}
    (line,) = volume.lines
    assert line.startswith("WARNING") and "damaged" in line and "inductor/ab/one.so" in line
    assert "inductor/ab/one.so" not in listed_files(volume.folder)


def test_without_the_check_the_truncated_library_stays(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_volume, "damaged_files", lambda folder: set())
    (volume.folder / "inductor/ab/one.so").write_bytes(b"mach")
    volume.open()
    assert (volume.folder / "inductor/ab/one.so").read_bytes() == b"mach"


def test_a_changed_byte_of_the_same_length_and_time_is_found(volume: Volume) -> None:
    path = volume.folder / "inductor/ab/one.so"
    before = path.stat()
    path.write_bytes(b"machine c0de")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    volume.open()
    assert volume.in_quarantine() == {"inductor/ab/one.so"}


@pytest.mark.parametrize("fault", ["changed", "gone", "added"])
def test_a_triton_group_goes_as_a_whole(volume: Volume, fault: str) -> None:
    """vllm-project/vllm#52413: one writer's binary beside another's metadata gave NaN."""
    path = volume.folder / "triton/GROUP/kernel.json"
    if fault == "changed":
        path.write_bytes(b'{"num_warps": 4}')
    elif fault == "gone":
        path.unlink()
    else:
        path.with_name("kernel.ptx").write_bytes(b"text")
    volume.open()
    expected = {"triton/OTHER/kernel.cubin", *(name for name in FILES if name.startswith("inductor/"))}
    assert volume.there() == expected


def test_a_file_that_is_gone_elsewhere_is_only_a_miss(volume: Volume) -> None:
    (volume.folder / "inductor/ab/one.so").unlink()
    volume.open()
    assert volume.lines == []


def test_each_quarantine_gets_a_folder_of_its_own(volume: Volume) -> None:
    for name in ("inductor/ab/one.so", "inductor/ab/one.cpp"):
        (volume.folder / name).write_bytes(b"x")
        volume.open()
        volume.end_process()
    assert (volume.in_quarantine(1), volume.in_quarantine(2)) == ({"inductor/ab/one.so"}, {"inductor/ab/one.cpp"})


def test_many_damaged_files_are_one_line(volume: Volume) -> None:
    for name in FILES:
        (volume.folder / name).write_bytes(b"x")
    volume.open()
    assert volume.there() == set() and "and 2 more" in volume.lines[0] and len(volume.lines) == 1


# -- the manifest ------------------------------------------------------------------------------------------------------


def test_only_what_changed_is_hashed_again(volume: Volume) -> None:
    assert publish_manifest(volume.folder) == 0
    path = volume.folder / "inductor/ab/one.so"
    path.write_bytes(b"other code")
    volume.fill({"inductor/ab/two.so": b"2"})
    assert publish_manifest(volume.folder) == 2
    assert damaged_files(volume.folder) == set()
    assert listed_files(volume.folder).keys() == {*FILES, "inductor/ab/two.so"}


def test_temporary_and_lock_files_and_the_drivers_cache_are_not_listed(volume: Volume) -> None:
    odd = ("inductor/a.lock", "inductor/.1.2.tmp", "triton/tmp.pid_1/x", "cuda/index", "debug/log", "triton-home/x")
    volume.fill({name: b"" for name in odd})
    publish_manifest(volume.folder)
    assert listed_files(volume.folder).keys() == FILES.keys()


def test_a_full_file_system_leaves_the_old_manifest(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#121122: the cache filled its file system."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (volume.folder / MANIFEST).read_bytes()
    volume.fill({"inductor/ab/two.so": b"2"})
    monkeypatch.setattr(cache_volume.os, "fsync", full)
    with pytest.raises(OSError) as caught:
        publish_manifest(volume.folder)
    assert caught.value.errno == errno.ENOSPC  # exit 3 of the command line
    assert (volume.folder / MANIFEST).read_bytes() == before
    assert not list(volume.folder.glob(".*.tmp"))


def test_opening_a_key_notes_when_it_was_used(volume: Volume) -> None:
    os.utime(volume.folder / "last-used", (1, 1))
    volume.open()
    assert (volume.folder / "last-used").stat().st_mtime > time.time() - 60
