"""The compile cache's budget of bytes and files: what is there, and what goes first. A key in use is never removed.

Files count as much as bytes: small files can use up a file system's inodes long before its space (triton PR 11779).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.cache_volume import COMPILE_LOCK, FACTORS, LAST_USED, QUARANTINE, USE_LOCK, exclusively, read_json
from env.errors import EnvError

MAX_BYTES = 20 * 2**30
MAX_FILES = 200_000

_OURS = re.compile(r"[0-9a-f]{16}|\.(removing|importing)-[0-9a-f]{16}-[0-9a-f]+")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key, a quarantined folder, or what an interrupted removal or import left."""

    folder: Path
    num_bytes: int
    num_files: int
    last_used: float
    """Seconds since 1970."""
    factors: dict[str, Any]

    @property
    def name(self) -> str:
        inside = self.folder.parent.name == QUARANTINE
        return f"{QUARANTINE}/{self.folder.name}" if inside else self.folder.name

    @property
    def is_key(self) -> bool:
        return not (self.name.startswith((".", QUARANTINE)))

    def __str__(self) -> str:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last_used))
        factors = ", ".join(f"{name} {str(value)[:12]}" for name, value in self.factors.items())
        size = f"{self.num_bytes / 2**20:.1f} MiB in {self.num_files} files"
        return f"{self.name}: {size}, last used {used}" + (f"; {factors}" if factors else "")


def entries(compile_dir: Path) -> list[Entry]:
    """Return all that counts against the budget, in the order in which it goes: leftovers, then keys by last use.

    A folder with another name than we give is somebody else's.
    """
    places = [*_folders(compile_dir / QUARANTINE), *(f for f in _folders(compile_dir) if _OURS.fullmatch(f.name))]
    return sorted((_entry(folder) for folder in places), key=lambda entry: (entry.is_key, entry.last_used))


def prune(compile_dir: Path, *, max_bytes: int, max_files: int, keep: str | None, say: Say) -> list[str]:
    """Remove what goes first until the rest fits, and return the names; never the key `keep` or one in use."""
    found = entries(compile_dir)
    num_bytes, num_files = sum(e.num_bytes for e in found), sum(e.num_files for e in found)
    removed = []
    for entry in found:
        if num_bytes <= max_bytes and num_files <= max_files:
            break
        if entry.name == keep or _remove(entry) is not None:
            continue
        num_bytes, num_files = num_bytes - entry.num_bytes, num_files - entry.num_files
        removed.append(entry.name)
        say(f"compile cache: removed {entry}")
    if num_bytes > max_bytes or num_files > max_files:
        say(f"compile cache: {num_bytes / 2**30:.1f} GiB in {num_files} files are in use, more than its budget")
    return removed


def clean(
    compile_dir: Path,
    say: Say,
    *,
    dry_run: bool = False,
    everything: bool = False,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> list[str]:
    """Prune to the budget, or remove `everything` that is not in use, and return the names of what went.

    dry_run   lists all that is there, and removes nothing
    Raises EnvError that names the holder while somebody compiles: wiping a shared cache broke jobs in flight (sglang PR
    34231).
    """
    if dry_run:
        for entry in entries(compile_dir):
            say(f"{entry}{_use_of(entry)}")
        return []
    for entry in entries(compile_dir):
        if not entry.is_key:
            continue
        with exclusively(entry.folder, COMPILE_LOCK) as problem:
            if problem is not None:
                raise EnvError(problem, where=str(entry.folder), fix="Wait for it or stop it, then clean again.")
    if not everything:
        return prune(compile_dir, max_bytes=max_bytes, max_files=max_files, keep=None, say=say)
    removed = []
    for entry in entries(compile_dir):
        problem = _remove(entry)
        if problem is None:
            removed.append(entry.name)
        say(f"removed {entry}" if problem is None else f"kept {entry.name}: {problem}")
    return removed


def _remove(entry: Entry) -> str | None:
    """Remove an entry and return None, or return in words who uses it."""
    with _claimed(entry) as problem:
        if problem is not None:
            return problem
        # Renamed first: whoever opens the key from now on makes it anew instead of finding half of it.
        away = entry.folder
        if entry.is_key:
            away = entry.folder.with_name(f".removing-{entry.folder.name}-{secrets.token_hex(4)}")
            try:
                entry.folder.rename(away)
            except OSError as error:
                return f"cannot be moved ({error.strerror})"
        shutil.rmtree(away, ignore_errors=True)  # pruning must not fail the run whose compile went well
    return "could not be removed wholly" if away.exists() else None


@contextlib.contextmanager
def _claimed(entry: Entry) -> Iterator[str | None]:
    if entry.folder.parent.name == QUARANTINE:
        yield None  # nothing loads from there
        return
    with exclusively(entry.folder, COMPILE_LOCK, USE_LOCK) as problem:
        yield problem


def _use_of(entry: Entry) -> str:
    with _claimed(entry) as problem:
        return f" ({problem})" if problem else ""


def _folders(place: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [Path(found) for found in os.scandir(place) if found.is_dir(follow_symlinks=False)]
    return []


def _entry(folder: Path) -> Entry:
    num_bytes = num_files = 0
    for place, folders, names in os.walk(folder):
        num_files += len(names) + len(folders)  # a folder takes an inode too
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(place, name)).st_size
    last_used = 0.0
    for path in (folder / LAST_USED, folder / FACTORS, folder):
        with contextlib.suppress(FileNotFoundError):
            last_used = path.stat().st_mtime
            break
    return Entry(
        folder=folder,
        num_bytes=num_bytes,
        num_files=num_files,
        last_used=last_used,
        factors=read_json(folder / FACTORS),
    )
