"""Gradients between processes, one drafter each: what pipeline/topology.py's GradientExchange is between threads.

Sums are made as threads make them, rank by rank in ascending order, so n processes train to the bits of n threads
whatever the backend and the hosts are: each rank gets every other's n-th part of the gradients, adds them up, and all
get the parts back. That moves as many bytes as the ring of an all-reduce, whose order is its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.compile import GateAborted
from pipeline.errors import PipelineError
from pipeline.flat import ALIGNED, Flat
from pipeline.optim import Tensors
from pipeline.ranks import Ranks
from pipeline.replica import Replica
from pipeline.topology import Clock

CHUNK_BYTES = 64 * 2**20
"""Of gradients that are sent at once; the received parts need as much memory."""


class RankExchange:
    """One replica's side of the exchange. Made before the warm-up: it lays the replica's gradients into one tensor, and
    recorded steps write to where they find them. Everything else only after `join`, in one thread."""

    def __init__(self, ranks: Ranks, replica: Replica, clock: Clock = time.perf_counter) -> None:
        self._ranks, self._replica, self._clock = ranks, replica, clock
        self._seconds = 0.0
        self._pending: tuple[Tensor, Any] | None = None
        self._gradients = self._laid_out(list(replica.optimizer.working))
        replica.optimizer.use_gradients(self._gradients.views)
        whole = ranks.world * ALIGNED
        size = max(whole, CHUNK_BYTES // 4 // whole * whole)
        self._received = torch.empty(min(size, max(whole, self._gradients.whole.numel())), device=replica.device)

    def _laid_out(self, working: list[Tensor]) -> Flat:
        """Return room for float32 gradients of `working`."""
        return Flat.like(working, torch.float32, [0] * len(working), 1, multiple=self._ranks.world)

    def join(self) -> None:
        """Wait until all ranks are warm, and connect them. Raises PipelineError when they do not begin equal.

        That is compared here also so that a later save finds the memory for it reserved.
        """
        with self._together():
            self._ranks.join(self._replica.device)
        if not self.equal():
            raise PipelineError(
                "the ranks begin with different weights",
                where=self._replica.name,
                fix="Give all hosts the same files, and the same checkpoints.",
            )

    def wait(self) -> None:
        """There are no other threads here to wait for."""

    def abort(self) -> None:
        """The others learn of a failure by the store (pipeline/ranks.py)."""

    def seconds_waited(self) -> dict[str, float]:
        """Return how long this rank's thread waited for the others, sending included. A GPU that waits inside NCCL's
        kernels is not seen here."""
        return {self._replica.name: self._seconds}

    def total(self, index: int, sums: Tensor) -> Tensor:
        """Add up all ranks' gradients in place, and return the total of their loss sums. Every rank calls it once a
        step, also one that had nothing to learn from; index is 0."""
        _ = self._replica.optimizer.gradients  # zeroed now if the step had no micro-batch
        with self._together():
            self._add_up()
            every = sums.new_empty(self._ranks.world, sums.numel())
            dist.all_gather_into_tensor(every.view(-1), sums)
        return every.sum(0)

    def _add_up(self) -> None:
        for chunk in self._gradients.whole.split(self._received.numel()):
            received = self._received[: chunk.numel()]
            dist.all_to_all_single(received, chunk)
            mine, *others = received.view(self._ranks.world, -1)
            for other in others:
                mine += other
            dist.all_gather_into_tensor(chunk, mine)

    def agreed(self, stop: bool) -> bool:
        """Return whether to stop after this step, on all ranks the same: whether any was asked one step earlier.

        What is asked now is told at the next call, so nobody waits for the answer; and no rank's Python runs further
        ahead of another's.
        """
        before = self._pending
        asked = torch.tensor([float(stop)])
        with self._together():
            self._pending = asked, dist.all_reduce(asked, op=dist.ReduceOp.MAX, async_op=True)
            if before is None:
                return False
            before[1].wait()
        return bool(before[0])

    def settle(self) -> None:
        """Wait until all ranks are here."""
        with self._together():
            dist.all_reduce(torch.zeros(1))

    def gathered(self, part: Any) -> list[Any]:
        """Return every rank's `part`, in their order."""
        parts = [None] * self._ranks.world
        with self._together():
            dist.all_gather_object(parts, part)
        return parts

    def tensors(self) -> Tensors:
        """Return the weights and moments that a checkpoint holds, complete on the first rank at least."""
        return self._replica.optimizer.tensors()

    @torch.no_grad()
    def equal(self) -> bool:
        """Return whether all ranks hold the same float32 weights, bit for bit, on every rank. The gradients must be
        those of a step that is over: their place is used, and left at zero."""
        masters = [master.detach() for master in self._replica.optimizer.masters]
        torch._foreach_copy_(self._gradients.views, masters)
        same = self._same_everywhere(self._gradients.whole)
        self._gradients.whole.zero_()
        return same

    def _same_everywhere(self, flat: Tensor) -> bool:
        """Return whether a flat tensor is the first rank's on all of them, on every rank."""
        same, room = True, self._received.view(flat.dtype)
        with self._together():
            for chunk in flat.split(room.numel()):
                first = room[: chunk.numel()].copy_(chunk)
                dist.broadcast(first, src=0)
                same = same and torch.equal(first, chunk)
            different = torch.tensor(float(not same))
            dist.all_reduce(different)
        return not different

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Count the seconds; what fails because a partner is gone, or cannot be reached, says only that.

        This GPU's own errors show themselves at its next call, whatever that is: here as a rule.
        """
        start = self._clock()
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            text = " ".join(str(error).split())[:400]
            raise GateAborted(f"another rank is gone, or the way to it ({text})") from error
        self._seconds += self._clock() - start

    def close(self) -> None:
        """Take the last answer, which nobody asked for, and leave the group."""
        with self._together():
            if self._pending is not None:
                self._pending[1].wait()
            self._ranks.leave()
