"""The locked virtual environment, for hosts without a container engine.

Made in a temporary folder beside its final name and published by one rename: a folder with the final name is complete,
whatever interrupted the making. uv's --relocatable environments (shebangs and activation relative to the folder)
make the rename possible.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from env.caches import CacheDirs
from env.errors import EnvError
from env.uvtool import run_uv


def runtime_folder(root: Path, caches: CacheDirs, *, lock: str = "runtime") -> Path:
    """Return where the current lock's environment belongs: venv-<Python>-<first 12 digits of the lock's sha256>."""
    path = lock_path(root, lock=lock)
    if not path.is_file():
        raise EnvError("no such lock", where=str(path), fix="Run: invoke lock")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return caches.venvs / f"venv-{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


def lock_path(root: Path, *, lock: str = "runtime") -> Path:
    """Return a lock: "runtime" trains, "dev" also tests, "next" is for trying newer versions."""
    return root / "lockfiles" / f"{lock}.txt"


def ensure_runtime(
    root: Path,
    caches: CacheDirs,
    *,
    lock: str = "runtime",
    uv: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Return the Python of the locked environment, made from the lock with hashes required if it is not there yet.

    A finished environment is not touched and uv is not started. Two processes make it once: the second one waits.
    Uses the same Python as this process. Raises EnvError.
    """
    folder = runtime_folder(root, caches, lock=lock)
    python = folder / "bin" / "python"
    if python.exists():
        return python
    shown = f"lockfiles/{lock_path(root, lock=lock).name}"
    try:
        caches.venvs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "Set DFLASH_CACHE to a folder that is writable."
        raise EnvError(f"cannot be created ({error.strerror})", where=str(caches.venvs), fix=fix) from None
    with _only_builder(caches.venvs / "venv.lock", say):
        if python.exists():
            return python
        for leftover in caches.venvs.glob(f".{folder.name}.*"):
            shutil.rmtree(leftover)
        if folder.exists() or folder.is_symlink():
            # A complete environment whose base interpreter is gone, e.g. after an upgrade of the system's Python.
            say(f"The Python that {_short(folder, root)} was made with is gone: making it again.")
            shutil.rmtree(folder)
        say(f"Making the locked environment {_short(folder, root)} from {shown} (once, about 5 GB).")
        growing = caches.venvs / f".{folder.name}.{os.getpid()}"
        try:
            run_uv(
                ["venv", "--quiet", "--no-project", "--relocatable", f"--python={sys.executable}", str(growing)],
                where=shown,
                uv=uv,
            )
            run_uv(
                [
                    *("pip", "sync", "--require-hashes", "--no-build"),
                    *(f"--python={growing}/bin/python", str(lock_path(root, lock=lock))),
                ],
                where=shown,
                uv=uv,
                echo=True,
            )
            growing.rename(folder)
        except OSError as error:
            fix = "Free space, or set DFLASH_CACHE to another folder."
            raise EnvError(f"cannot be written ({error.strerror})", where=str(growing), fix=fix) from None
        finally:
            shutil.rmtree(growing, ignore_errors=True)
    return python


def _short(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


@contextmanager
def _only_builder(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a kernel lock; it goes with its holder, so a killed builder blocks nobody. The file is never deleted."""
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is making a locked environment: waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
