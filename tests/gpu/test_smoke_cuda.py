"""The smoke test on a GPU: its kernel runs, flex has the dense gradients, and the three-step run passes its gates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import smoke_checks
from pipeline.errors import VerificationFailed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
# Whether the environment is the lock's is doctor's matter and has tests of its own; this one may run in another.
WITHOUT_DOCTOR = """
import sys
from pathlib import Path
from env import doctor
from pipeline import smoke
doctor.check_lock = lambda *arguments: []  # before the verify stage imports it
sys.exit(smoke.smoke("cuda", Path(sys.argv[1]), checks=lambda root: []))
"""


def test_the_kernel_runs_on_the_gpu_with_torchs_numbers() -> None:
    assert "1000 numbers as torch computes them" in smoke_checks.triton_kernel(CUDA)


def test_a_kernel_with_wrong_numbers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached kernels of another architecture gave wrong output in silence (vllm#41871)."""
    from pipeline import smoke_kernel

    right: Any = smoke_kernel.double_and_add

    class OneLess:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda x, y, out, num, BLOCK: right[grid](x, y, out, num - 1, BLOCK=BLOCK)

    monkeypatch.setattr(smoke_kernel, "double_and_add", OneLess())
    with pytest.raises(VerificationFailed, match="triton: 1 of 1000 numbers are wrong"):
        smoke_checks.triton_kernel(CUDA)


@pytest.mark.timeout(600)
def test_cold_it_passes_and_warm_it_compiles_nothing(tmp_path: Path) -> None:
    """NVIDIA-TAO/tao-skill-bank PR 150: counted, not timed."""
    environ = {**os.environ, "DFLASH_CACHE": str(tmp_path / "cache"), "DFLASH_RUNS": str(tmp_path / "runs")}
    written = {}
    for name in ("cold", "warm"):
        path = tmp_path / f"{name}.json"
        command = [sys.executable, "-c", WITHOUT_DOCTOR, str(path)]
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        written[name] = json.loads(path.read_text())
    assert written["cold"]["device"] == "cuda"
    rows = {row["name"]: row["detail"] for row in written["cold"]["checks"]}
    assert rows["flex attention"].startswith("compiled; output, gradient of q, gradient of k, gradient of v as dense")
    assert "drafter-1 on cuda:0 (flex)" in rows["train stage"]
    assert len(written["cold"]["gates"]) == 14
    assert written["cold"]["compiled"]["new_files"] > 0
    assert written["warm"]["compiled"]["new_files"] == 0
