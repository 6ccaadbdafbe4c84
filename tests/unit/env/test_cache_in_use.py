"""Who may touch a key of the compile cache while other processes use it, and what a killed one leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from env import cache_volume
from env.cache_volume import COMPILE_LOCK, COMPILE_NOTE, MANIFEST, USE_LOCK, open_key, sweep
from tests.key_folder import FACTORS, FILES, KEY, Volume, own_process


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    """A published key that no process uses."""
    with own_process():
        yield Volume.published(tmp_path / "compile")


def test_what_a_killed_run_left_is_moved_away_when_nobody_uses_the_key(volume: Volume) -> None:
    volume.fill({"inductor/cd/half.so": b"hal", "triton/NEW/kernel.cubin": b"k"})
    volume.open()
    assert volume.in_quarantine() == {"inductor/cd/half.so", "triton/NEW/kernel.cubin"}
    assert volume.there() == set(FILES)


@pytest.mark.parametrize("manifest", ["", "{}", '{"files": {"inductor/ab/one.so": 3}}', None])
def test_without_a_manifest_that_can_be_read_nothing_is_trusted(volume: Volume, manifest: str | None) -> None:
    if manifest is None:
        (volume.folder / MANIFEST).unlink()
    else:
        (volume.folder / MANIFEST).write_text(manifest)
    volume.open()
    assert volume.there() == set()


_USER = """
import sys, time
from pathlib import Path
from env.cache_volume import open_key
open_key(Path(sys.argv[1]), sys.argv[2], {}, lambda line: None)
print("open", flush=True)
time.sleep(120)
"""


@pytest.fixture
def user(volume: Volume, repository: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the key."""
    command = [sys.executable, "-c", _USER, str(volume.compile_dir), KEY]
    environ = {**os.environ, "PYTHONPATH": str(repository)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_files_of_a_live_process_are_not_touched_but_damage_is_moved(
    volume: Volume, user: subprocess.Popen[str]
) -> None:
    volume.fill({"inductor/cd/new.so": b"being written"})
    (volume.folder / "inductor/ab/one.so").write_bytes(b"x")
    volume.open()
    assert "inductor/cd/new.so" in volume.there()
    assert volume.in_quarantine() == {"inductor/ab/one.so"}
    # The kernel gives up the lock of a killed process.
    volume.end_process()
    user.kill()
    user.wait()
    volume.open()
    assert volume.in_quarantine(2) == {"inductor/cd/new.so"}


def test_two_processes_use_a_key_at_once(volume: Volume, user: subprocess.Popen[str]) -> None:
    volume.open()
    with (volume.folder / USE_LOCK).open("a") as handle, pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_on_a_file_system_without_locks_only_listed_files_are_looked_at(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_volume.fcntl, "flock", refuse)
    volume.fill({"inductor/cd/new.so": b"being written"})
    (volume.folder / "inductor/ab/one.so").write_bytes(b"x")
    volume.open()
    assert "inductor/cd/new.so" in volume.there() and volume.in_quarantine() == {"inductor/ab/one.so"}


def test_damage_waits_for_the_one_who_compiles_and_may_be_mended_by_then(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = volume.folder / "inductor/ab/one.so"
    path.write_bytes(b"x")
    (volume.folder / COMPILE_NOTE).write_text("process 4711 on elsewhere")
    holder = (volume.folder / COMPILE_LOCK).open("a")
    fcntl.flock(holder, fcntl.LOCK_EX)

    def say(line: str) -> None:
        volume.lines.append(line)
        path.write_bytes(FILES["inductor/ab/one.so"])
        holder.close()

    open_key(volume.compile_dir, KEY, FACTORS, say)
    assert volume.lines == [f"compile cache {KEY}: waiting for process 4711 on elsewhere, which compiles"]
    assert volume.there() == set(FILES)


def test_a_sweep_keeps_lock_files_and_what_is_listed(volume: Volume) -> None:
    volume.fill({"inductor/locks/a.lock": b"", "inductor/ab/.1.tmp": b"half", "inductor/ab/two.so": b"half"})
    sweep(volume.folder, volume.lines.append)
    assert volume.in_quarantine() == {"inductor/ab/.1.tmp", "inductor/ab/two.so"}
    assert volume.there() == {*FILES, "inductor/locks/a.lock"}


def test_a_key_that_is_pruned_while_it_is_opened_is_made_anew(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = fcntl.flock, 0

    def flock(handle: Any, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # between opening the lock file and having the lock
            volume.folder.rename(volume.compile_dir / ".removing")
        real(handle, how)

    monkeypatch.setattr(cache_volume.fcntl, "flock", flock)
    volume.open()
    assert volume.there() == set() and (volume.folder / "factors.json").is_file()
    assert os.path.samestat(os.fstat(cache_volume._in_use[volume.folder].fileno()), (volume.folder / USE_LOCK).stat())
