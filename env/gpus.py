"""NVIDIA GPUs: does the driver answer, is it new enough for the locked torch, has the wheel code for the GPU?

Only programs know: nvidia-smi, and a child process that imports torch (never this one). Without a GPU neither starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from env.findings import Finding, error, warning
from env.installed import REMAKE

MIN_DRIVER = {11: (450,), 12: (525,), 13: (580,)}
"""CUDA major version -> oldest driver (NVIDIA, CUDA Compatibility, table 1 of "minor version compatibility")."""
_SMI_TIMEOUT_SECONDS = 20.0  # a sick driver hangs
_TORCH_TIMEOUT_SECONDS = 180.0  # a cold import of torch from a slow disk takes a minute
_HIDDEN = frozenset({"", "-1", "none", "void", "NoDevFiles"})
_ON_CPU = "To train on the CPU: export CUDA_VISIBLE_DEVICES="
_SCRIPT = """
import json, torch
devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
print(json.dumps({
    "cuda": torch.version.cuda,
    "kernels": torch.cuda.get_arch_list(),
    "devices": [[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in devices],
}))
"""


@dataclass(frozen=True, kw_only=True)
class SmiAnswer:
    """What nvidia-smi said: None for a program that is not there, else its exit code and all it printed."""

    returncode: int | None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class TorchAnswer:
    """What torch sees: kernels as "sm_90" or "compute_90", devices as (name, major, minor), or why it said nothing."""

    cuda: str | None = None
    kernels: Sequence[str] = ()
    devices: Sequence[tuple[str, int, int]] = ()
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    findings: list[Finding] = field(default_factory=list)
    num_gpus: int = 0
    """As many as torch can use, or as nvidia-smi lists while torch was not asked."""


def check_gpus(
    environ: Mapping[str, str],
    *,
    devices: Path = Path("/dev"),
    cuda: str | None = None,
    ask_smi: Callable[[Mapping[str, str]], SmiAnswer] | None = None,
    ask_torch: Callable[[Mapping[str, str]], TorchAnswer] | None = None,
) -> GpuReport:
    """Return what is wrong with the GPUs that this process may use; nothing when they are hidden or there are none.

    cuda   version that the environment brings (default: installed_cuda())
    """
    if environ.get("CUDA_VISIBLE_DEVICES", "all") in _HIDDEN:
        return GpuReport()
    nodes = (devices / "nvidiactl").exists() or (devices / "nvidia0").exists()
    answer = (ask_smi or ask_nvidia_smi)(environ)
    if answer.returncode is None:
        if not nodes:
            return GpuReport()
        what = "there is an NVIDIA device but no nvidia-smi: the driver's tools were not put into this container"
        fix = "Start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return GpuReport(findings=[warning(str(devices), what, fix)])
    if answer.returncode != 0:
        return GpuReport(findings=[explain_smi_failure(answer.text, nodes=nodes)])
    drivers = [line.split(",")[0].strip() for line in answer.text.splitlines() if line.strip()]
    if not drivers:
        return GpuReport()
    seen = (ask_torch or ask_torch_in_child)(environ)
    if seen.devices:
        # A driver older than the table says can still do, with NVIDIA's forward compatibility package.
        return GpuReport(findings=check_kernels(seen), num_gpus=len(seen.devices))
    findings = check_driver(drivers[0], cuda or seen.cuda or installed_cuda())
    if not findings:
        if seen.failure:
            findings = [error("torch", f"cannot look for the GPU ({seen.failure})", REMAKE)]
        elif seen.cuda is None:
            what = f"is built without CUDA, although nvidia-smi lists {len(drivers)} GPUs"
            findings = [error("torch", what, f"Install lockfiles/runtime.txt. {_ON_CPU}")]
        else:
            what = f"sees no GPU, although nvidia-smi lists {len(drivers)}"
            findings = [error("torch", what, f"Compare CUDA_VISIBLE_DEVICES with nvidia-smi -L. {_ON_CPU}")]
    return GpuReport(findings=findings, num_gpus=len(drivers))


def explain_smi_failure(text: str, *, nodes: bool) -> Finding:
    """Return what an nvidia-smi that failed means.

    nodes   there is an NVIDIA device in /dev: without one a machine that merely has the tools is no error
    """
    said = next((line.strip() for line in text.splitlines() if line.strip()), "no output")[:160]
    if "Driver/library version mismatch" in text:
        what = f"the driver was renewed while its old kernel module is loaded ({said})"
        return error("nvidia-smi", what, "Restart the host, then run the same command: it resumes.")
    if "NVML: Unknown Error" in text or "GPU is lost" in text:
        # A reload of systemd's units on the host takes the devices away (nvidia-container-toolkit#48).
        what = f"the container lost its GPUs ({said})"
        return error("nvidia-smi", what, "Restart the container and run the same command: it resumes.")
    if nodes:
        return error("nvidia-smi", f"fails ({said})", f"Mend the driver. {_ON_CPU}")
    return warning(
        "nvidia-smi", f"finds no GPU ({said}), so the CPU would be used", "If there is one, mend its driver."
    )


def check_driver(driver: str, cuda: str | None) -> list[Finding]:
    """Return whether a driver ("570.86.15") is too old for a CUDA version ("13.0.96"); None needs no driver."""
    minimum = MIN_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver))
    if minimum is None or not numbers or numbers >= minimum:
        return []
    needed = ".".join(map(str, minimum))
    what = f"driver {driver} is too old for CUDA {cuda} of the locked torch, which needs {needed} or newer"
    return [error("NVIDIA driver", what, f"Install driver {needed} or newer on the host. {_ON_CPU}")]


def check_kernels(seen: TorchAnswer) -> list[Finding]:
    """Return the GPUs that the wheel has no machine code for: error without PTX either, warning with it."""
    findings = []
    for name, major, minor in dict.fromkeys(seen.devices):
        if any(_runs(kernel, major, minor, "sm") for kernel in seen.kernels):
            continue
        where, has = f"{name} ({major}.{minor})", ", ".join(seen.kernels) or "none"
        if any(_runs(kernel, major, minor, "compute") for kernel in seen.kernels):
            what = f"torch has no machine code for it (only {has}): the driver compiles it at the first start"
            findings.append(warning(where, what, "Keep the cache folder: it is compiled once."))
        else:
            what = f"torch has no code that runs on it (only {has})"
            fix = f"Use another GPU (CUDA_VISIBLE_DEVICES), or a lock whose torch knows it. {_ON_CPU}"
            findings.append(error(where, what, fix))
    return findings


def _runs(kernel: str, major: int, minor: int, kind: str) -> bool:
    """sm_80 runs on 8.0 and 8.6, never on 9.0; compute_80 is compiled for anything newer; sm_90a only runs on 9.0."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", kernel)
    if match is None or match[1] != kind:
        return False
    built = (int(match[2]), int(match[3]))
    if match[4] == "a":
        return built == (major, minor)
    if kind == "compute" and not match[4]:
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def installed_cuda() -> str | None:
    """Return the version of the CUDA runtime among the installed distributions, or None."""
    for name in ("nvidia-cuda-runtime", *(f"nvidia-cuda-runtime-cu{major}" for major in MIN_DRIVER)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def ask_nvidia_smi(environ: Mapping[str, str]) -> SmiAnswer:
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return SmiAnswer(returncode=None)
    command = [program, "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader"]
    try:
        done = _run(command, environ, _SMI_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return SmiAnswer(returncode=124, text=f"no answer in {_SMI_TIMEOUT_SECONDS:.0f} s")
    except OSError as failure:
        return SmiAnswer(returncode=126, text=failure.strerror or str(failure))
    return SmiAnswer(returncode=done.returncode, text=done.stdout + done.stderr)


def ask_torch_in_child(environ: Mapping[str, str]) -> TorchAnswer:
    command = [sys.executable, "-c", _SCRIPT]
    try:
        done = _run(command, environ, _TORCH_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return TorchAnswer(failure=f"no answer in {_TORCH_TIMEOUT_SECONDS:.0f} s")
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        devices = [(name, major, minor) for name, major, minor in said["devices"]]
        return TorchAnswer(cuda=said["cuda"], kernels=said["kernels"], devices=devices)
    except (ValueError, LookupError, TypeError):
        return TorchAnswer(failure=(done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:160])


def _run(command: list[str], environ: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=dict(environ), capture_output=True, text=True, errors="replace", timeout=timeout, check=False
    )
