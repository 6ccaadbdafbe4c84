"""CUDA graphs of work that is done again and again on tensors of the same shapes: recorded in the warm-up, replayed in
every step.

A small drafter's step is a thousand kernels of a few microseconds, and Python needs longer to launch them than the GPU
to run them (24 ms of host time a step on an H200, and more with a target's thread beside it, since both hold the
interpreter). Replaying takes one call. Nothing can compile, fall back or allocate in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Recordings(Generic[T]):
    """Graphs on one device by key. They share their memory, so what one returned is gone when the next is replayed.

    `record` must not meet other work on the device: do it in the gate's warm-up. On a CPU nothing is recorded: the
    function runs in each replay; tests use that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, Callable[[], T]] = {}
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def record(self, key: Hashable, function: Callable[[], T]) -> None:
        """Keep `function` for `replay`. It has run at these shapes before; what it reads and writes must not move."""
        if self.device.type != "cuda":
            self._graphs[key] = _rewriting(function)
            return
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            # thread_local: autograd's own thread may do during the recording what this one may not.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                made = function()

        def replayed() -> T:
            graph.replay()
            return made

        self._graphs[key] = replayed

    def rehearse(self, function: Callable[[], object]) -> None:
        """Run `function` once on the recordings' stream, where libraries make their workspaces and kernels are loaded:
        neither is possible while recording."""
        if self.device.type != "cuda":
            function()
            return
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)

    def replay(self, key: Hashable) -> T:
        """Run what was recorded and return what it returned then, with new values in it. Raises KeyError."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._graphs[key]()


def _rewriting(function: Callable[[], T]) -> Callable[[], T]:
    """Return what stands for a graph on a CPU: `function`, whose later results are written over the first one's."""
    first: list[T] = []

    def run() -> T:
        result = function()
        if first and isinstance(first[0], torch.Tensor) and isinstance(result, torch.Tensor):
            with torch.no_grad():
                first[0].copy_(result)
            return first[0]
        first[:] = [result]
        return result

    return run
