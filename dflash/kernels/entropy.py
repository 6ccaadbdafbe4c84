"""Cross-entropy over the vocabulary in two passes over a chunk's logits: what a row needs, then its gradient in place.

Everything is computed in float32 from the logits as they are stored, so bf16 logits are read twice and written once,
and no wider copy is made. Torch's own operations need about twelve passes (18 of 140 ms a step at a vocabulary of
151,936).

Legend: R rows, V vocabulary. l = c tanh(multiplier * x / c) for stored logits x and softcap c, or multiplier * x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton import language as tl

from dflash.kernels import launching_on

BLOCK = 4096


class RowStatistics(NamedTuple):
    """top_R: largest l. total_R: sum of exp(l - top). gold_R: the label's l - top. best_R: int64, the first largest."""

    top_R: Tensor
    total_R: Tensor
    gold_R: Tensor
    best_R: Tensor


@triton.jit
def _shaped(x, multiplier, cap, CAPPED: tl.constexpr):
    x = x.to(tl.float32) * multiplier
    if CAPPED:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
    return x


# A chunk's labels may start at any address. Left to itself, Triton compiles for an aligned one and later, unseen by the
# gate, again for another.
@triton.jit(do_not_specialize_on_alignment=["label_ptr"])
def _statistics(x_ptr, label_ptr, top_ptr, total_ptr, gold_ptr, best_ptr, stride, multiplier, cap,
                V: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    top, total = float("-inf"), 0.0
    # Each lane keeps its own largest value and where it stood: an argmax across lanes in every round costs much more.
    lane_top = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_first = tl.zeros([BLOCK], tl.int32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < V
        value = _shaped(tl.load(x_ptr + at, mask=inside, other=0.0), multiplier, cap, CAPPED)
        value = tl.where(inside, value, float("-inf"))
        better = value > lane_top
        lane_top, lane_first = tl.where(better, value, lane_top), tl.where(better, first, lane_first)
        new_top = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(value - new_top), 0)
        top = new_top
    best = tl.min(tl.where(lane_top == top, lane_first + tl.arange(0, BLOCK), V), 0)
    gold = _shaped(tl.load(x_ptr + tl.load(label_ptr + row)), multiplier, cap, CAPPED)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)
    tl.store(gold_ptr + row, gold - top)
    tl.store(best_ptr + row, best)


@triton.jit(do_not_specialize_on_alignment=["label_ptr"])
def _gradient(x_ptr, label_ptr, top_ptr, total_ptr, weight_ptr, stride, multiplier, cap,
              V: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    x_ptr += row * stride + at
    value = _shaped(tl.load(x_ptr, mask=inside, other=0.0), multiplier, cap, CAPPED)
    scale = tl.load(weight_ptr + row) * multiplier
    chance = tl.exp(value - tl.load(top_ptr + row)) / tl.load(total_ptr + row)
    gradient = scale * (chance - (at == tl.load(label_ptr + row)).to(tl.float32))
    if CAPPED:
        gradient *= 1 - (value / cap) * (value / cap)
    tl.store(x_ptr, gradient.to(x_ptr.dtype.element_ty), mask=inside)


def row_statistics(logits_RV: Tensor, label_R: Tensor, multiplier: float, softcap: float | None) -> RowStatistics:
    """Return what each row's loss and gradient need, float32. logits_RV must be contiguous; label_R int64."""
    num_rows, vocab = logits_RV.shape
    top_R, total_R, gold_R = (torch.empty(num_rows, device=logits_RV.device) for _ in range(3))
    best_R = torch.empty(num_rows, device=logits_RV.device, dtype=torch.int64)
    with launching_on(logits_RV):
        _statistics[(num_rows,)](
            logits_RV, label_R, top_R, total_R, gold_R, best_R, logits_RV.stride(0), float(multiplier),
            float(softcap or 1.0), V=vocab, CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return RowStatistics(top_R, total_R, gold_R, best_R)


def gradient_(
    logits_RV: Tensor,
    label_R: Tensor,
    found: RowStatistics,
    weight_R: Tensor,
    multiplier: float,
    softcap: float | None,
) -> Tensor:
    """Overwrite logits_RV with the gradient of sum(weight * cross-entropy) with respect to it, and return it."""
    num_rows, vocab = logits_RV.shape
    with launching_on(logits_RV):
        _gradient[(num_rows, triton.cdiv(vocab, BLOCK))](
            logits_RV, label_R, found.top_R, found.total_R, weight_R, logits_RV.stride(0), float(multiplier),
            float(softcap or 1.0), V=vocab, CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return logits_RV
