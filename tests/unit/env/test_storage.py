"""Space, inodes, file systems and shared memory, from made-up machines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from env.caches import CacheDirs
from env.storage import check_disk, check_file_systems, check_shared_memory, check_temporary, mount_of

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 0:30 / /home rw - nfs4 server:/home rw,vers=4.2
29 27 0:31 / /mnt/my\040disk rw,noexec - xfs /dev/vdb rw
30 27 0:32 / /scratch rw shared:7 master:1 - tmpfs tmpfs rw,size=1024k
31 27 0:33 / /covered rw - nfs server:/old rw
32 31 254:1 / /covered rw - ext4 /dev/vdc rw
33 27 0:34 / /s3 rw - fuse.s3fs s3fs rw
34 27 0:35 / /layer rw - overlay overlay rw,lowerdir=/a
"""


def _statvfs(
    *, size: int = 1 << 40, free: int = 1 << 40, inodes: int = 0, free_inodes: int = 0
) -> Callable[[str], os.statvfs_result]:
    """Return a statvfs that reports `size` and `free` bytes, in blocks of 512."""
    numbers = (512, 512, size // 512, free // 512, free // 512, inodes, free_inodes, free_inodes, 0, 255)
    return lambda folder: os.statvfs_result(numbers)


def _caches(cache: str, runs: str = "/runs") -> CacheDirs:
    return CacheDirs(root=Path(cache), runs=Path(runs))


@pytest.mark.parametrize(
    "folder, point, fstype",
    [
        ("/project/.cache", "/", "ext4"),
        ("/home/a/dflash/.cache", "/home", "nfs4"),
        ("/homestead", "/", "ext4"),  # a prefix of the text is no prefix of the path
        ("/home", "/home", "nfs4"),
        ("/mnt/my disk/cache", "/mnt/my disk", "xfs"),
        ("/covered/cache", "/covered", "ext4"),
        ("/scratch/x", "/scratch", "tmpfs"),
    ],
)
def test_the_mount_of_a_folder_is_the_deepest_and_the_latest_one(folder: str, point: str, fstype: str) -> None:
    mount = mount_of(Path(folder), MOUNTS)
    assert mount is not None and (mount.point, mount.fstype) == (point, fstype)


def test_the_mount_of_a_folder_here_is_the_one_that_the_system_names(tmp_path: Path) -> None:
    mount = mount_of(tmp_path, Path("/proc/self/mountinfo").read_text())
    said = subprocess.run(["findmnt", "-nro", "TARGET,FSTYPE", "-T", str(tmp_path)], capture_output=True, text=True)
    assert mount is not None and said.stdout.splitlines()[-1].split() == [mount.point, mount.fstype]


@pytest.mark.parametrize("cache, fstype", [("/home/a/cache", "nfs4"), ("/s3/cache", "fuse.s3fs")])
def test_a_cache_on_a_network_file_system_is_a_warning_and_runs_there_are_fine(cache: str, fstype: str) -> None:
    """triton-lang/triton#2688 and #11512: several processes, one cache there, mixed or missing files."""
    (finding,) = check_file_systems(_caches(cache, runs="/home/a/runs"), MOUNTS, in_image=False)
    assert (
        finding.level == "warning"
        and f"is on {fstype}, mounted at {cache[: -len('/cache')].removesuffix('/a')}" in finding.what
    )
    assert finding.fix == "Set DFLASH_CACHE to a folder on a disk of this machine."
    assert check_file_systems(_caches("/project/cache", runs="/home/a/runs"), MOUNTS, in_image=False) == []


def test_a_cache_in_memory_is_a_warning_with_its_size() -> None:
    """pytorch/pytorch#121122: the default cache filled a memory-backed folder."""
    (finding,) = check_file_systems(_caches("/scratch/cache"), MOUNTS, in_image=False, statvfs=_statvfs(size=15 << 30))
    assert finding.level == "warning" and "is memory (tmpfs of 15.0 GiB at /scratch)" in finding.what


def test_runs_in_memory_are_a_warning_too() -> None:
    (finding,) = check_file_systems(_caches("/c", "/scratch/runs"), MOUNTS, in_image=False, statvfs=_statvfs())
    assert "DFLASH_RUNS" in finding.fix


def test_a_container_of_ours_without_a_volume_is_a_warning_and_a_host_is_not() -> None:
    """NVIDIA-TAO/tao-skill-bank PR 150: every --rm run builds all caches again."""
    first, second = check_file_systems(_caches("/cache"), MOUNTS, in_image=True)
    assert first.where == "/cache" and first.fix == "Run it with --volume NAME:/cache"
    assert second.where == "/runs"
    assert check_file_systems(_caches("/cache"), MOUNTS, in_image=False) == []
    # A folder that is mounted is kept, also when the host that gave it sits on an overlay itself.
    assert check_file_systems(_caches("/layer/c", "/layer/r"), MOUNTS, in_image=True) == []
    assert check_file_systems(_caches("/covered/c", "/covered/r"), MOUNTS, in_image=True) == []


def test_a_cache_that_is_mounted_noexec_is_an_error() -> None:
    (finding,) = check_file_systems(_caches("/mnt/my disk/cache", "/mnt/my disk/runs"), MOUNTS, in_image=False)
    assert finding.level == "error" and "compiled code cannot be loaded from it" in finding.what


def test_a_machine_that_lists_no_mounts_is_left_alone() -> None:
    assert check_file_systems(_caches("/home/cache"), "", in_image=True) == []


def test_a_full_or_unwritable_place_is_an_error_that_names_the_variable(tmp_path: Path) -> None:
    caches = CacheDirs.from_environment(tmp_path, {"DFLASH_RUNS": "file/runs"})
    (tmp_path / "file").write_text("")
    assert [(f.where, f.fix) for f in check_disk(caches, statvfs=_statvfs())] == [
        (str(tmp_path / "file"), "Set DFLASH_RUNS to a folder that is.")
    ]
    (tmp_path / "file").unlink()
    assert check_disk(caches, statvfs=_statvfs()) == []
    (finding,) = check_disk(caches, {"cache": 2 << 30, "runs": 1}, statvfs=_statvfs(free=1 << 30))
    assert "1.0 GiB free, 2.0 GiB needed for cache" in finding.what and "DFLASH_CACHE" in finding.fix


def test_too_few_inodes_are_an_error_although_bytes_are_free(tmp_path: Path) -> None:
    """triton-lang/triton PR 11779: a quota of 100,000 small files was used up, space was not."""
    caches = CacheDirs.from_environment(tmp_path, {})
    (finding,) = check_disk(caches, statvfs=_statvfs(inodes=100_000, free_inodes=900))
    assert finding.level == "error" and "900 files (inodes) free, 5000 needed for cache" in finding.what
    assert check_disk(caches, statvfs=_statvfs(inodes=100_000, free_inodes=90_000)) == []


def test_a_file_system_without_a_number_of_inodes_has_no_limit(tmp_path: Path) -> None:
    caches = CacheDirs.from_environment(tmp_path, {})
    assert check_disk(caches, statvfs=_statvfs(inodes=0, free_inodes=0)) == []


def test_the_free_space_here_is_the_one_that_is_not_reserved_for_root(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    caches = CacheDirs.from_environment(tmp_path, {})
    free = status.f_bavail * status.f_frsize
    assert len(check_disk(caches, {"cache": 1 << 60, "runs": 1})) == 1
    assert check_disk(caches, {"cache": free // 2, "runs": 1}) == []


def test_a_temporary_folder_that_is_not_there_is_named_with_what_is_taken_instead(tmp_path: Path) -> None:
    usual = (str(tmp_path / "none"), str(tmp_path))
    assert check_temporary({}, usual) == [] == check_temporary({"TMPDIR": str(tmp_path)}, ("/none",))
    (finding,) = check_temporary({"TMPDIR": "/gone"}, usual)
    assert (finding.level, finding.where) == ("warning", "TMPDIR") and f"{tmp_path} is taken instead" in finding.what


def test_no_temporary_folder_at_all_is_an_error() -> None:
    """A read-only root without a tmpfs: the compilers cannot even start."""
    (finding,) = check_temporary({}, ("/none",))
    assert finding.level == "error" and "--tmpfs /tmp" in finding.fix


@pytest.mark.parametrize(
    "mib, num_gpus, strict, level",
    [
        (8, 0, True, "error"),
        (31, 1, True, "error"),
        (8, 1, False, "warning"),  # a run of ours works: it has no worker processes
        (8, 2, False, "error"),
        (64, 1, True, None),
        (64, 2, True, "warning"),
        (512, 8, True, None),
    ],
)
def test_little_shared_memory_is_named_with_the_flag_to_add(
    tmp_path: Path, mib: int, num_gpus: int, strict: bool, level: str | None
) -> None:
    """pytorch/pytorch#5040: 64 MiB of a container; 8 MiB is --shm-size=8m."""
    findings = check_shared_memory(tmp_path, num_gpus=num_gpus, strict=strict, statvfs=_statvfs(size=mib << 20))
    assert [f.level for f in findings] == ([level] if level else [])
    for finding in findings:
        assert finding.what.startswith(f"is {mib} MiB of shared memory") and "--shm-size=1g" in finding.fix


def test_no_shared_memory_at_all_is_an_error(tmp_path: Path) -> None:
    (finding,) = check_shared_memory(tmp_path / "shm", num_gpus=0, strict=True)
    assert finding.level == "error" and finding.what.startswith("is 0 MiB")
