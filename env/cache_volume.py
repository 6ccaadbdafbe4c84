"""One key's folder of the compile cache, on a volume that outlives its processes: what may be loaded from it.

The compilers trust what they find: a truncated shared object ends the process (SIGBUS or ImportError), a Triton binary
beside another writer's metadata computes NaN (vllm#52413). So a manifest holds the sha256 of every file that was
there when a compile ended well; the next process compares before torch is imported, and moves what differs to
quarantine/, from where nothing loads. Only the standard library: `invoke clean` runs with the host tools.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from env.files import atomic_write_json, sha256_file

Say = Callable[[str], None]

MANIFEST = "manifest.json"
FACTORS = "factors.json"
LAST_USED = "last-used"
COMPILE_LOCK = ".compiling.lock"
COMPILE_NOTE = ".compiling-by"
USE_LOCK = ".in-use.lock"
QUARANTINE = "quarantine"
LOADED = ("inductor", "triton", "extensions", "kernels")
"""Folders of a key whose files are loaded and run as they are. Not cuda: the driver checks its entries, and rewrites
its index at any time."""

_in_use: dict[Path, IO[str]] = {}
"""Closing a handle gives up its lock, so these stay open for the life of the process."""


def open_key(compile_dir: Path, key: str, factors: dict[str, str], say: Say) -> Path:
    """Return the folder of `key`, made or checked, and marked as in use until this process ends.

    Call it before torch is imported. Says why a new key misses, and what was moved to quarantine. Raises OSError.
    """
    folder = compile_dir / key
    if not (folder / FACTORS).is_file():
        say(explain_miss(compile_dir, factors))
    alone = _join(folder)
    try:
        _check(folder, unlisted_too=alone, say=say)
        atomic_write_json(folder / FACTORS, factors)
        (folder / LAST_USED).touch()
    finally:
        if alone:
            with contextlib.suppress(OSError):
                fcntl.flock(_in_use[folder], fcntl.LOCK_SH)
    return folder


def explain_miss(compile_dir: Path, factors: dict[str, str]) -> str:
    """Return one line that names the factors in which the nearest key differs; the newest of several."""
    found = []
    for path in compile_dir.glob(f"[!.]*/{FACTORS}"):
        theirs = read_json(path)
        if theirs:
            names = [name for name in sorted({*factors, *theirs}) if factors.get(name) != theirs.get(name)]
            found.append((len(names), -path.stat().st_mtime, path.parent.name, names, theirs))
    if not found:
        return "compile cache: empty, so this start compiles"
    _, _, key, names, theirs = min(found, key=lambda item: item[:3])
    return f"compile cache: nothing for these factors yet; nearest {key}: {differences(theirs, factors, names)}"


def differences(theirs: dict[str, Any], ours: dict[str, str], names: Iterable[str]) -> str:
    """Return "triton 3.6.0 -> 3.9.0, ..."; hashes are cut to 12 digits."""

    def short(value: Any) -> str:
        text = "none" if value is None else str(value)
        return text[:12] if len(text) == 64 else text

    return ", ".join(f"{name} {short(theirs.get(name))} -> {short(ours.get(name))}" for name in names)


def publish_manifest(folder: Path) -> int:
    """Write the manifest of what the key holds now, and return how many files were hashed for it.

    Only while the compile lock is held and nothing is half-written. A file whose size and time are those of the last
    manifest keeps its entry unread, so that a later damage is not taken for the truth.
    """
    before, after, hashed = listed_files(folder), {}, 0
    for name, path in _files(folder):
        if _temporary(name):
            continue
        try:
            stat = path.stat()
            entry = before.get(name)
            if entry is None or (entry["size"], entry["mtime_ns"]) != (stat.st_size, stat.st_mtime_ns):
                entry = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_file(path)}
                hashed += 1
        except FileNotFoundError:  # another process replaced or removed its own temporary file
            continue
        after[name] = entry
    if after != before or not (folder / MANIFEST).is_file():
        atomic_write_json(folder / MANIFEST, {"format": 1, "files": after})
    (folder / LAST_USED).touch()
    return hashed


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return {path below the key: {"size", "mtime_ns", "sha256"}}; empty without a manifest that can be read."""
    files = read_json(folder / MANIFEST).get("files")
    whole = isinstance(files, dict) and all(
        isinstance(entry, dict) and {"size", "mtime_ns", "sha256"} <= entry.keys() for entry in files.values()
    )
    return files if whole and isinstance(files, dict) else {}


