"""Worker threads: one drafter replica each, gradients averaged every step, features cached or made beside them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dflash.compile import CompileGate, GateAborted
from dflash.objective import send
from dflash.taps import extract_features
from pipeline.batches import MicroBatch
from pipeline.data import FeatureShards
from pipeline.replica import Replica


class Rendezvous:
    """A barrier that a failing worker breaks, so that the others end with a message instead of waiting for ever."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)
        self.seconds_waited = 0.0

    def wait(self) -> None:
        start = time.perf_counter()
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise GateAborted("another worker failed") from None
        self.seconds_waited += time.perf_counter() - start

    def abort(self) -> None:
        self._barrier.abort()


class GradientExchange:
    """Adds the replicas' gradient sums in a fixed order, so the result does not depend on which thread is first."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self._sums: list[Tensor | None] = [None] * len(replicas)
        self.rendezvous = Rendezvous(len(replicas))
        self._several_gpus = len({r.device for r in replicas if r.device.type == "cuda"}) > 1

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


def target_features(target: Any, batch: MicroBatch, layer_ids: tuple[int, ...], final_state: bool) -> Tensor:
    """Return the target's features (b, S, X) of a micro-batch, on the target's device."""
    positions = None if batch.starts_bN is None else send(batch.positions_bS, target.device)
    tokens = send(batch.tokens_bS, target.device)
    return extract_features(target, tokens, layer_ids, positions, final_state=final_state)


class OnlineFeatures:
    """Features made by the target in a thread of its own, a bounded queue ahead of each drafter.

    `work` is the thread's loop: for each micro-batch in order of use, run the target inside gate.step() (so it is
    parked during a compile) and hand batch and features to the worker that will train on it. The batch comes along so
    that it is made once, ahead of its use, and not by the worker while its GPU waits.
    """

    def __init__(
        self,
        target: Any,
        layer_ids: tuple[int, ...],
        gate: CompileGate,
        num_workers: int,
        *,
        depth: int = 2,
        final_state: bool = False,
    ) -> None:
        self._target, self._layer_ids, self._gate, self._final_state = target, layer_ids, gate, final_state
        self._queues: list[queue.Queue[tuple[MicroBatch, Tensor]]] = [queue.Queue(depth) for _ in range(num_workers)]
        self.stopping = threading.Event()
        self.seconds_target_waited = 0.0
        self.seconds_drafters_waited = 0.0

    def work(self, name: str, stream: Iterable[tuple[int, MicroBatch]]) -> None:
        with self._gate.worker(name):
            for worker, batch in stream:
                if self.stopping.is_set():
                    return
                with self._gate.step():
                    features = target_features(self._target, batch, self._layer_ids, self._final_state)
                start = time.perf_counter()
                try:
                    self._hand_over(self._queues[worker].put, (batch, features))
                except GateAborted:  # nobody needs them any more; a failure is told by the worker that had it
                    return
                self.seconds_target_waited += time.perf_counter() - start

    def take(self, worker: int, device: torch.device, dtype: torch.dtype) -> tuple[MicroBatch, Tensor]:
        """Return a worker's next micro-batch and its features (b, S, X), both on `device`."""
        start = time.perf_counter()
        batch, features = self._hand_over(self._queues[worker].get)
        self.seconds_drafters_waited += time.perf_counter() - start
        return batch.to(device), send(features.to(dtype), device)

    def _hand_over(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Put or get, giving up when the run stops: a dead partner must not leave this thread waiting."""
        while not self.stopping.is_set():
            try:
                return operation(*args, timeout=0.5)
            except (queue.Full, queue.Empty):
                continue
        raise GateAborted("the run is stopping")
