"""Threads and compilation outside training: the intra-op thread count, and one compile of every declared shape."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from dflash.compile import CompileGate
from dflash.compile.counters import disk_counts
from dflash.config import DrafterConfig
from pipeline.compile_lock import cache_folder, compiling
from pipeline.config import RunConfig
from pipeline.own_gpus import compiled_places
from pipeline.replica import DTYPES, Borrowed, Replica, new_drafter
from pipeline.target_forward import TargetForward, recorded_shapes
from pipeline.targets import TargetFolder, load_target


def set_threads(num_workers: int, device: torch.device, *, apart: bool = False) -> None:
    """Share the CPU's cores among `num_workers` that compute on it, or that are processes (`apart`) of one host.

    Inductor writes the count into the code it generates for the CPU, so the cache stage and training must agree on it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // num_workers) if apart or device.type == "cpu" else cores)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def compile_once(config: RunConfig, folder: TargetFolder, drafter: DrafterConfig) -> dict[str, Any]:
    """Compile the drafter and, where it runs beside, the target for every declared shape and every device, alone, and
    return what it took and what lies on disk.

    Training's workers then find the code in the cache, whichever of them comes first.
    """
    devices, homes = ([torch.device(name) for name in names] for names in compiled_places(config))
    shapes = recorded_shapes(config)
    if not devices:
        say("cache: training's GPUs have other numbers there than here, so its first rank compiles")
    before = torch.get_num_threads()
    drafters, apart = config.topology.drafters, config.topology.workers == "processes"
    set_threads(len(drafters), torch.device(drafters[0]), apart=apart)
    try:
        gate = CompileGate(workers=1, backend=config.compile.backend)
        begin, counts = time.perf_counter(), disk_counts()

        def everything() -> None:
            if devices:
                dtype = DTYPES[config.train.precision]
                lender = load_target(folder, dtype, "cpu")
                start = new_drafter(config, drafter, lender.get_output_embeddings().weight)
            for device in devices:
                borrowed = Borrowed.of(lender, device, dtype)
                with _current(device):
                    Replica(f"drafter on {device}", config, drafter, start, borrowed, device, gate).warm_up()
            for home in homes if shapes else ():
                target = load_target(folder, getattr(torch, config.target.dtype), home)
                with _current(home):
                    TargetForward.of(config, drafter, target).record(shapes, gate, f"target on {home}")

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
