"""The training objective: weighted cross-entropy of supervised slots through the target's frozen head.

Returned as numerator and denominator, so that micro-batches, worker threads and ranks add both and divide once: the
gradient does not depend on how a batch was cut.

Legend: R supervised rows (slots), D width, V vocabulary, M blocks, K block size.
Sources: static decay, arXiv 2602.06036 equation 4; D-PACE, arXiv 2605.18810.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dflash.errors import DFlashError

PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """Return the paper's decay length for its block sizes, half the block size for others."""
    return PAPER_GAMMA.get(block_size, block_size / 2)


@dataclass(frozen=True)
class Weighting:
    """How a block's slots count. kind "decay": exp(-(i-1)/gamma); "dpace": by the drafter's own confidence."""

    kind: str = "decay"
    gamma: float = 7.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("decay", "dpace"):
            raise DFlashError(f"{self.kind!r} is neither decay nor dpace", where="loss", fix="Use one of them.")

    def slot_weights(self, loss_MK: Tensor, valid_MK: Tensor) -> Tensor:
        """Return w * m as float32 (M, K): zero at slot 0 and wherever a slot is not supervised. Detached.

        D-PACE: q = exp(-CE), s = (1-alpha) q + alpha (1 where unsupervised), C_i = prod_{t<=i} s_t,
        w_i = sum_{t>=i} m_t C_t: a slot counts by how many accepted tokens hang on it.
        """
        valid = valid_MK.float()
        if self.kind == "decay":
            slot = torch.arange(loss_MK.shape[1], device=loss_MK.device, dtype=torch.float32)
            return valid * torch.exp(-(slot - 1) / self.gamma)
        confidence = (1 - self.alpha) * torch.exp(-loss_MK.detach()) + self.alpha
        reach = torch.where(valid_MK, confidence, 1.0).cumprod(dim=1)
        return (valid * reach).flip(1).cumsum(1).flip(1) * valid


