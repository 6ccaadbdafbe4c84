"""Variables that a shell or another stack left behind and that change what torch, Triton, CUDA or the loader do."""

from __future__ import annotations

import os
from collections.abc import Mapping

from env.caches import OWNED_VARIABLES
from env.findings import Finding, error, warning

_SWITCHES_OFF = {
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "a failed compile runs eagerly in silence",
    "TRITON_INTERPRET": "Triton kernels run in an interpreter",
}
"""Errors unless the value is 0."""
_EFFECTS = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "nothing that was compiled is found again",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "it decides whether compiled graphs are found again",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "compiled graphs can come from another host",
    "TRITON_ALWAYS_COMPILE": "nothing that was compiled is found again",
    "TRITON_CACHE_MANAGER": "kernels are kept somewhere else",
    "TRITON_KERNEL_OVERRIDE": "kernels are replaced by files of TRITON_OVERRIDE_DIR",
    "CUDA_CACHE_DISABLE": "the driver compiles PTX anew in every process",
    "CUDA_FORCE_PTX_JIT": "the driver compiles every kernel anew from PTX",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for, which is slow",
    "NVIDIA_TF32_OVERRIDE": "it changes the numbers of every float32 product",
    "NCCL_P2P_DISABLE": "GPUs exchange through the host's memory; it is for finding a fault, not for runs",
    "NCCL_SHM_DISABLE": "GPUs exchange through the network; it is for finding a fault, not for runs",
    "LD_PRELOAD": "the loader puts it before every library",
    "PYTHONPATH": "its modules come before the locked ones",
}
_HARMLESS = frozenset(
    {
        *("TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCHDYNAMO_VERBOSE", "TORCH_HOME"),
        *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    }
)
"""They change what is printed, or a folder that nothing of ours uses; or torchrun sets them, or wants them set."""
_OF_TORCHRUN = "TORCHELASTIC_"
_WATCHED_PREFIXES = ("TORCH", "PYTORCH", "TRITON")
_GPU_LIBRARIES = (
    *("libtorch", "libc10", "libcudart.", "libcublas", "libcudnn", "libnccl.", "libnvrtc", "libcufft", "libcurand"),
    *("libcusparse", "libcusolver", "libcupti", "libnvJitLink", "libnvshmem"),
)
"""What torch's wheels bring; libcuda is not among them, it belongs to the driver."""


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return leftover variables that change a run; those that environment_for_compile overwrites do not."""
    findings = []
    for name in sorted(environ):
        value = environ[name]
        if not value or name in OWNED_VARIABLES or name in _HARMLESS or name.startswith(_OF_TORCHRUN):
            continue
        if name in _SWITCHES_OFF and value != "0":
            findings.append(error(name, f"is {value!r}: {_SWITCHES_OFF[name]}", f"Run: unset {name}"))
        elif name in _EFFECTS or name.startswith(_WATCHED_PREFIXES):
            effect = f": {_EFFECTS[name]}" if name in _EFFECTS else " and can change the run"
            findings.append(
                warning(name, f"is set to {value[:80]!r}{effect}", f"Unless it is meant, run: unset {name}")
            )
    return [*findings, *_check_library_path(environ.get("LD_LIBRARY_PATH", ""))]


def _check_library_path(value: str) -> list[Finding]:
    """Name the folders with CUDA or torch libraries that may be loaded instead of those of the lock.

    libtorch finds its own by RPATH, which comes before this variable; but cuDNN, nvJitLink and others look for their
    parts by RUNPATH, which comes after it (torch 2.11.0 and its NVIDIA wheels, readelf).
    """
    findings = []
    for folder in dict.fromkeys(filter(None, value.split(os.pathsep))):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue  # a folder that is not there shadows nothing
        shadowing = [name for name in names if name.startswith(_GPU_LIBRARIES) and ".so" in name]
        if shadowing:
            what = f"{folder} holds {shadowing[0]}, which can be loaded instead of the locked one"
            findings.append(warning("LD_LIBRARY_PATH", what, "Take the folder out of LD_LIBRARY_PATH."))
    return findings
