"""GPUs that are not here: what nvidia-smi and torch would say, and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from env.gpus import (
    MIN_DRIVER,
    GpuReport,
    SmiAnswer,
    TorchAnswer,
    ask_nvidia_smi,
    ask_torch_in_child,
    check_driver,
    check_gpus,
    check_kernels,
    explain_smi_failure,
)
from env.locks import parse_lock

H200 = SmiAnswer(returncode=0, text="580.159.03, NVIDIA H200, 9.0\n580.159.03, NVIDIA H200, 9.0\n")
SEES_TWO = TorchAnswer(cuda="13.0", kernels=("sm_80", "sm_90"), devices=(("NVIDIA H200", 9, 0),) * 2)
SEES_NONE = TorchAnswer(cuda="13.0")


def _check(smi: SmiAnswer, torch: TorchAnswer | None, devices: Path, **environ: str) -> GpuReport:
    def answer(_: Mapping[str, str]) -> TorchAnswer:
        assert torch is not None, "torch was asked"
        return torch

    return check_gpus(environ, devices=devices, cuda="13.0.96", ask_smi=lambda _: smi, ask_torch=answer)


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_gpus_that_work_have_no_findings_and_are_counted(devices: Path) -> None:
    assert _check(H200, SEES_TWO, devices) == GpuReport(findings=[], num_gpus=2)


def test_a_machine_without_gpu_is_not_asked_further(tmp_path: Path) -> None:
    assert _check(SmiAnswer(returncode=None), None, tmp_path) == GpuReport()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_asked(devices: Path, hidden: str) -> None:
    assert _check(SmiAnswer(returncode=9), None, devices, CUDA_VISIBLE_DEVICES=hidden) == GpuReport()


def test_a_device_without_nvidia_smi_is_a_warning(devices: Path) -> None:
    (finding,) = _check(SmiAnswer(returncode=None), None, devices).findings
    assert finding.level == "warning" and "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in finding.fix


def test_an_old_driver_is_an_error_that_names_both_versions(devices: Path) -> None:
    old = SmiAnswer(returncode=0, text="570.86.15, NVIDIA H200, 9.0\n")
    report = _check(old, SEES_NONE, devices)
    (finding,) = report.findings
    assert finding.level == "error" and report.num_gpus == 1
    assert "driver 570.86.15 is too old for CUDA 13.0.96 of the locked torch, which needs 580 or newer" in finding.what


def test_an_old_driver_with_which_torch_works_is_no_error(devices: Path) -> None:
    """NVIDIA's forward compatibility package makes this possible on data-centre GPUs."""
    assert _check(SmiAnswer(returncode=0, text="570.86.15, NVIDIA H200, 9.0\n"), SEES_TWO, devices).findings == []


@pytest.mark.parametrize(
    "torch, what",
    [
        (SEES_NONE, "sees no GPU, although nvidia-smi lists 2"),
        (TorchAnswer(), "is built without CUDA, although nvidia-smi lists 2 GPUs"),
        (TorchAnswer(failure="ImportError: libcudart.so.13"), "cannot look for the GPU (ImportError: libcudart.so.13)"),
    ],
)
def test_a_torch_that_would_silently_use_the_cpu_is_an_error(devices: Path, torch: TorchAnswer, what: str) -> None:
    (finding,) = _check(H200, torch, devices).findings
    assert (finding.level, finding.where, finding.what) == ("error", "torch", what)


@pytest.mark.parametrize(
    "driver, cuda, fits",
    [
        ("580.65.06", "13.0.96", True),
        ("579.99", "13.0.96", False),
        ("525.60.13", "12.8.90", True),
        ("470.82.01", "12.8.90", False),
        ("1000.1", "13.0.96", True),  # by number, not by text
        ("470.82.01", None, True),
    ],
)
def test_the_driver_is_compared_with_the_cuda_version(driver: str, cuda: str | None, fits: bool) -> None:
    assert (check_driver(driver, cuda) == []) is fits


