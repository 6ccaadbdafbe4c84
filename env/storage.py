"""Where runs and caches are written: space, inodes, file system, temporary folder, and shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from env.caches import CacheDirs
from env.findings import Finding, error, warning

MIN_FREE_BYTES = {"cache": 1 << 30, "runs": 1 << 30}
"""Bytes: the quickstart's converted target, prompts and features take about 0.7 GB of the cache."""
MIN_FREE_FILES = {"cache": 5_000, "runs": 500}
"""Inodes: a compile cache is made of small files, and a quota on them ends before the bytes do (triton PR 11779)."""
MIN_SHM_BYTES = 32 << 20
MIN_SHM_BYTES_WITH_GPUS = 512 << 20
"""NCCL keeps its buffers between the GPUs of one host there; containers get 64 MiB unless they ask for more."""

_NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "wekafs"}
)
_MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    fstype: str
    options: frozenset[str]


def mount_of(folder: Path, mountinfo: str) -> Mount | None:
    """Return the mount that holds `folder` (need not exist), or None when the text names none."""
    path, found = os.path.realpath(folder), None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 6:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])  # blanks are written as \040
        inside = point == "/" or path == point or path.startswith(point + "/")
        # The longest mount point wins; of two on the same point the later one covers the earlier one.
        if inside and (found is None or len(point) >= len(found.point)):
            options = frozenset({*fields[5].split(","), *after.split()[-1].split(",")})
            found = Mount(point=point, fstype=after.split()[0], options=options)
    return found


def check_file_systems(
    caches: CacheDirs,
    mountinfo: str,
    *,
    in_image: bool,
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
) -> list[Finding]:
    """Return what the file systems of cache and runs will do to them.

    mountinfo   the text of /proc/self/mountinfo; empty where there is none, then nothing is said
    in_image    this is a container of our image, whose own layer goes when it is removed
    """
    findings = []
    for variable, place in (("DFLASH_CACHE", caches.root), ("DFLASH_RUNS", caches.runs)):
        mount = mount_of(place, mountinfo)
        if mount is None:
            continue
        of_cache = variable == "DFLASH_CACHE"
        fix = f"Set {variable} to a folder on a disk of this machine."
        if in_image and mount.point == "/":
            what = "no volume is mounted here: what is written goes with the container"
            findings.append(warning(str(place), what, f"Run it with --volume NAME:{place}"))
        elif mount.fstype in _MEMORY_TYPES:
            size = _size_bytes(statvfs, mount.point)
            what = f"is memory ({mount.fstype} of {_readable(size)} at {mount.point}): it can fill up"
            findings.append(warning(str(place), what, fix))
        elif of_cache and (mount.fstype in _NETWORK_TYPES or mount.fstype.startswith("fuse.")):
            what = (
                f"is on {mount.fstype}, mounted at {mount.point}: locks may not hold between hosts, "
                "and many small files are slow"
            )
            findings.append(warning(str(place), what, fix))
        if of_cache and "noexec" in mount.options:
            what = f"is mounted noexec (at {mount.point}): compiled code cannot be loaded from it"
            findings.append(error(str(place), what, f"Mount it without noexec, or set {variable} to another folder."))
    return findings


def check_disk(
    caches: CacheDirs,
    minimum_bytes: Mapping[str, int] | None = None,
    minimum_files: Mapping[str, int] | None = None,
    *,
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
) -> list[Finding]:
    """Return the places that can be neither written nor made, or have too few bytes or inodes free.

    Defaults: MIN_FREE_BYTES, MIN_FREE_FILES. A file system that reports no number of inodes has no limit of them.
    """
    findings = []
    bytes_needed = MIN_FREE_BYTES if minimum_bytes is None else minimum_bytes
    files_needed = MIN_FREE_FILES if minimum_files is None else minimum_files
    for name, variable, place in (("cache", "DFLASH_CACHE", caches.root), ("runs", "DFLASH_RUNS", caches.runs)):
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        below = (caches.compile, caches.data, caches.models, caches.packages) if name == "cache" else ()
        # Of another user's start in a shared place, the folders below may not be ours to write.
        closed = [folder for folder in (existing, *below) if folder.exists() and not _writable(folder)]
        for folder in closed:
            findings.append(error(str(folder), "is not a writable folder", f"Set {variable} to a folder that is."))
        if existing in closed:
            continue
        status = statvfs(str(existing))
        fix = f"Free some, or set {variable} to another disk."
        free = status.f_bavail * status.f_frsize
        if free < bytes_needed[name]:
            what = f"{_readable(free)} free, {_readable(bytes_needed[name])} needed for {name}"
            findings.append(error(str(existing), what, fix))
        if status.f_files and status.f_favail < files_needed[name]:
            what = f"{status.f_favail} files (inodes) free, {files_needed[name]} needed for {name}"
            findings.append(error(str(existing), what, fix))
    return findings


def check_temporary(
    environ: Mapping[str, str], usual: tuple[str, ...] = ("/tmp", "/var/tmp", "/usr/tmp")
) -> list[Finding]:
    """Return why compilers and torch find no temporary folder, or another one than was asked for."""
    chosen = next(((name, environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), None)
    if chosen and _writable(Path(chosen[1])):
        return []
    fallback = next((folder for folder in usual if _writable(Path(folder))), None)
    if fallback is None:
        what = "no temporary folder can be written, and compilers need one"
        fix = "Set TMPDIR to a writable folder (in a container: --tmpfs /tmp)."
        return [error(chosen[1] if chosen else usual[0], what, fix)]
    if chosen:
        what = f"names {chosen[1]}, which is not a writable folder; {fallback} is taken instead"
        return [warning(chosen[0], what, f"Set {chosen[0]} to a folder that is, or unset it.")]
    return []


def check_shared_memory(
    folder: Path, *, num_gpus: int, strict: bool, statvfs: Callable[[str], os.statvfs_result] = os.statvfs
) -> list[Finding]:
    """Return whether `folder` (/dev/shm) is too small for NCCL and for worker processes (pytorch#5040).

    strict   too little is an error for one GPU or none as well. A run of ours on those works with any size, since it
             has threads instead of worker processes; what else is started in the same container may not.
    """
    size = _size_bytes(statvfs, str(folder)) if folder.is_dir() else 0
    fix = "Run the container with --shm-size=1g (docker and podman); on a host: mount -o remount,size=1g /dev/shm"
    if size < MIN_SHM_BYTES:
        what = f"is {size / 2**20:.0f} MiB of shared memory, at least {MIN_SHM_BYTES >> 20} MiB are needed"
        return [(error if strict or num_gpus > 1 else warning)(str(folder), what, fix)]
    if num_gpus > 1 and size < MIN_SHM_BYTES_WITH_GPUS:
        what = f"is {size / 2**20:.0f} MiB of shared memory; NCCL can need more between {num_gpus} GPUs"
        return [warning(str(folder), what, fix)]
    return []


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _size_bytes(statvfs: Callable[[str], os.statvfs_result], folder: str) -> int:
    status = statvfs(folder)
    return status.f_blocks * status.f_frsize


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
