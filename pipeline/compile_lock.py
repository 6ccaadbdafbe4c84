"""One process compiles for a cache key at a time; the others wait, say for whom, and then load what it made.

A kernel lock (flock) on a file beside the cache: it goes with its holder, so a killed one frees the key at once, and
the file is never deleted (a lock *file* whose holder died makes everyone wait for ever, pytorch#189245). The compilers
publish entries by rename, so where locks are refused or do nothing (some network file systems) the price is double
work, never a wrong artefact. Except the C++ compiler, which writes the final name in place: so the holder leaves a
note until it has published what it made, and who finds the note of a killed one moves the rest away.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from env import cache_budget
from env.cache_volume import COMPILE_LOCK, COMPILE_NOTE, FACTORS, holder, publish_manifest, sweep
from env.errors import EnvError

POLL_SECONDS = 0.5
REMIND_SECONDS = 30.0
FULL_BYTES = 2**20
"""With less free space than this, a compile that failed is taken to have failed for lack of it."""


def cache_folder() -> Path | None:
    """Return the folder of this process's compile cache key, None when no key was set (a library user's process)."""
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(place).parent if place else None


@contextmanager
def compiling(
    folder: Path | None, say: Callable[[str], None], ended_well: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Hold the right to compile for the cache key `folder`; what was compiled is published at the end of the block.

    ended_well   asked then: False publishes nothing, as an exception does
    Raises EnvError when what happened in the block failed on a full file system.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(folder / COMPILE_LOCK), folder / COMPILE_NOTE
    try:
        _acquire(lock, folder, say)
    except (OSError, NotImplementedError) as error:
        say(
            f"compile cache {folder.name}: this file system refuses locks ({error}); two processes may compile the same"
        )
        yield
        if ended_well():
            publish(folder, say)
        return
    try:
        if note.exists() and _is_ours(folder):
            sweep(folder, say)
        note.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
        if ended_well():
            publish(folder, say)
    except Exception as error:
        cause = explained(error, folder)
        if cause is error:
            raise
        raise cause from error
    finally:
        lock.release()


def publish(folder: Path, say: Callable[[str], None]) -> None:
    """Write the manifest of what lies in the key and keep the whole cache within its budget; the lock is held."""
    if _is_ours(folder):
        publish_manifest(folder)
    (folder / COMPILE_NOTE).unlink(missing_ok=True)
    if not _is_ours(folder):
        return
    cache_budget.prune(
        folder.parent,
        max_bytes=cache_budget.MAX_BYTES,
        max_files=cache_budget.MAX_FILES,
        keep=folder.name,
        say=say,
    )


def _is_ours(folder: Path) -> bool:
    """Return whether open_key made the folder; where somebody else points Inductor, nothing is moved or removed."""
    return (folder / FACTORS).is_file()


def explained(error: BaseException, folder: Path | None) -> BaseException:
    """Return an EnvError when the cache's file system is full, else `error`: the compilers fail in many ways then."""
    if folder is None or not isinstance(error, Exception) or getattr(error, "exit_code", None) is not None:
        return error
    if isinstance(error, OSError) and not Path(str(error.filename)).is_relative_to(folder):
        return error  # it names its own place
    try:
        found = os.statvfs(folder)
    except OSError:
        return error
    if found.f_bavail * found.f_frsize >= FULL_BYTES and (found.f_favail > 0 or found.f_files == 0):
        return error
    return EnvError(
        f"the compile cache is full ({found.f_blocks * found.f_frsize / 2**20:.0f} MiB, {found.f_files} inodes)",
        where=str(folder),
        fix="Make room (invoke clean), or choose a place with more (DFLASH_CACHE), and run the command again.",
    )


def _acquire(lock: FileLock, folder: Path, say: Callable[[str], None]) -> None:
    begin = last = time.monotonic()
    said = False
    while True:
        try:
            lock.acquire(timeout=POLL_SECONDS)
            return
        except Timeout:
            now = time.monotonic()
            if not said or now - last >= REMIND_SECONDS:
                say(f"compile cache {folder.name}: {holder(folder)} is compiling, waiting for it ({now - begin:.0f} s)")
                said, last = True, now