def sweep(folder: Path, say: Say) -> None:
    """Move away what no manifest lists. Only for the holder of the compile lock, when the one before it was killed."""
    listed = listed_files(folder)
    units = {_unit(name) for name, _ in _files(folder) if name not in listed and not name.endswith(".lock")}
    _quarantine(folder, units, "left by a killed process", say)


def damaged_files(folder: Path, names: Iterable[str] | None = None) -> set[str]:
    """Return which listed files (of `names`) have other content; in a Triton group also which are gone."""
    listed = listed_files(folder)
    damaged = set()
    for name in listed if names is None else listed.keys() & set(names):
        path = folder / name
        try:
            same = path.stat().st_size == listed[name]["size"] and sha256_file(path) == listed[name]["sha256"]
        except FileNotFoundError:
            same = not (_unit(name) != name and (folder / _unit(name)).exists())
        if not same:
            damaged.add(name)
    return damaged


def _check(folder: Path, *, unlisted_too: bool, say: Say) -> None:
    damaged = damaged_files(folder)
    if damaged:
        # A process that compiles now may be making one of them anew; it is whole, and listed, when the lock is free.
        with _compile_lock(folder, say):
            units = {_unit(name) for name in damaged_files(folder, damaged)}
            _quarantine(folder, units, "damaged", say)
    if unlisted_too:
        sweep(folder, say)


def _quarantine(folder: Path, units: set[str], why: str, say: Say) -> None:
    """Move units to compile/quarantine/<key>-<n>/ and take them out of the manifest, so that they are built again."""
    if not units:
        return
    kept = {name: entry for name, entry in listed_files(folder).items() if _unit(name) not in units}
    number = 1
    while (place := folder.parent / QUARANTINE / f"{folder.name}-{number}").exists():
        number += 1
    for unit in sorted(units):
        (place / unit).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (folder / unit).rename(place / unit)
    atomic_write_json(folder / MANIFEST, {"format": 1, "files": kept})
    named = ", ".join(sorted(units)[:3]) + (f" and {len(units) - 3} more" if len(units) > 3 else "")
    say(f"WARNING: compile cache {folder.name}: {why}, moved to {place} and to be built again: {named}")


def _unit(name: str) -> str:
    """Return what is kept or moved as one: a Triton group's whole folder, elsewhere the file.

    Inductor's files stand alone: a missing library is compiled from its source, missing code is written from the
    graph's entry, and a missing entry is a miss.
    """
    first, _, rest = name.partition("/")
    return f"{first}/{rest.partition('/')[0]}" if first == "triton" else name


def _temporary(name: str) -> bool:
    parts = name.split("/")
    return parts[-1].endswith((".lock", ".tmp")) or any(part.startswith("tmp.") for part in parts)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for part in LOADED:
        for place, _, names in os.walk(folder / part):
            for name in names:
                path = Path(place, name)
                yield path.relative_to(folder).as_posix(), path


# -- locks: of the kernel, so they go with their holder; the files are never removed while the key is there ------------


def _join(folder: Path) -> bool:
    """Mark the key as used by this process. Return True, with the lock exclusive, when no other process uses it."""
    if folder in _in_use:
        return False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / USE_LOCK).open("a+", encoding="utf-8")  # NFSv4 shares no lock on what cannot be read
        alone = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH)  # waits only while another process checks, seconds at most
        except OSError:  # a file system without locks: nobody can be alone there
            pass
        if _is_at(handle, folder / USE_LOCK):
            _in_use[folder] = handle
            return alone
        handle.close()  # the key was pruned between the two calls; begin again in a new folder


@contextlib.contextmanager
def _compile_lock(folder: Path, say: Say) -> Iterator[None]:
    """Hold the lock of pipeline.compile_lock (filelock uses flock too); work on without one where there are none."""
    with (folder / COMPILE_LOCK).open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"compile cache {folder.name}: waiting for {holder(folder)}, which compiles")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


@contextlib.contextmanager
def exclusively(folder: Path, *locks: str) -> Iterator[str | None]:
    """Hold `locks` of a key without waiting; yield None, or in words why they cannot be had."""
    with contextlib.ExitStack() as stack:
        problem = None
        for name in locks:
            try:
                handle = stack.enter_context((folder / name).open("a", encoding="utf-8"))
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"{holder(folder)} compiles for it" if name == COMPILE_LOCK else "a process uses it"
                break
            except OSError as error:
                problem = f"its locks cannot be had ({error.strerror})"
                break
        yield problem


def holder(folder: Path) -> str:
    """Return "process 4711 on host", who holds the compile lock."""
    try:
        return (folder / COMPILE_NOTE).read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


def _is_at(handle: IO[str], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    return False


# -- files -------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, an empty one when there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
