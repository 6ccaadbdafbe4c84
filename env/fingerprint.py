"""Everything needed to repeat a run, as one JSON: source, lock, machine, GPU, and the variables that torch reads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE_PREFIXES = ("TORCH", "PYTORCH", "TRITON", "CUDA", "NCCL", "OMP_", "MKL_", "CUBLAS", "NVIDIA_")
VARIABLE_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "CC", "CXX")


def fingerprint(root: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what this process runs: plain JSON types; None where the machine cannot say (no git, no GPU).

    Imports neither torch nor the model; versions come from installed metadata, the GPU's from nvidia-smi.
    """
    return {
        "git": _git(root),
        "source_sha256": source_hash(root, ("dflash", "pipeline", "env")),
        "lock_sha256": {path.name: _sha256(path) for path in sorted((root / "lockfiles").glob("*.txt"))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": _usable_cpus()},
        "memory_bytes": _memory_bytes(),
        "packages": {
            name: _version(name) for name in ("torch", "transformers", "triton", "safetensors", "tokenizers", "numpy")
        },
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


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch, Triton, CUDA, NCCL or the loader of libraries read, sorted by name."""
    return {k: environ[k] for k in sorted(environ) if k.startswith(VARIABLE_PREFIXES) or k in VARIABLE_NAMES}


def _git(root: Path) -> dict[str, Any] | None:
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return None
    status = _output(["git", "-C", str(root), "status", "--porcelain"])
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _gpus() -> dict[str, Any] | None:
    listing = _output(
        ["nvidia-smi", "--query-gpu=driver_version,name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    )
    if not listing:
        return None
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    devices = [{"name": row[1], "capability": row[2], "memory_mib": row[3]} for row in rows if len(row) == 4]
    return {"driver": rows[0][0], "devices": devices}


def _output(command: list[str]) -> str | None:
    """Return what a program prints, or None if it is missing, fails, or does not end in 20 s (a sick driver hangs)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
