"""The Triton kernel of the smoke test. A module of its own: Triton reads a kernel's source from its file."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
from triton import language as tl

BLOCK = 128


@triton.jit
def double_and_add(x_ptr, y_ptr, out_ptr, num, BLOCK: tl.constexpr):
    """out = 2 x + y over `num` float32 numbers; doubling is exact, so the sum is rounded once, fused or not."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, 2 * x + y, mask=inside)


SIGNATURE = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "num": "i32", "BLOCK": "constexpr"}
"""What compiling without tensors must be told."""
