"""A key of the compile cache as one file, to carry a warm cache to another host or into an image.

The archive is a plain tar: factors.json, manifest.json and the listed files, in order, without times or owners, so one
cache always gives the same bytes. It is only taken in where every factor is the same: 3.8 GB that were copied to a
twin machine went unused, and nothing said why (pytorch#144859).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from env.cache_volume import (
    COMPILE_LOCK,
    FACTORS,
    LOADED,
    MANIFEST,
    QUARANTINE,
    USE_LOCK,
    damaged_files,
    differences,
    exclusively,
    listed_files,
    publish_manifest,
    read_json,
)
from env.caches import cache_key
from env.errors import EnvError
from env.files import atomic_write_json

Say = Callable[[str], None]

_PLACE = b"@COMPILE-CACHE-KEY@"
"""Stands for the key's folder: Triton writes absolute paths into the JSON files of its groups, and recompiles where it
does not find them (triton 3.6.0, runtime/cache.py, put_group)."""


def export_key(folder: Path, out_tar: Path) -> int:
    """Write the archive of a key, by rename, and return the number of its files. Raises EnvError.

    Refuses a key that was never published, is damaged, or is being compiled for.
    """
    factors, listed = read_json(folder / FACTORS), listed_files(folder)
    if not factors or not listed:
        fix = "Run it once: invoke train with this configuration."
        raise EnvError("holds nothing that a finished compile published", where=str(folder), fix=fix)
    with exclusively(folder, COMPILE_LOCK) as problem:
        if problem is not None:
            raise EnvError(problem, where=str(folder), fix="Export again when it has finished.")
        if damaged := damaged_files(folder):
            fix = "Run invoke train once: it builds damaged files again."
            raise EnvError(f"{min(damaged)} is damaged ({len(damaged)} files)", where=str(folder), fix=fix)
        listed = {name: about for name, about in listed.items() if (folder / name).is_file()}
        temporary = out_tar.with_name(f".{out_tar.name}.{os.getpid()}.tmp")
        try:
            with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
                contents = {}
                for name in sorted(listed):
                    content = _movable(name, (folder / name).read_bytes(), str(folder).encode(), _PLACE)
                    contents[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                _add(tar, FACTORS, _json_bytes(factors))
                _add(tar, MANIFEST, _json_bytes({"format": 1, "files": contents}))
                for name in contents:
                    _add(tar, name, _movable(name, (folder / name).read_bytes(), str(folder).encode(), _PLACE))
            temporary.replace(out_tar)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return len(listed)


def import_archive(archive: Path, compile_dir: Path, factors_here: dict[str, str], say: Say) -> Path:
    """Return the key's folder, published by rename from an archive made with exactly `factors_here`. Raises EnvError.

    A key that is there and undamaged is kept; another one goes to quarantine. Nothing of an archive that is refused
    stays.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members = _members(tar, archive)
            _check_factors(json.loads(_read(tar, members[FACTORS])), factors_here, archive)
            key, named = cache_key(factors_here)
            folder = compile_dir / key
            if (folder / MANIFEST).is_file() and listed_files(folder) and not damaged_files(folder):
                say(f"compile cache: {key} is here already and undamaged, so it was kept")
                return folder
            growing = compile_dir / f".importing-{key}-{secrets.token_hex(4)}"
            growing.mkdir(parents=True)
            try:
                with (growing / USE_LOCK).open("a", encoding="utf-8") as handle:
                    with contextlib.suppress(OSError):  # only keeps a cleaner away
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _unpack(tar, members, growing, folder, archive)
                    atomic_write_json(growing / FACTORS, named)
                    publish_manifest(growing)
                    _publish(growing, folder, say)
            finally:
                shutil.rmtree(growing, ignore_errors=True)
    except FileNotFoundError as error:
        if error.filename != str(archive):
            raise
        raise EnvError("there is no such file", where=str(archive), fix="Name an archive.") from None
    except (tarfile.TarError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refused(f"is no archive of a compile cache ({error})", archive) from None
    say(f"compile cache: {key} imported, {len(members) - 2} files")
    return folder


def _members(tar: tarfile.TarFile, archive: Path) -> dict[str, tarfile.TarInfo]:
    """Return the members by name. Refuses what could be written elsewhere, or is no plain file."""
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        name = member.name
        path = PurePosixPath(name)
        inside = name in (FACTORS, MANIFEST) or (len(path.parts) > 1 and path.parts[0] in LOADED)
        if not inside or path.is_absolute() or ".." in path.parts or str(path) != name:
            raise _refused(f"holds {name!r}, which is no place in a compile cache", archive)
        if not member.isreg():
            raise _refused(f"holds {name!r}, which is no plain file", archive)
        if name in members:
            raise _refused(f"holds {name!r} twice", archive)
        members[name] = member
    for name in (FACTORS, MANIFEST):
        if name not in members:
            raise _refused(f"has no {name}", archive)
    return members


def _check_factors(theirs: dict[str, Any], here: dict[str, str], archive: Path) -> None:
    names = [name for name in sorted({*theirs, *here}) if theirs.get(name) != here.get(name)]
    if names:
        fix = "Export it again from a run with the same environment, GPU, source and drafter section."
        raise EnvError(f"was made for another key: {differences(theirs, here, names)}", where=str(archive), fix=fix)


def _unpack(
    tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], growing: Path, folder: Path, archive: Path
) -> None:
    files = json.loads(_read(tar, members[MANIFEST]))["files"]
    if files.keys() != members.keys() - {FACTORS, MANIFEST}:
        odd = min(files.keys() ^ (members.keys() - {FACTORS, MANIFEST}))
        raise _refused(f"its manifest and its content differ in {odd!r}", archive)
    for name, entry in files.items():
        content = _read(tar, members[name])
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise _refused(f"{name} is damaged", archive)
        path = growing / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_movable(name, content, _PLACE, str(folder).encode()))


def _publish(growing: Path, folder: Path, say: Say) -> None:
    """Rename the new key into place; an old one, which is damaged or was never published, goes to quarantine."""
    if folder.exists():
        with exclusively(folder, COMPILE_LOCK, USE_LOCK) as problem:
            if problem is not None:
                raise EnvError(problem, where=str(folder), fix="Import again when it has ended.")
            number = 1
            while (place := folder.parent / QUARANTINE / f"{folder.name}-{number}").exists():
                number += 1
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
            say(f"WARNING: compile cache {folder.name}: damaged or never finished, moved to {place}")
    growing.rename(folder)


def _movable(name: str, content: bytes, old: bytes, new: bytes) -> bytes:
    return content.replace(old, new) if name.startswith("triton/") and name.endswith(".json") else content


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0, no names
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _refused(what: str, archive: Path) -> EnvError:
    return EnvError(what, where=str(archive), fix="Make it with invoke cache --export.")
