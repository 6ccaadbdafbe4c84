"""Runs the fp8 kernels on the CPU, Triton interpreting them, and prints as JSON how far they are from torch's casts.

A process of its own, as in interpreted.py. The interpreter rounds to fp8 wrongly (1.99 becomes 1), so the numbers are
compared in float32 and fp8 is given only what it holds exactly; tests/gpu has the rounding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.dflash.kernels.interpreted import ROOT

SHAPES = {"one row": (1, 16), "odd rows": (37, 48), "whole tiles": (128, 64), "past a tile": (131, 80)}
DTYPES = (torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
HEADS: dict[str, tuple[float, float | None]] = {"plain": (1.0, None), "multiplier": (0.5, None), "softcap": (1.7, 5.0)}


def run() -> dict[str, float]:
    """Return the largest difference of each case."""
    command = [sys.executable, "-m", "tests.unit.dflash.kernels.interpreted_fp8"]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _both(cast: Any, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
    R, C = shape
    x = torch.randn(R, C, generator=torch.Generator().manual_seed(0)) * 3
    if dtype != torch.float32:
        x = x.to(dtype).float()
    inverse = torch.tensor(2.0)
    rows = torch.full((R, C), float("nan")).to(dtype)
    columns = torch.full((C, -(-R // 16) * 16), float("nan")).to(dtype)
    cast.write_both(x.bfloat16() if dtype != torch.float32 else x, inverse, rows, columns)
    return {
        "rows": float((rows.float() - x * 2).abs().max()),
        "columns": float((columns[:, :R].float() - x.T * 2).abs().max()),
        "padding": float(columns[:, R:].float().abs().sum()),
    }


def _chances(chances: Any, multiplier: float, softcap: float | None) -> dict[str, float]:
    from dflash.fp8_head import FACTOR, Fp8Head

    generator = torch.Generator().manual_seed(1)
    logits_RV = (torch.randn(5, 4112, generator=generator) * 6).bfloat16()
    label_R = torch.randint(0, 4112, (5,), generator=generator)
    label_R[:2] = torch.tensor([0, 4111])
    shaped_RV = logits_RV.double().requires_grad_()
    value_RV = shaped_RV * multiplier
    if softcap is not None:
        value_RV = softcap * torch.tanh(value_RV / softcap)
    (slope_RV,) = torch.autograd.grad(value_RV.sum(), shaped_RV)
    expected = (value_RV.softmax(1) * slope_RV / multiplier).detach().scatter(1, label_R[:, None], 0.0) * FACTOR
    top_R = value_RV.detach().amax(1)
    total_R = torch.exp(value_RV.detach() - top_R[:, None]).sum(1)
    found: Any = SimpleNamespace(top_R=top_R.float(), total_R=total_R.float())
    out, plain = torch.full((5, 4112), float("nan")), torch.empty(5, 4112)
    chances.write_chances(logits_RV, label_R, found, multiplier, softcap, FACTOR, out)
    Fp8Head._write_chances(logits_RV, label_R, found, multiplier, softcap, plain)
    return {
        "chances": float((out - expected).norm() / expected.norm()),
        "plain form": float((plain - expected).norm() / expected.norm()),
        "label": float(out.gather(1, label_R[:, None]).abs().sum()),
    }


def _main() -> None:
    from dflash.kernels import cast, chances

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name, shape in SHAPES.items():
        for dtype in DTYPES:
            found |= {f"{name}, {dtype}: {key}": value for key, value in _both(cast, shape, dtype).items()}
    for name, (multiplier, softcap) in HEADS.items():
        found |= {f"{name}: {key}": value for key, value in _chances(chances, multiplier, softcap).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
