"""Threads and compilation outside training: the intra-op thread count, and one compile of every declared shape."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dflash.compile import CompileGate
from dflash.compile.counters import disk_counts
from dflash.config import DrafterConfig
from pipeline.compile_lock import cache_folder, compiling
from pipeline.config import RunConfig
from pipeline.replica import DTYPES, Borrowed, Replica, new_drafter
from pipeline.target_forward import TargetForward, recorded_shapes
from pipeline.targets import TargetFolder, load_target


def set_threads(num_workers: int, device: torch.device) -> None:
    """Share the CPU's cores among `num_workers` threads that compute on it.

    Inductor writes the count into the code it generates, so the cache stage and training must agree on it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // num_workers) if device.type == "cpu" else cores)


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def compile_once(config: RunConfig, folder: TargetFolder, drafter: DrafterConfig) -> dict[str, Any]:
    """Compile one drafter and, where it runs beside, the target for every declared shape, alone, and return what it
    took and what lies on disk.

    Training's workers then find the code in the cache, whichever of them comes first.
    """
    device = torch.device(config.topology.drafters[0])
    before = torch.get_num_threads()
    set_threads(len(config.topology.drafters), device)
    try:
        target = load_target(folder, DTYPES[config.train.precision], "cpu")
        gate = CompileGate(workers=1, backend=config.compile.backend)
        borrowed = Borrowed.of(target, device, DTYPES[config.train.precision])
        start = new_drafter(config, drafter, borrowed.head_VD)
        replica = Replica("cache", config, drafter, start, borrowed, device, gate)
        shapes = recorded_shapes(config)
        if shapes:
            target = load_target(folder, getattr(torch, config.target.dtype), config.topology.targets[0])
        begin, counts = time.perf_counter(), disk_counts()

        def everything() -> None:
            replica.warm_up()
            if shapes:
                TargetForward.of(config, drafter, target).record(shapes, gate)

        with compiling(cache_folder(), say), gate.worker("cache"):
            gate.warm_up(everything)
        seconds = round(time.perf_counter() - begin, 2)
        report = gate.report()
        gate.close()
    finally:
        torch.set_num_threads(before)
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    files = [p for p in Path(place).rglob("*") if p.is_file()] if place else []
    return {
        "seconds": seconds,
        "graphs": report["compiles"],
        **disk_counts(counts),
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
    }
