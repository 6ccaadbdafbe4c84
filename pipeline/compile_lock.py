"""One process compiles for a cache key at a time; the others wait, say for whom, and then load what it made.

A kernel lock (flock) on a file beside the cache: it goes with its holder, so a killed one frees the key at once, and
the file is never deleted (a lock *file* whose holder died makes everyone wait for ever, pytorch#189245). The compilers
publish entries by rename, so where locks are refused or do nothing (some network file systems) the price is double
work, never a wrong artefact.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

POLL_SECONDS = 0.5
REMIND_SECONDS = 30.0


def cache_folder() -> Path | None:
    """Return the folder of this process's compile cache key, None when no key was set (a library user's process)."""
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(place).parent if place else None


@contextmanager
def compiling(folder: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the right to compile for the cache key `folder`."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(folder / ".compiling.lock"), folder / ".compiling-by"
    try:
        _acquire(lock, note, folder.name, say)
    except (OSError, NotImplementedError) as error:
        say(
            f"compile cache {folder.name}: this file system refuses locks ({error}); two processes may compile the same"
        )
        yield
        return
    try:
        note.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _acquire(lock: FileLock, note: Path, key: str, say: Callable[[str], None]) -> None:
    begin = last = time.monotonic()
    said = False
    while True:
        try:
            lock.acquire(timeout=POLL_SECONDS)
            return
        except Timeout:
            now = time.monotonic()
            if not said or now - last >= REMIND_SECONDS:
                try:
                    holder = note.read_text(encoding="utf-8")
                except OSError:
                    holder = "another process"
                say(f"compile cache {key}: {holder} is compiling, waiting for it ({now - begin:.0f} s)")
                said, last = True, now
