"""Everything needed to repeat a run, as one JSON: source, image, lock, machine, GPU, and the variables torch reads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from env.caches import OWNED_VARIABLES
from env.errors import EnvError
from env.output import output_of

VARIABLE_PREFIXES = ("TORCH", "PYTORCH", "TRITON", "CUDA", "NCCL", "OMP_", "MKL_", "CUBLAS", "NVIDIA_")
VARIABLE_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "CC", "CXX")
_TIMEOUT_SECONDS = 20.0  # nvidia-smi hangs with a sick driver, git on a file system that does not answer


def fingerprint(root: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what this process runs: plain JSON types; None where the machine cannot say (no git, no GPU, no image).

    Imports neither torch nor the model; versions come from installed metadata, the GPU's from nvidia-smi.
    Raises EnvError when the image's own description cannot be read.
    """
    image = read_image(root / "image.json")
    return {
        "git": _git(root, image),
        "image": image,
        "source_sha256": source_hash(root, ("dflash", "pipeline", "env")),
        "lock_sha256": {path.name: _sha256(path) for path in sorted((root / "lockfiles").glob("*.txt"))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": _usable_cpus()},
        "memory_bytes": _memory_bytes(),
        "packages": installed_versions(),
        "gpus": _gpus(),
        "variables": relevant_variables(os.environ if environ is None else environ),
    }


def source_hash(root: Path, folders: Iterable[str] = ("dflash", "pipeline")) -> str:
    """Return the sha256 over names and contents of every .py file of the folders, in name order.

    Raises FileNotFoundError for a folder that is not there: a hash of nothing would look like agreement.
    """
    digest = hashlib.sha256()
    for folder in sorted(folders):
        if not (root / folder).is_dir():
            raise FileNotFoundError(root / folder)
        for path in sorted((root / folder).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def read_image(path: Path) -> dict[str, Any] | None:
    """Return what the build wrote into the image: commit, dirty, tag, lock_sha256, base, torch; None outside an image.

    The file alone tells: an image unpacked for a host without an engine does not keep the image's variables.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EnvError(f"cannot be read ({error})", where=str(path), fix="Build the image again.") from None
    if not isinstance(value, dict):
        raise EnvError("is no JSON object", where=str(path), fix="Build the image again.")
    return value


def installed_versions(path: list[str] | None = None) -> dict[str, str]:
    """Return {name: version} of the distributions on `path` (default: sys.path), by name in lower case with dashes.

    Of a name that is there twice the first counts, as it does for import.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions(path=sys.path if path is None else path):
        name = distribution.metadata["Name"]
        if name:  # a folder left of a removed package has none
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return dict(sorted(found.items()))


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch, Triton, CUDA, NCCL or the loader of libraries read, sorted by name.

    Without the places of compiler caches: what a shell left in those is overwritten before torch is imported.
    """
    return {
        name: environ[name]
        for name in sorted(environ)
        if (name.startswith(VARIABLE_PREFIXES) or name in VARIABLE_NAMES) and name not in OWNED_VARIABLES
    }


def _git(root: Path, image: Mapping[str, Any] | None) -> dict[str, Any] | None:
    commit = output_of(["git", "-C", str(root), "rev-parse", "HEAD"], timeout_seconds=_TIMEOUT_SECONDS)
    if commit is None:
        # An image holds the source without its repository; the build noted the commit.
        return None if image is None else {"commit": image.get("commit"), "dirty": image.get("dirty")}
    status = output_of(["git", "-C", str(root), "status", "--porcelain"], timeout_seconds=_TIMEOUT_SECONDS)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _gpus() -> dict[str, Any] | None:
    listing = output_of(
        ["nvidia-smi", "--query-gpu=driver_version,name,compute_cap,memory.total", "--format=csv,noheader,nounits"],
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    if not listing:
        return None
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    devices = [{"name": row[1], "capability": row[2], "memory_mib": row[3]} for row in rows if len(row) == 4]
    return {"driver": rows[0][0], "devices": devices}


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    print(json.dumps(fingerprint(Path(__file__).resolve().parent.parent), indent=2))
