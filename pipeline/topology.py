"""Worker threads: one drafter replica each, gradients averaged every step, features cached or made beside them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash.compile import CompileGate, GateAborted
from dflash.objective import send
from pipeline.batches import MicroBatch
from pipeline.data import FeatureShards
from pipeline.replica import Replica
from pipeline.target_forward import TargetForward

Clock = Callable[[], float]
"""Seconds of what waits are counted in; pipeline/pace.py's leaves out what is not training."""


class Rendezvous:
    """A barrier that a failing worker breaks, so that the others end with a message instead of waiting for ever.

    seconds_waited has an entry for each thread, by its name.
    """

    def __init__(self, parties: int, clock: Clock = time.perf_counter) -> None:
        self._barrier, self._clock = threading.Barrier(parties), clock
        self.seconds_waited: dict[str, float] = {}

    def wait(self) -> None:
        me, start = threading.current_thread().name, self._clock()
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise GateAborted("another worker failed") from None
        self.seconds_waited[me] = self.seconds_waited.get(me, 0.0) + self._clock() - start

    def abort(self) -> None:
        self._barrier.abort()


class GradientExchange:
    """Adds the replicas' gradient sums in a fixed order, so the result does not depend on which thread is first."""

    def __init__(self, replicas: list[Replica], clock: Clock = time.perf_counter) -> None:
        self._replicas = replicas
        self._sums: list[Tensor | None] = [None] * len(replicas)
        self.rendezvous = Rendezvous(len(replicas), clock)
        self._several_gpus = len({r.device for r in replicas if r.device.type == "cuda"}) > 1

    def seconds_waited(self) -> dict[str, float]:
        """Return how long each replica's thread, which has its name, waited for the others."""
        return {r.name: self.rendezvous.seconds_waited.get(r.name, 0.0) for r in self._replicas}

    def total(self, index: int, sums: Tensor) -> Tensor:
        """Give this worker's loss sums, add up all gradients in place on every replica, and return the total sums.

        Every replica calls it once a step. Each worker adds up every n-th parameter for all.
        """
        if len(self._replicas) == 1:
            return sums
        self._sums[index] = sums
        _ = self._replicas[index].optimizer.gradients  # zeroed now, by their own worker, if its step had no micro-batch
        self._settle(index)
        self.rendezvous.wait()
        device = self._replicas[index].device
        total = torch.stack([s.to(device) for s in self._sums if s is not None]).sum(0)
        everyone = [replica.optimizer.gradients for replica in self._replicas]
        for parameter in range(index, len(everyone[0]), len(everyone)):
            added = everyone[0][parameter].to(device, copy=True)
            for other in everyone[1:]:
                added += other[parameter].to(device)
            for gradients in everyone:
                gradients[parameter].copy_(added)
        self._settle(index)
        self.rendezvous.wait()
        return total

    def _settle(self, index: int) -> None:
        """Between GPUs, finish this one's work before another reads it; one GPU's default stream is in order anyway."""
        if self._several_gpus:
            torch.cuda.synchronize(self._replicas[index].device)


