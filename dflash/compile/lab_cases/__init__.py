"""What goes wrong when threads and torch.compile meet, one case a function, with the gate and without it.

Each case runs alone in a process of its own (lab.py starts it) and returns an Outcome.
Sources: pytorch#126024, #118260, #105943, #168042 and the study behind this project.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.compile.lab_cases.collisions import cold_start_on_one_gpu, random_lengths
from dflash.compile.lab_cases.common import Case, Outcome
from dflash.compile.lab_cases.forced import (
    cached_call,
    recompile_limit,
    rng_rewind,
    settings_undone,
    silent_eager,
    stuck_flag,
)
from dflash.compile.settings import shim_missing_gpu

CASES: dict[str, Case] = {
    "cached call": Case(cached_call, "forced", ("cpu",), "crash"),
    "silent eager": Case(silent_eager, "forced", ("cpu",), "eager"),
    "recompile limit": Case(recompile_limit, "forced", ("cpu",), "eager"),
    "rng rewind": Case(rng_rewind, "forced", ("cpu",), "wrong"),
    "settings undone": Case(settings_undone, "forced", ("cpu",), "wrong"),
    "stuck flag": Case(stuck_flag, "forced", ("cpu",), "crash"),
    "random lengths": Case(random_lengths, "random", ("cpu", "cuda"), "crash"),
    "cold start": Case(cold_start_on_one_gpu, "random", ("cuda",), "hang"),
}


def run_case(name: str, gated: bool, device: str, seed: int) -> Outcome:
    """Run one case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shim_missing_gpu()  # a CUDA build without a GPU would die of another fault than the one that is shown
    return CASES[name].run(gated, device, seed)


def available(devices: Sequence[str]) -> list[str]:
    """Return those of `devices` that this machine has."""
    return [d for d in devices if d == "cpu" or (d == "cuda" and torch.cuda.is_available())]
