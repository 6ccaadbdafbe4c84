"""Softmax of a chunk's logits in fp8, the label left out: what the head's gradient multiplies with the head.

Legend: R rows, V vocabulary. l as in `dflash.kernels.entropy`.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton import language as tl

from dflash.kernels import launching_on
from dflash.kernels.entropy import BLOCK, RowStatistics, _shaped


@triton.jit(do_not_specialize_on_alignment=["label_ptr"])
def _chances(x_ptr, label_ptr, top_ptr, total_ptr, out_ptr, multiplier, cap, factor,
             V: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    value = _shaped(tl.load(x_ptr + row * V + at, mask=inside, other=0.0), multiplier, cap, CAPPED)
    chance = factor * tl.exp(value - tl.load(top_ptr + row)) / tl.load(total_ptr + row)
    if CAPPED:
        chance *= 1 - (value / cap) * (value / cap)
    chance = tl.where(at == tl.load(label_ptr + row), 0.0, chance)
    tl.store(out_ptr + row * V + at, chance.to(out_ptr.dtype.element_ty), mask=inside)


def write_chances(
    logits_RV: Tensor,
    label_R: Tensor,
    found: RowStatistics,
    multiplier: float,
    softcap: float | None,
    factor: float,
    out8_RV: Tensor,
) -> None:
    """Write factor * softmax(l) * dl/d(multiplier * x) into out8_RV, in its fp8 dtype, and 0 at each row's label.

    Both matrices are contiguous. factor must keep 1 inside the dtype's range.
    """
    num_rows, vocab = logits_RV.shape
    with launching_on(logits_RV):
        _chances[(num_rows, triton.cdiv(vocab, BLOCK))](
            logits_RV, label_R, found.top_R, found.total_R, out8_RV, float(multiplier), float(softcap or 1.0),
            float(factor), V=vocab, CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
