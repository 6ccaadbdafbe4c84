"""What a training holds at a step boundary, for metrics.jsonl; the gate "memory flat" compares the lines."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch


def free_memory() -> None:
    """Give back what a stage held: its models are in reference cycles, and a GPU's memory waits for the collector."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def memory(devices: Collection[torch.device], called: Callable[[torch.device], str] = str) -> dict[str, dict[str, int]]:
    """Return bytes at a step boundary by what a device is `called`: on CUDA by its allocator; without any, of the CPU,
    the resident set.

    allocated_bytes is what the program asked for and has not let go. The blocks that it was given for it may be larger,
    by up to 1 MiB each, depending on which ones were free: that would differ from step to step with nothing leaking.
    """
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    if not gpus:
        return {called(torch.device("cpu")): {"resident_bytes": _resident()}}
    stats = {called(device): torch.cuda.memory_stats(device) for device in gpus}
    return {
        name: {
            "allocated_bytes": s["requested_bytes.all.current"],
            "reserved_bytes": s["reserved_bytes.all.current"],
            "allocator_retries": s["num_alloc_retries"],
        }
        for name, s in stats.items()
    }


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the peak is all there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_record(held: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, Any]:
    """Return what a line of metrics.jsonl says of all processes' `memory`: the sums and, of several GPUs, "gpus", each
    one's by its name."""
    every = [(name, found) for process in held for name, found in process.items()]
    named = [(name, found) for name, found in every if "reserved_bytes" in found] or every  # GPUs, if there are any
    fields = named[0][1].keys()
    record: dict[str, Any] = {field: sum(found[field] for _, found in named) for field in fields}
    if len(named) > 1 and "reserved_bytes" in fields:
        record["gpus"] = {name: dict(found) for name, found in named}
    return record
