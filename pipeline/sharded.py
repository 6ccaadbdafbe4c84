"""The optimizer's state cut among the ranks (ZeRO, stage 1, arXiv 1910.02054): each keeps the float32 weights and the
moments of some parameters, updates those, and sends their rounded copies to the others.

Of the 18 bytes that a bf16 parameter takes on a GPU, 12 are divided among the ranks; a step sends 6 bytes a parameter
for 8, and each rank updates its own only. One rank keeps a parameter whole, so that the gradient's norm is added up in
the order of one process: n ranks train to the same bits, sharded or not. The largest, as a rule `fc`, is therefore the
least that some rank keeps, however many there are. Gradients and working weights stay whole on every rank: the compiled
body and the CUDA graphs read and write them where they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.flat import Flat
from pipeline.optim import Tensors
from pipeline.processes import RankExchange
from pipeline.ranks import Ranks
from pipeline.replica import Replica
from pipeline.topology import Clock, GradientExchange


@dataclass(frozen=True)
class Shard:
    """Which of `world` ranks this is."""

    rank: int
    world: int

    def owners(self, sizes: Sequence[int]) -> list[int]:
        """Return the rank that keeps each parameter: the largest first, to whoever has least; the same on all ranks."""
        held, owners = [0] * self.world, [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            owners[index] = min(range(self.world), key=lambda rank: (held[rank], rank))
            held[owners[index]] += sizes[index]
        return owners

    def keeps(self, sizes: Sequence[int]) -> list[int]:
        """Return the parameters that this rank keeps, in ascending order."""
        return [index for index, owner in enumerate(self.owners(sizes)) if owner == self.rank]


class ShardedExchange(RankExchange):
    """RankExchange for replicas whose optimizer keeps `shard`'s parameters.

    Besides the gradients it lays the working weights into one tensor, so it too is made before the warm-up.
    """

    def __init__(self, ranks: Ranks, replica: Replica, shard: Shard, clock: Clock = time.perf_counter) -> None:
        working = replica.optimizer.working
        self._shard, self._owners = shard, shard.owners([p.numel() for p in working])
        super().__init__(ranks, replica, clock)
        self._sent = torch.empty_like(self._received)
        self._weights = Flat.like(working, working[0].dtype, self._owners, shard.world)
        for parameter, view in zip(working, self._weights.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        replica.optimizer.partners = self

    def _laid_out(self, working: list[Tensor]) -> Flat:
        return Flat.like(working, torch.float32, self._owners, self._shard.world)

    def _add_up(self) -> None:
        """Each rank gets the sums of what it keeps; the rest of its gradients stays its own."""
        parts = self._gradients.parts
        mine = parts[self._shard.rank]
        width, end = self._received.numel() // self._shard.world, max(part.numel() for part in parts)
        for start in range(0, end, width):
            pieces = [part[start : start + width] for part in parts]
            own = mine[start : start + width]
            sizes = [piece.numel() for piece in pieces]
            sent, received = self._sent[: sum(sizes)], self._received[: self._shard.world * own.numel()]
            torch.cat(pieces, out=sent)
            dist.all_to_all_single(received, sent, [own.numel()] * self._shard.world, sizes)
            first, *others = received.view(self._shard.world, -1)
            for other in others:
                first += other
            own.copy_(first)

    def complete(self, values: Tensor) -> None:
        """Add up, in place, values of which each is 0 on all ranks but one."""
        with self._together():
            dist.all_reduce(values)

    def spread(self) -> None:
        """Give all ranks the working weights that each has updated."""
        with self._together():
            for owner, part in enumerate(self._weights.parts):
                if part.numel():
                    dist.broadcast(part, src=owner)
        # Written by another name: what watches the weights for changes (fp8.refresh) would not see it.
        torch.autograd.graph.increment_version(self._replica.optimizer.working)

    def tensors(self) -> Tensors:
        """Return all weights and moments on the first rank, on the CPU: 12 bytes a parameter. All ranks call it."""
        optimizer = self._replica.optimizer
        own, found = optimizer.tensors(), Tensors({"weights": {}, "optimizer": {}})
        for name, parameter, owner in zip(optimizer.names, optimizer.working, self._owners, strict=True):
            wanted = [("weights", name, parameter.shape), ("optimizer", f"{name}.step", torch.Size())]
            wanted += [("optimizer", f"{name}.{moment}", parameter.shape) for moment in ("exp_avg", "exp_avg_sq")]
            for stem, key, shape in wanted:
                tensor = self._to_first(own[stem].get(key), shape, owner)
                if tensor is not None:
                    found[stem][key] = tensor
        return found

    def _to_first(self, tensor: Tensor | None, shape: torch.Size, owner: int) -> Tensor | None:
        """Return a float32 tensor of `owner` on the first rank, None elsewhere."""
        leads = self._ranks.leads
        if owner == 0:
            return tensor.to("cpu", copy=True) if leads and tensor is not None else None
        whole = torch.empty(shape) if leads else None
        for start in range(0, shape.numel(), self._received.numel()):
            piece = self._received[: shape.numel() - start]
            at = slice(start, start + piece.numel())
            if tensor is not None:
                piece.copy_(tensor.reshape(-1)[at])
            with self._together():
                dist.broadcast(piece, src=owner)
            if whole is not None:
                whole.view(-1)[at] = piece.cpu()
        return whole

    def equal(self) -> bool:
        """Return whether all ranks hold the same working weights, bit for bit, on every rank; each float32 weight is
        kept by one rank only."""
        return self._same_everywhere(self._weights.whole)


def exchange_of(
    replicas: list[Replica], ranks: Ranks | None, shard: Shard | None, clock: Clock
) -> GradientExchange | RankExchange:
    """Return what adds up gradients between these replicas, or between the one here and other ranks'."""
    if ranks is None:
        return GradientExchange(replicas, clock)
    return ShardedExchange(ranks, replicas[0], shard, clock) if shard else RankExchange(ranks, replicas[0], clock)
