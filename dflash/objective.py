"""The training objective: weighted loss of supervised slots through the target's frozen head.

Returned as numerator and denominator, so that micro-batches, worker threads and ranks add both and divide once: the
gradient does not depend on how a batch was cut. The denominator is sum(m * w) for every weighting and every kind of
label, so a learning rate keeps its meaning.

Legend: R supervised rows (slots), D width, V vocabulary, M blocks, K block size.
Sources: static decay, arXiv 2602.06036 equation 4; D-PACE, arXiv 2605.18810.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.errors import DFlashError
from dflash.fp8_head import Fp8Head
from dflash.soft_labels import Teacher, divergence_

PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that softmax and sums run in: float64 stays, everything narrower becomes float32."""
    return torch.promote_types(dtype, torch.float32)


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
        if not self.gamma > 0:
            raise DFlashError(f"{self.gamma} is not above 0", where="gamma", fix="It is a decay length in slots.")
        if not 0 <= self.alpha <= 1:
            raise DFlashError(f"{self.alpha} is not in [0, 1]", where="dpace_alpha", fix="It is D-PACE's floor.")

    def slot_weights(self, loss_MK: Tensor, valid_MK: Tensor) -> Tensor:
        """Return w * m (M, K), float64 for float64 losses, else float32: zero at slot 0 and wherever a slot is not
        supervised. Detached.

        D-PACE: q = exp(-CE), s = (1-alpha) q + alpha (1 where unsupervised), C_i = prod_{t<=i} s_t,
        w_i = sum_{t>=i} m_t C_t: a slot counts by how many accepted tokens hang on it. loss_MK is the cross-entropy
        of the hard label, also where soft labels are trained: q is how sure the drafter is of the token that comes.
        """
        dtype = at_least_float32(loss_MK.dtype)
        valid = valid_MK.to(dtype)
        if self.kind == "decay":
            slot = torch.arange(loss_MK.shape[1], device=loss_MK.device, dtype=dtype)
            return valid * torch.exp(-(slot - 1) / self.gamma)
        confidence = (1 - self.alpha) * torch.exp(-loss_MK.detach().to(dtype)) + self.alpha
        reach = torch.where(valid_MK, confidence, 1.0).cumprod(dim=1)
        return (valid * reach).flip(1).cumsum(1).flip(1) * valid