@pytest.mark.parametrize("lock", ["runtime", "next"])
def test_the_table_of_drivers_knows_the_locked_cuda(repository: Path, lock: str) -> None:
    """So that a newer lock cannot switch the check off."""
    pins = parse_lock(repository / f"lockfiles/{lock}.txt")
    assert int(pins["nvidia-cuda-runtime"][0].partition(".")[0]) in MIN_DRIVER


def test_a_container_that_lost_its_gpus_is_told_so() -> None:
    """NVIDIA/nvidia-container-toolkit#48: a daemon-reload on the host detaches them."""
    finding = explain_smi_failure("Failed to initialize NVML: Unknown Error\n", nodes=True)
    assert finding.level == "error" and finding.what.startswith("the container lost its GPUs (Failed to initialize")
    assert finding.fix == "Restart the container and run the same command: it resumes."


@pytest.mark.parametrize(
    "text, nodes, level, said",
    [
        ("Failed to initialize NVML: Driver/library version mismatch", True, "error", "the driver was renewed"),
        ("Failed to initialize NVML: Insufficient Permissions", True, "error", "Insufficient Permissions"),
        ("no answer in 20 s", True, "error", "no answer in 20 s"),
        ("", True, "error", "no output"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the driver",
            False,
            "warning",
            "CPU would be used",
        ),
    ],
)
def test_other_failures_of_nvidia_smi(text: str, nodes: bool, level: str, said: str) -> None:
    finding = explain_smi_failure(text, nodes=nodes)
    assert finding.level == level and said in finding.what


@pytest.mark.parametrize(
    "kernels, capability, level",
    [
        (("sm_80",), (8, 0), None),
        (("sm_80",), (8, 6), None),  # the same major version, a newer minor one
        (("sm_86",), (8, 0), "error"),
        (("sm_90",), (10, 0), "error"),  # another major version
        (("sm_90", "compute_90"), (10, 0), "warning"),  # PTX is compiled for anything newer
        (("sm_90", "compute_90"), (8, 0), "error"),  # and for nothing older
        (("sm_90a",), (9, 0), None),
        (("sm_90a", "compute_90a"), (10, 0), "error"),  # architecture-specific code has no future
        (("sm_100",), (10, 0), None),
        (("sm_120",), (12, 1), None),
        (("sm_100f",), (10, 3), None),  # family-specific
        (("compute_100f",), (12, 0), "error"),
        ((), (9, 0), "error"),
        (("gfx942",), (9, 0), "error"),
    ],
)
def test_kernels_of_the_wheel_against_the_gpu(
    kernels: tuple[str, ...], capability: tuple[int, int], level: str | None
) -> None:
    """triton-lang/triton PR 1593 and vllm#41871: code for another architecture, by full capability."""
    findings = check_kernels(TorchAnswer(kernels=kernels, devices=(("GPU", *capability),) * 2))
    assert [f.level for f in findings] == ([level] if level else [])
    assert all(f.where == f"GPU ({capability[0]}.{capability[1]})" for f in findings)


def test_nvidia_smi_is_run_and_its_words_are_kept_when_it_fails(tmp_path: Path) -> None:
    assert ask_nvidia_smi({"PATH": str(tmp_path)}) == SmiAnswer(returncode=None)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho Failed to initialize NVML: Unknown Error; exit 255\n")
    program.chmod(0o755)
    answer = ask_nvidia_smi({"PATH": str(tmp_path)})
    assert answer == SmiAnswer(returncode=255, text="Failed to initialize NVML: Unknown Error\n")


def test_torch_is_asked_in_a_child_and_a_broken_one_says_why(tmp_path: Path) -> None:
    seen = ask_torch_in_child({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert seen.failure == "" and seen.cuda and not seen.devices
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    broken = ask_torch_in_child({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert broken.failure == "ImportError: libcudart.so.13: cannot open"