class CachedFeatures:
    """Features from the cache stage's shards, padded to the bucket."""

    def __init__(self, shards: FeatureShards, feature_size: int) -> None:
        self._shards, self._width = shards, feature_size

    def __call__(self, batch: MicroBatch, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        out_bSC = torch.zeros(size, batch.bucket, self._width, dtype=dtype)
        for row, held in enumerate(batch.samples):
            for sample, first in held:
                found = self._shards(sample)
                out_bSC[row, first : first + len(found)] = found
        return send(out_bSC, device)


class FeatureBuffers:
    """The tensors that features are handed over in, `count` of each shape, made when the first of a shape come.

    Always the same ones: allocated anew for each micro-batch, their number in memory would differ from step to step
    with how far the target is ahead (142 MB more at step 100 of a run on an H200).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: dict[tuple[int, ...], queue.SimpleQueue[Tensor]] = {}

    def fill(self, features: Tensor) -> Tensor:
        """Return a free buffer with `features` in it. Raises RuntimeError if all are out."""
        shape = tuple(features.shape)
        self.reserve(features)
        try:
            return self._free[shape].get_nowait().copy_(features)
        except queue.Empty:
            raise RuntimeError(f"all {self._count} feature buffers of {list(shape)} are in use") from None

    def reserve(self, features: Tensor) -> None:
        """Make the buffers for features of this shape, if there are none yet."""
        if (shape := tuple(features.shape)) not in self._free:
            self._free[shape] = queue.SimpleQueue()
            for _ in range(self._count):
                self._free[shape].put(torch.empty_like(features))

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back; it may be written over by what is launched from now on."""
        self._free[tuple(buffer.shape)].put(buffer)


class OnlineFeatures:
    """Features made by the target in a thread of its own, a bounded queue ahead of each drafter.

    `work` is the thread's loop: for each micro-batch in order of use, run the target inside gate.step() (so it is
    parked during a compile) and hand batch and features to the worker that will train on it. The batch comes along so
    that it is made once, ahead of its use, and not by the worker while its GPU waits.
    """

    def __init__(
        self,
        forward: TargetForward,
        gate: CompileGate,
        num_workers: int,
        *,
        depth: int = 2,
        shapes: Sequence[tuple[int, int]] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        """`shapes` (b, S) of tokens are recorded in the gate's warm-up, in which the thread then takes part."""
        self._forward, self._gate, self._shapes, self._clock = forward, gate, shapes, clock
        self.device: torch.device = forward.target.device
        self._queues: list[queue.Queue[tuple[MicroBatch, Tensor]]] = [queue.Queue(depth) for _ in range(num_workers)]
        self.stopping = threading.Event()
        self.seconds_target_waited = 0.0
        self.seconds_drafters_waited = [0.0] * num_workers
        # Of each shape one in every place that features can be: waiting, lent to a worker, or being made.
        self._buffers = FeatureBuffers(num_workers * (depth + 1) + 1)
        self._lent: list[Tensor | None] = [None] * num_workers
        self._working = threading.Lock()

    def work(self, name: str, stream: Iterable[tuple[int, MicroBatch]]) -> None:
        with self._gate.worker(name):
            if self._shapes:
                self._gate.warm_up(self._warm_up)
            for worker, batch in stream:
                if self.stopping.is_set():
                    return
                with self._gate.step(), self._working:
                    features = self._buffers.fill(self._forward(batch))
                start = self._clock()
                try:
                    self._hand_over(self._queues[worker].put, (batch, features))
                except GateAborted:  # nobody needs them any more; a failure is told by the worker that had it
                    return
                self.seconds_target_waited += self._clock() - start

    def _warm_up(self) -> None:
        for features in self._forward.record(self._shapes, self._gate):
            self._buffers.reserve(features)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hold the target between two forwards: memory that is compared is read here, or what a forward needs for a
        moment would be counted by chance."""
        with self._working:
            yield

    def take(self, worker: int, device: torch.device, dtype: torch.dtype) -> tuple[MicroBatch, Tensor]:
        """Return a worker's next micro-batch and its features (b, S, X), both on `device`, until its next call: the
        target then writes over the features, after what the worker has launched till then."""
        if (before := self._lent[worker]) is not None:
            self._buffers.give_back(before)
            self._lent[worker] = None
        start = self._clock()
        batch, features = self._hand_over(self._queues[worker].get)
        self.seconds_drafters_waited[worker] += self._clock() - start
        self._lent[worker] = features
        return batch.to(device), send(features.to(dtype), device)

    def _hand_over(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Put or get, giving up when the run stops: a dead partner must not leave this thread waiting."""
        while not self.stopping.is_set():
            try:
                return operation(*args, timeout=0.5)
            except (queue.Full, queue.Empty):
                continue
        raise GateAborted("the run is stopping")


def waits(exchange: GradientExchange, online: OnlineFeatures | None) -> dict[str, dict[str, float]]:
    """Return the seconds that each thread waited, by what for: a drafter for the others and for features, the target
    for room in the queues."""
    found = {name: {"others": seconds} for name, seconds in exchange.seconds_waited().items()}
    if online is not None:
        for reasons, seconds in zip(found.values(), online.seconds_drafters_waited, strict=True):
            reasons["features"] = seconds
        found["target-0"] = {"room": online.seconds_target_waited}
    return found
