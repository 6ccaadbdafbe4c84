"""What a training holds at a step boundary, for metrics.jsonl; the gate "memory flat" compares the lines."""

from __future__ import annotations

import gc
import resource
from collections.abc import Collection

import torch


def free_memory() -> None:
    """Give back what a stage held: its models are in reference cycles, and a GPU's memory waits for the collector."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def memory(devices: Collection[torch.device]) -> dict[str, int]:
    """Return bytes at a step boundary: on CUDA by the allocators of all devices, on the CPU the resident set.

    allocated_bytes is what the program asked for and has not let go. The blocks that it was given for it may be larger,
    by up to 1 MiB each, depending on which ones were free: that would differ from step to step with nothing leaking.
    """
    stats = [torch.cuda.memory_stats(device) for device in devices if device.type == "cuda"]
    if stats:
        return {
            "allocated_bytes": sum(s["requested_bytes.all.current"] for s in stats),
            "reserved_bytes": sum(s["reserved_bytes.all.current"] for s in stats),
            "allocator_retries": sum(s["num_alloc_retries"] for s in stats),
        }
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return {"resident_bytes": int(file.read().split()[1]) * resource.getpagesize()}
    except OSError:  # not Linux: the peak is all there is
        return {"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