@dataclass(frozen=True)
class Rows:
    """Which rows of the drafter's output the loss reads, grouped by block and cut into chunks of whole blocks.

    Made on the host (`make_rows`), so that no step waits for the device to count them.
    index_R   int64 into the flattened (batch, Q) rows, ascending
    block_R   int64, the row's block within its chunk
    slot_R    int64, the row's slot
    label_R   int64, token id
    valid_R   bool, whether the row is supervised; the others only fill the shape up and weigh nothing
    chunks    (first row, end row, number of blocks) of each chunk
    """

    index_R: Tensor
    block_R: Tensor
    slot_R: Tensor
    label_R: Tensor
    valid_R: Tensor
    chunks: tuple[tuple[int, int, int], ...]
    block_size: int

    def to(self, device: torch.device | str) -> Rows:
        """Return the rows on `device`; the chunks stay on the host."""
        moved: dict[str, Any] = {name: send(tensor, device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that lie on a device, by name."""
        return {name: getattr(self, name) for name in ("index_R", "block_R", "slot_R", "label_R", "valid_R")}

    def weights(self, entropy_R: Tensor, chunk: tuple[int, int, int], weighting: Weighting) -> tuple[Tensor, Tensor]:
        """Return m * w (R,) of one chunk's rows, from their cross-entropy, and m (M, K), both in its dtype."""
        first, end, num_blocks = chunk
        places, shape = (self.block_R[first:end], self.slot_R[first:end]), (num_blocks, self.block_size)
        entropy_MK = entropy_R.new_zeros(shape).index_put(places, entropy_R)
        valid_MK = entropy_R.new_zeros(shape).index_put(places, self.valid_R[first:end].to(entropy_R.dtype))
        return weighting.slot_weights(entropy_MK, valid_MK.bool())[places], valid_MK


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on `device`; a GPU is not waited for on the way to it.

    From pageable memory CUDA copies in stream order while the host waits: each step would begin when the one before it
    has ended. On the way back to the host waiting is right, or the tensor would be read before it is there.
    """
    to_gpu = torch.device(device).type == "cuda"
    if to_gpu and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=to_gpu)


def make_rows(labels_MK: Tensor, valid_MK: Tensor, chunk_rows: int, levels: int | None = None) -> Rows:
    """Return the rows of M blocks that the loss reads; a chunk holds whole blocks and at most about `chunk_rows` rows.

    levels   None: the supervised rows, as many as there are. A number: slots 1 on of whole blocks, all those with a
             supervised slot and as many others as it takes to reach a multiple of 1 / levels of M, so that rows come in
             `levels` shapes only (`level_blocks`).

    Raises DFlashError where slot 0 is supervised: it holds the anchor, and nothing is drafted there.
    """
    if valid_MK[:, 0].any():
        raise DFlashError("slot 0 of a block is supervised", where="valid_MK", fix="Slots 1 on have labels.")
    num_blocks, block_size = labels_MK.shape
    valid = valid_MK.numpy()  # numpy: four times as fast as torch here, and each step waits for it
    if levels is None:
        index = np.flatnonzero(valid)
    else:
        index = _whole_blocks(np.logical_or.reduce(valid, axis=1), block_size, levels)
    block = index // block_size
    slot = index - block * block_size
    if levels is not None:
        block = np.arange(len(index)) // (block_size - 1)  # its place among those that are read
    blocks_per_chunk = max(1, min(num_blocks, chunk_rows // max(1, block_size - 1)))
    edges = np.searchsorted(block, np.arange(0, num_blocks + blocks_per_chunk, blocks_per_chunk)).tolist()
    chunks = tuple((first, end, blocks_per_chunk) for first, end in pairwise(edges) if end > first)
    label = labels_MK.numpy().ravel()[index]
    columns = (index, block % blocks_per_chunk, slot, label, valid.ravel()[index])
    index_R, block_R, slot_R, label_R, valid_R = (torch.from_numpy(column) for column in columns)
    return Rows(index_R, block_R, slot_R, label_R, valid_R, chunks, block_size)


def level_blocks(num_blocks: int, levels: int) -> list[int]:
    """Return how many of `num_blocks` blocks `make_rows` may take whole, ascending."""
    return sorted({-(-num_blocks * level // levels) for level in range(1, levels + 1)})


def _whole_blocks(needed_M: np.ndarray, block_size: int, levels: int) -> np.ndarray:
    """Return the flat index of slots 1 on of the blocks that are needed and of the first others up to a level."""
    count = next(level for level in level_blocks(len(needed_M), levels) if level >= needed_M.sum())
    blocks = np.sort(np.argsort(~needed_M, kind="stable")[:count])
    return (blocks[:, None] * block_size + np.arange(1, block_size)).ravel()


@dataclass
class LossSums:
    """Sums over rows or blocks; add them over micro-batches and workers before dividing.

    numerator is of the loss that is trained, mixed where labels are soft, and has a gradient; denominator is the sum of
    m * w. The rest is about hard labels. All slot_ sums are (K,): slot_correct and slot_count are top-1 hits and
    supervised rows; slot_accepted and slot_reached the same where every earlier slot of the block was a hit, so that
    their ratio is the conditional accuracy that decides acceptance. accepted sums, over blocks with a supervised slot,
    the leading run of hits; blocks counts them.
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
        """Return all sums as one detached vector (4 + 4K), so that one copy brings them to the host."""
        scalars = torch.stack([self.numerator.detach(), self.denominator, self.accepted, self.blocks])
        return torch.cat([scalars, self.slot_correct, self.slot_count, self.slot_accepted, self.slot_reached])


@dataclass(frozen=True)
class _Objective:
    """A loss without its states: what `head_loss` was given, checked."""

    head_VD: Tensor
    rows: Rows
    weighting: Weighting
    softcap: float | None
    multiplier: float
    soft_weight: float
    teacher: Teacher | None
    fp8_head: Fp8Head | None

    def buffer(self, hidden_RD: Tensor) -> Tensor | None:
        """Return room for the logits of any chunk where kernels take them, else None.

        Of one size in every step, whatever the number of its rows, so that the allocator finds what it had.
        """
        if self.teacher is not None or not hidden_RD.is_cuda or hidden_RD.dtype == torch.float64:
            return None
        most = max((num_blocks for *_, num_blocks in self.rows.chunks), default=0) * (self.rows.block_size - 1)
        return hidden_RD.new_empty(most, len(self.head_VD))

    def chunk(self, hidden_RD: Tensor, chunk: tuple[int, int, int], buffer: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradient of the numerator for the rows of one chunk and their sums (4 + 4K).

        A function of its own, so that a chunk's logits are gone before the next one's are made. Works in place.
        """
        first, end, _ = chunk
        label_R = self.rows.label_R[first:end]
        if buffer is not None:
            return self._kernel_chunk(hidden_RD[first:end], label_R, chunk, buffer[: end - first])
        row_R = torch.arange(end - first, device=hidden_RD.device)
        logits_RV = _wide_logits(hidden_RD[first:end], self.head_VD, self.multiplier, self.softcap)
        tanh_RV = None if self.softcap is None else logits_RV / self.softcap
        top_R1, best_R1 = logits_RV.max(-1, keepdim=True)
        gold_R1 = logits_RV.sub_(top_R1).gather(1, label_R[:, None])
        teacher_RV = divergence_R = None
        if self.teacher is not None:
            given = self.teacher
            teacher_RV = _wide_logits(given.state_RD[first:end], self.head_VD, given.multiplier, given.softcap)
            divergence_R = divergence_(teacher_RV, logits_RV)
        total_R1 = logits_RV.exp_().sum(-1, keepdim=True)
        loss_R = entropy_R = (total_R1.log() - gold_R1)[:, 0]
        if divergence_R is not None:
            loss_R = (1 - self.soft_weight) * entropy_R + self.soft_weight * divergence_R
        weight_R, sums = self._weigh(entropy_R, loss_R, best_R1[:, 0] == label_R, chunk)

        # From exp(logits) to weight * multiplier * (p - (1 - s) onehot - s p_teacher), then through the softcap.
        scale_R1 = (weight_R * self.multiplier)[:, None]
        logits_RV.mul_(scale_R1 / total_R1)
        logits_RV[row_R, label_R] -= (1 - self.soft_weight) * scale_R1[:, 0]
        if teacher_RV is not None:
            logits_RV.addcmul_(teacher_RV, scale_R1, value=-self.soft_weight)
        if tanh_RV is not None:
            logits_RV.mul_(tanh_RV.square_().neg_().add_(1))
        return logits_RV.to(hidden_RD.dtype) @ self.head_VD, sums

    def _kernel_chunk(
        self, hidden_RD: Tensor, label_R: Tensor, chunk: tuple[int, int, int], logits_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for hard labels on a GPU: the logits stay in the states' dtype and become their own gradient."""
        from dflash.kernels import entropy  # needs Triton, which a machine without a GPU may lack

        if self.fp8_head is None:
            torch.mm(hidden_RD, self.head_VD.T, out=logits_RV)
        else:
            self.fp8_head.logits(hidden_RD, logits_RV)
        found = entropy.row_statistics(logits_RV, label_R, self.multiplier, self.softcap)
        entropy_R = found.total_R.log() - found.gold_R
        weight_R, sums = self._weigh(entropy_R, entropy_R, found.best_R == label_R, chunk)
        about = (logits_RV, label_R, found, weight_R, self.multiplier, self.softcap)
        if self.fp8_head is not None:
            return self.fp8_head.gradient(*about), sums
        return entropy.gradient_(*about) @ self.head_VD, sums

    def _weigh(
        self, entropy_R: Tensor, loss_R: Tensor, hit_R: Tensor, chunk: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the weights m * w (R,) of one chunk's rows and the chunk's sums."""
        first, end, num_blocks = chunk
        weight_R, valid_MK = self.rows.weights(entropy_R, chunk, self.weighting)
        places = (self.rows.block_R[first:end], self.rows.slot_R[first:end])
        hit_R = hit_R & self.rows.valid_R[first:end]
        hit_MK = entropy_R.new_zeros(num_blocks, self.rows.block_size).index_put(places, hit_R.to(entropy_R.dtype))
        return weight_R, _tally(weight_R, loss_R, hit_MK, valid_MK)


def _wide_logits(state_RD: Tensor, head_VD: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """Return new logits (R, V) that the caller may overwrite: the product in the states' dtype, the rest wider."""
    logits_RV = state_RD @ head_VD.T
    logits_RV = logits_RV.to(at_least_float32(logits_RV.dtype))
    if multiplier != 1.0:
        logits_RV.mul_(multiplier)
    return logits_RV if softcap is None else logits_RV.div_(softcap).tanh_().mul_(softcap)


def _tally(weight_R: Tensor, loss_R: Tensor, hit_MK: Tensor, valid_MK: Tensor) -> Tensor:
    """Return one chunk's sums in the order of `LossSums.vector`; hit_MK and valid_MK hold zeros and ones."""
    # Leading hits: an unsupervised slot ends the run, as the end of the text ends a decode.
    accepted_MK = hit_MK.clone()
    accepted_MK[:, 0] = 1.0
    accepted_MK = accepted_MK.cumprod(1)
    reached_MK = valid_MK.clone()
    reached_MK[:, 1:] *= accepted_MK[:, :-1]
    accepted_MK[:, 0] = 0.0
    blocks = valid_MK.amax(1).sum()
    scalars = torch.stack([(weight_R * loss_R).sum(), weight_R.sum(), accepted_MK.sum(), blocks])
    return torch.cat([scalars, hit_MK.sum(0), valid_MK.sum(0), accepted_MK.sum(0), reached_MK.sum(0)])


class _HeadLoss(torch.autograd.Function):
    """Head and loss in one pass: the gradient of the states is made chunk by chunk in the forward, while the chunk's
    logits exist, so no logits are kept or made twice. The frozen head and the teacher get none."""

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, objective: _Objective) -> tuple[Tensor, Tensor]:
        size = 4 + 4 * objective.rows.block_size
        sums = torch.zeros(size, device=hidden_RD.device, dtype=at_least_float32(hidden_RD.dtype))
        gradient_RD = torch.empty_like(hidden_RD)
        buffer = objective.buffer(hidden_RD)
        for chunk in objective.rows.chunks:
            gradient_RD[chunk[0] : chunk[1]], found = objective.chunk(hidden_RD, chunk, buffer)
            sums += found
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        (gradient_RD,) = ctx.saved_tensors
        assert grads[0] is not None
        # A scalar does not widen the product, and stays unrounded where the states are bf16.
        return gradient_RD * grads[0], None


def head_loss(
    hidden_RD: Tensor,
    head_VD: Tensor,
    rows: Rows,
    weighting: Weighting,
    *,
    soft_weight: float = 0.0,
    teacher: Teacher | None = None,
    softcap: float | None = None,
    multiplier: float = 1.0,
    fp8_head: Fp8Head | None = None,
) -> LossSums:
    """Return the loss sums of supervised states `hidden_RD` through the frozen head `head_VD`.

    A row's loss is (1 - soft_weight) CE(hard label) + soft_weight KL(teacher || drafter). 0 trains hard labels only and
    needs no teacher (one that is given is not read); anything above needs `teacher`. Row weights, D-PACE's included,
    come from the hard label's CE in both cases.
    softcap and multiplier are the drafter's: its logits are softcap * tanh(multiplier * (h @ head.T) / softcap), as in
    `head.head_logits`. The teacher has its own.

    Products run in hidden's dtype, softmax and sums in float32; float64 stays float64 throughout. Memory is one chunk
    of float32 logits, a second one with a softcap and one more with soft labels, beside a bf16 chunk where the states
    are bf16; on a GPU and with hard labels it is one chunk in the states' dtype. Nothing waits for the device. No rows
    give zeros and a zero gradient.
    With fp8_head, the same head's, both products run in fp8 and the rest as it does: on a GPU, hard labels only.
    Raises DFlashError if states, head, rows and teacher do not fit each other, or soft_weight is not from 0 to 1, or
    fp8_head comes where it is not used.
    """
    if not 0.0 <= soft_weight <= 1.0:
        raise DFlashError(f"{soft_weight} is not from 0 to 1", where="soft_weight", fix="0 trains hard labels only.")
    if len(hidden_RD) != len(rows.index_R):
        raise DFlashError(
            f"{len(hidden_RD)} states for {len(rows.index_R)} supervised rows",
            where="head_loss",
            fix="Gather the states by rows.index_R.",
        )
    if hidden_RD.dtype != head_VD.dtype:
        raise DFlashError(
            f"the states are {hidden_RD.dtype} and the head is {head_VD.dtype}",
            where="head_loss",
            fix="Cast the head, which has no gradient.",
        )
    if soft_weight > 0:
        if teacher is None:
            raise DFlashError(
                f"{soft_weight} asks for soft labels, and there is no teacher",
                where="soft_weight",
                fix="Pass the target's final states as a Teacher, or 0.",
            )
        teacher.check(hidden_RD)
    given = teacher if soft_weight > 0 else None
    if fp8_head is not None and (given is not None or not hidden_RD.is_cuda or hidden_RD.dtype == torch.float64):
        what = f"states are {hidden_RD.dtype} on {hidden_RD.device.type}, soft_weight {soft_weight}"
        raise DFlashError(what, where="fp8_head", fix="It is for hard labels on a GPU, not in float64.")
    objective = _Objective(head_VD.detach(), rows, weighting, softcap, multiplier, soft_weight, given, fp8_head)
    numerator, sums = _HeadLoss.apply(hidden_RD, objective)
    sums = sums.detach()
    correct, count, accepted, reached = sums[4:].view(4, rows.block_size)
    return LossSums(numerator, sums[1], correct, count, accepted, reached, sums[2], sums[3])
