"""What the project's own locks must hold: one torch, its CUDA packages where it is a CUDA build, and one uv."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from env.locks import NAMES, parse_lock

LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
CUDA = {"cublas", "cuda-cupti", "cuda-nvrtc", "cuda-runtime", "cudnn", "cusparse", "cusparselt", "nccl", "nvjitlink"}


@pytest.mark.parametrize("name", ["runtime", "dev", "next"])
def test_linux_gets_the_cuda_packages_and_triton_and_other_systems_none(repository: Path, name: str) -> None:
    """uv#9310, #14237, sleap-nn PR 635: a marker that is lost gives the wrong build, or one without cuDNN."""
    lock = repository / "lockfiles" / f"{name}.txt"
    here, there = parse_lock(lock, LINUX), parse_lock(lock, MAC)
    assert "torch" in here and here["torch"] == there["torch"], "exactly one torch for every system"
    nvidia = {re.sub(r"^nvidia-|-cu\d+$", "", pin) for pin in here if pin.startswith("nvidia-")}
    assert nvidia >= CUDA and "triton" in here
    assert not [pin for pin in there if pin.startswith("nvidia-")] and "triton" not in there


def test_the_cuda_packages_are_of_one_cuda(repository: Path) -> None:
    pins = parse_lock(repository / "lockfiles" / "runtime.txt", LINUX)
    of_cuda = {pins[f"nvidia-cuda-{part}"][0].split(".")[0] for part in ("runtime", "nvrtc", "cupti")}
    suffixes = {match[1] for pin in pins if (match := re.search(r"-cu(\d+)$", pin))}
    assert of_cuda == suffixes and len(of_cuda) == 1


def test_one_uv_installs_everything_and_is_pinned_by_hash(repository: Path) -> None:
    """evalml PR 165: after an upgrade of uv a plain version chose another CUDA build."""
    versions = set()
    for name in NAMES:
        text = (repository / "lockfiles" / f"{name}.txt").read_text(encoding="utf-8")
        (match,) = re.findall(r"^uv==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, flags=re.MULTILINE)
        versions.add(match)
    assert len(versions) == 1
