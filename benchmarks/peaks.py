"""What this machine reaches now: the rate of a large matrix product and of a copy. Steps are shares of these.

A data sheet's figures are for other clocks and other limits; a machine's own, minutes apart, cancel what it shares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

READINGS = 7


@dataclass(frozen=True)
class Peaks:
    """Rates of one device; the median of READINGS."""

    matmul_flops: float
    """Operations a second of a square product, 2 n^3 each."""
    copy_bytes: float
    """Bytes a second of a copy, read and written."""
    matmul: str
    """Which product, for the record."""


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from the call until the device has finished, by CUDA events or the host's clock.

    The device is idle at first, so the time that the host takes to start the work is counted.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):  # events are recorded in the current device's stream
        first.record()
        function()
        last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3


class Stopwatch:
    """Marks between pieces of work, read when all is done: nothing waits between them, so the host's start of one is
    hidden behind the one before, as in training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Take the time that the device reaches this place."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Wait for the device and return the seconds between each mark and the next."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [_between(first, last) for first, last in pairwise(self._marks)]


def _between(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    return first.elapsed_time(last) / 1e3


def measure_peaks(device: torch.device) -> Peaks:
    """Return the rates of `device`: bf16 products of 8192 on CUDA, float32 ones of 1024 on the CPU."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul = _median_seconds(lambda: torch.mm(a, b, out=out), device)
    source = torch.empty(2**30 if cuda else 2**26, device=device, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source), device)
    return Peaks(
        matmul_flops=2 * size**3 / matmul,
        copy_bytes=2 * source.numel() / copy,
        matmul=f"{str(dtype).removeprefix('torch.')} {size}^3",
    )


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of one call. Many in a row on CUDA: the host's start of one is no part of its rate."""
    calls = 20 if device.type == "cuda" else 1

    def several() -> None:
        for _ in range(calls):
            call()

    several()
    return statistics.median(seconds_of(several, device) for _ in range(READINGS)) / calls
