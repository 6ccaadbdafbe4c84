"""A matrix in fp8 twice, as it lies and transposed, in one pass over it: fp8 products on a GPU want both operands with
the summed dimension contiguous, so each of a linear layer's three products reads another layout.

Read once and written twice, an element of bf16 moves 4 bytes. Inductor writes the two layouts in two kernels, 5 or 6
bytes (pytorch#130015).

Legend: R rows, C columns.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton import language as tl

from dflash.kernels import launching_on

TILE_R, TILE_C = 128, 64


# `inverse` may be one of many in a vector, at any address, and a chunk has any number of rows: without these, Triton
# compiles again for each kind of number it meets.
@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["inverse_ptr"])
def _both(x_ptr, inverse_ptr, rows_ptr, columns_ptr, R, C, stride, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < R)[:, None] & (column < C)[None, :]
    at = row[:, None] * C + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    small = (x * tl.load(inverse_ptr)).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + at, small, mask=inside)
    to = column[:, None] * stride + row[None, :]
    tl.store(columns_ptr + to, tl.trans(small), mask=(column < C)[:, None] & (row < stride)[None, :])


def write_both(x_RC: Tensor, inverse: Tensor, rows8_RC: Tensor, columns8_CP: Tensor) -> None:
    """Write x * inverse into rows8_RC and, transposed, into columns8_CP, whose columns past R become 0.

    inverse is a float32 scalar on the device; both results are contiguous and of one fp8 dtype. A product past the
    dtype's range becomes its largest number.
    """
    num_rows, width = x_RC.shape
    padded = columns8_CP.shape[1]
    with launching_on(x_RC):
        _both[(triton.cdiv(padded, TILE_R), triton.cdiv(width, TILE_C))](
            x_RC.contiguous(), inverse, rows8_RC, columns8_CP, num_rows, width, padded, TILE_R=TILE_R, TILE_C=TILE_C
        )
