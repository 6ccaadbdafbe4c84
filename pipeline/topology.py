"""Worker threads: one drafter replica each, gradients averaged every step, features cached or made beside them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.compile import CompileGate, GateAborted
from dflash.objective import send
from pipeline.batches import MicroBatch
from pipeline.data import FeatureShards
from pipeline.optim import Tensors
from pipeline.replica import Replica
from pipeline.target_forward import TargetForward
from pipeline.turns import Turns

Clock = Callable[[], float]
"""Seconds of what waits are counted in; pipeline/pace.py's leaves out what is not training."""


class Waiting(Protocol):
    """An exchange, as far as `waits` knows it."""

    def seconds_waited(self) -> dict[str, float]: ...


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

    def join(self) -> None:
        """The first worker is warm: there are no other processes to wait for (pipeline/processes.py has some)."""

    def wait(self) -> None:
        """Wait until all workers are here."""
        self.rendezvous.wait()

    def abort(self) -> None:
        """End all who wait, or will."""
        self.rendezvous.abort()

    def close(self) -> None:
        """The first worker has done its last step."""

    def settle(self) -> None:
        """All other workers wait anyway while the first one does something alone."""

    def agreed(self, stop: bool) -> bool:
        """Return whether to stop after this step, asked by the first worker."""
        return stop

    def gathered(self, part: Any) -> list[Any]:
        """Return what every process's first worker gives."""
        return [part]

    def equal(self) -> bool:
        """Return whether all replicas hold the same float32 weights, bit for bit. All have stepped, and wait."""
        first, *others = [replica.optimizer.masters for replica in self._replicas]
        return all(torch.equal(a, b.to(a.device)) for other in others for a, b in zip(first, other, strict=True))

    def tensors(self) -> Tensors:
        """Return the weights and moments that a checkpoint holds."""
        return self._replicas[0].optimizer.tensors()

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
    """Features made by targets, each in a thread of its own, ahead of the drafters by bounded queues.

    `work` is a target's loop: for each of its micro-batches (pipeline/turns.py), run the target inside gate.step() (so
    it is parked during a compile) and hand batch and features to the worker that will train on it. The batch comes
    along so that it is made once, ahead of its use, and not by the worker while its GPU waits.

    Features stay on the target's device until a worker takes them, and go to another GPU without the host: the copy is
    in order with what either GPU was given before it, so the target, whose later forwards write over the features,
    does so after it.
    """

    def __init__(
        self,
        forwards: Sequence[TargetForward],
        gate: CompileGate,
        num_workers: int,
        *,
        depth: int | None = None,
        shapes: Sequence[tuple[int, int]] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        """`shapes` (b, S) of tokens are recorded in the gate's warm-up, in which all targets' threads then take part.
        `depth` is that of each queue, if not the usual one."""
        self._forwards, self._gate, self._shapes, self._clock = forwards, gate, shapes, clock
        self.devices: list[torch.device] = [forward.target.device for forward in forwards]
        self.turns = Turns(targets=len(forwards), drafters=num_workers)
        self._queues: list[list[queue.Queue[tuple[MicroBatch, Tensor]]]] = [
            [queue.Queue(depth or self.turns.depth) for _ in range(num_workers)] for _ in forwards
        ]
        self.stopping = threading.Event()
        self.seconds_targets_waited = [0.0] * len(forwards)
        self.seconds_drafters_waited = [0.0] * num_workers
        self._buffers = [FeatureBuffers(self.turns.places(depth)) for _ in forwards]
        self._taken = [0] * num_workers
        self._lent: list[Tensor | None] = [None] * num_workers
        self._working = [threading.Lock() for _ in forwards]

    def work(self, target: int, stream: Iterable[MicroBatch]) -> None:
        """Make the features of `stream`: micro-batches `target`, target + T, ... of T targets' session."""
        forward, device, buffers = self._forwards[target], self.devices[target], self._buffers[target]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        name = target_name(target)
        with self._gate.worker(name):
            if self._shapes:
                self._gate.warm_up(lambda: self._warm_up(target))
            for number, batch in zip(itertools.count(target, self.turns.targets), stream, strict=False):
                if self.stopping.is_set():
                    return
                with self._gate.step(), self._working[target]:
                    features = buffers.fill(forward(batch))
                start, worker = self._clock(), self.turns.drafter_of(number)
                try:
                    self._hand_over(self._queues[target][worker].put, (batch, features))
                except GateAborted:  # nobody needs them any more; a failure is told by the worker that had it
                    return
                self.seconds_targets_waited[target] += self._clock() - start

    def _warm_up(self, target: int) -> None:
        for features in self._forwards[target].record(self._shapes, self._gate, target_name(target)):
            self._buffers[target].reserve(features)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hold the targets between two forwards: memory that is compared is read here, or what a forward needs for a
        moment would be counted by chance."""
        with ExitStack() as held:
            for working in self._working:
                held.enter_context(working)
            yield

    def take(self, worker: int, device: torch.device, dtype: torch.dtype) -> tuple[MicroBatch, Tensor]:
        """Return a worker's next micro-batch and its features (b, S, X), both on `device`, until its next call: the
        target then writes over the features, after what the worker has launched till then."""
        count = self._taken[worker]
        if (before := self._lent[worker]) is not None:
            self._buffers[self._target_of(worker, count - 1)].give_back(before)
            self._lent[worker] = None
        start = self._clock()
        batch, features = self._hand_over(self._queues[self._target_of(worker, count)][worker].get)
        self.seconds_drafters_waited[worker] += self._clock() - start
        self._taken[worker], self._lent[worker] = count + 1, features
        return batch.to(device), send(features.to(dtype), device)

    def _target_of(self, worker: int, count: int) -> int:
        return self.turns.target_of(self.turns.number(worker, count))

    def _hand_over(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Put or get, giving up when the run stops: a dead partner must not leave this thread waiting."""
        while not self.stopping.is_set():
            try:
                return operation(*args, timeout=0.5)
            except (queue.Full, queue.Empty):
                continue
        raise GateAborted("the run is stopping")


def target_name(target: int) -> str:
    """Return the name of a target's thread."""
    return f"target-{target}"


def out_of_reach(targets: Iterable[torch.device], drafters: Iterable[torch.device]) -> list[tuple[str, str]]:
    """Return the GPUs of targets and of drafters between which the driver copies by way of the host's memory."""
    pairs = sorted({(str(t), str(d)) for t in targets for d in drafters if t != d and t.type == d.type == "cuda"})
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def waits(exchange: Waiting, online: OnlineFeatures | None) -> dict[str, dict[str, float]]:
    """Return the seconds that each thread waited, by what for: a drafter for the others and for features, a target for
    room in the queues."""
    found = {name: {"others": seconds} for name, seconds in exchange.seconds_waited().items()}
    if online is not None:
        for reasons, seconds in zip(found.values(), online.seconds_drafters_waited, strict=True):
            reasons["features"] = seconds
        found |= {target_name(t): {"room": seconds} for t, seconds in enumerate(online.seconds_targets_waited)}
    return found
