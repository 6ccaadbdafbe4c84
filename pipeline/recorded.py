"""CUDA graphs of work that is done again and again on tensors of the same shapes: recorded in the warm-up, replayed in
every step.

A small drafter's step is a thousand kernels of a few microseconds, and Python needs longer to launch them than the GPU
to run them (24 ms of host time a step on an H200, and more with a target's thread beside it, since both hold the
interpreter). Replaying takes one call. Nothing can compile, fall back or allocate in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Recordings(Generic[T]):
    """Graphs on one device by key. They share their memory, so what one returned is gone when the next is replayed.

    `record` must not meet other work on the device: do it in the gate's warm-up. On a CPU nothing is recorded and each
    call runs the function; tests use that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._functions: dict[Hashable, Callable[[], T]] = {}
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._functions

    def __len__(self) -> int:
        return len(self._functions)

    def record(self, key: Hashable, function: Callable[[], T]) -> None:
        """Keep `function` for `replay`. It has run at these shapes before; what it reads and writes must not move."""
        self._functions[key] = function
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            # thread_local: autograd's own thread may do during the recording what this one may not.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                made = function()
            self._graphs[key] = graph, made

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
        if self.device.type != "cuda":
            return self._functions[key]()
        graph, made = self._graphs[key]
        with torch.cuda.device(self.device):
            graph.replay()
        return made