@dataclass(frozen=True)
class Rows:
    """Which rows of the drafter's output are supervised, grouped by block and cut into chunks of whole blocks.

    Made on the host (`make_rows`), so that no step waits for the device to count them.
    index_R   int64 into the flattened (batch, Q) rows, ascending
    block_R   int64, the row's block within its chunk
    slot_R    int64, the row's slot
    label_R   int64, token id
    chunks    (first row, end row, number of blocks) of each chunk
    """

    index_R: Tensor
    block_R: Tensor
    slot_R: Tensor
    label_R: Tensor
    chunks: tuple[tuple[int, int, int], ...]
    block_size: int

    def to(self, device: torch.device | str) -> Rows:
        """Return the rows on `device`; the chunks stay on the host."""
        names = ("index_R", "block_R", "slot_R", "label_R")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def make_rows(labels_MK: Tensor, valid_MK: Tensor, chunk_rows: int) -> Rows:
    """Return the supervised rows of M blocks; a chunk holds whole blocks and at most about `chunk_rows` rows."""
    num_blocks, block_size = labels_MK.shape
    block, slot = torch.nonzero(valid_MK, as_tuple=True)
    chunks: list[tuple[int, int, int]] = []
    local = torch.empty_like(block)
    blocks_per_chunk = max(1, chunk_rows // max(1, block_size - 1))
    edges = torch.searchsorted(block, torch.arange(0, num_blocks + blocks_per_chunk, blocks_per_chunk)).tolist()
    for number, (first, end) in enumerate(pairwise(edges)):
        if end > first:
            local[first:end] = block[first:end] - number * blocks_per_chunk
            chunks.append((first, end, blocks_per_chunk))
    return Rows(block * block_size + slot, local, slot, labels_MK[block, slot], tuple(chunks), block_size)


@dataclass
class LossSums:
    """Sums over rows or blocks; add them over micro-batches and workers before dividing.

    numerator has a gradient. All slot_ sums are (K,): slot_correct and slot_count are top-1 hits and supervised rows;
    slot_accepted and slot_reached the same where every earlier slot of the block was a hit, so that their ratio is the
    conditional accuracy that decides acceptance. accepted sums, over blocks with a supervised slot, the leading run of
    hits; blocks counts them.
    """

    numerator: Tensor
    denominator: Tensor
    slot_correct: Tensor
    slot_count: Tensor
    slot_accepted: Tensor
    slot_reached: Tensor
    accepted: Tensor
    blocks: Tensor

    def vector(self) -> Tensor:
        """Return all sums as one detached float32 vector (4 + 4K), so that one copy brings them to the host."""
        scalars = torch.stack([self.numerator.detach(), self.denominator, self.accepted, self.blocks])
        return torch.cat([scalars, self.slot_correct, self.slot_count, self.slot_accepted, self.slot_reached])


class _HeadLoss(torch.autograd.Function):
    """Head and loss in one pass: the gradient of the states is made chunk by chunk in the forward, while the chunk's
    logits exist, so no logits are kept or made twice. The frozen head gets none."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, head_VD: Tensor, rows: Rows, weighting: Weighting, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        K, device = rows.block_size, hidden_RD.device
        sums = torch.zeros(4 + 4 * K, device=device)
        gradient_RD = torch.empty_like(hidden_RD)
        for first, end, num_blocks in rows.chunks:
            block, slot, label = rows.block_R[first:end], rows.slot_R[first:end], rows.label_R[first:end]
            logits = hidden_RD[first:end] @ head_VD.T
            wide = logits.float()
            if softcap is not None:
                wide = softcap * torch.tanh(wide / softcap)
            best = wide.argmax(-1)
            normaliser = wide.logsumexp(-1)
            loss = normaliser - wide.gather(1, label[:, None])[:, 0]
            loss_MK = torch.zeros(num_blocks, K, device=device).index_put((block, slot), loss)
            valid_MK = torch.zeros(num_blocks, K, dtype=torch.bool, device=device).index_put(
                (block, slot), torch.ones((), dtype=torch.bool, device=device)
            )
            weights_MK = weighting.slot_weights(loss_MK, valid_MK)
            weight = weights_MK[block, slot]
            probability = (
                wide.sub_(normaliser[:, None]).exp_() if softcap is None else (wide - normaliser[:, None]).exp()
            )
            probability[torch.arange(end - first, device=device), label] -= 1.0
            probability *= weight[:, None]
            if softcap is not None:
                probability *= 1 - (wide / softcap).square()
            gradient_RD[first:end] = probability.to(hidden_RD.dtype) @ head_VD
            hit_MK = torch.zeros(num_blocks, K, device=device).index_put((block, slot), (best == label).float())
            # Leading hits: an unsupervised slot ends the run, as the end of the text ends a decode.
            accepted_MK = hit_MK.clone()
            accepted_MK[:, 0] = 1.0
            accepted_MK = accepted_MK.cumprod(1)
            reached_MK = valid_MK.float()
            reached_MK[:, 1:] *= accepted_MK[:, :-1]
            accepted_MK[:, 0] = 0.0
            run = accepted_MK.sum()
            scalars = torch.stack([(weight * loss).sum(), weight.sum(), run, valid_MK.any(1).sum().float()])
            sums += torch.cat([scalars, hit_MK.sum(0), valid_MK.float().sum(0), accepted_MK.sum(0), reached_MK.sum(0)])
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        (gradient_RD,) = ctx.saved_tensors
        assert grads[0] is not None
        return gradient_RD * grads[0].to(gradient_RD.dtype), None, None, None, None


def head_loss(
    hidden_RD: Tensor, head_VD: Tensor, rows: Rows, weighting: Weighting, *, softcap: float | None = None
) -> LossSums:
    """Return the loss sums of supervised states `hidden_RD` through the frozen head `head_VD`.

    Products run in hidden's dtype, softmax and sums in float32. Memory is one chunk of float32 logits.
    """
    numerator, sums = _HeadLoss.apply(hidden_RD, head_VD, rows, weighting, softcap)
    sums = sums.detach()
    correct, count, accepted, reached = sums[4:].view(4, rows.block_size)
    return LossSums(numerator, sums[1], correct, count, accepted, reached, sums[2], sums[3])
