"""RMSNorm of every head, then RoPE, then heads before tokens: one pass forward and one backward.

Inductor makes five kernels of it, at a quarter of the memory rate (4 of 140 ms a step in five layers of width 4096).
To torch.compile it is an operator that it calls. As kernels of Inductor's own graphs (triton_op) they were compiled
again in each process, whatever lay in the cache: 32 files of a warm start on an H200, torch 2.11.0.

Legend: b batch, L tokens, X = heads * h, h head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op
from triton import language as tl

from dflash.kernels import launching_on

TOKENS = 32
"""Tokens of one program."""


def takes(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel knows such heads: Triton wants powers of two, and float64 must stay float64."""
    return dtype != torch.float64 and head_dim >= 16 and head_dim & (head_dim - 1) == 0


@triton.jit
def _normed(x_ptr, at, inside, weight_ptr, column, eps, HALF: tl.constexpr):
    """Return both halves of x / rms(x), 1 / rms(x), and both halves of the weight."""
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    inverse = tl.rsqrt(mean + eps)[:, None]
    weight_1 = tl.load(weight_ptr + column).to(tl.float32)[None, :]
    weight_2 = tl.load(weight_ptr + column + HALF).to(tl.float32)[None, :]
    return first * inverse, second * inverse, inverse, weight_1, weight_2


@triton.jit
def _forward(x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, L, eps, rope_stride,
             HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, HALF)
    inside = (token < L)[:, None]
    at = ((b * L + token[:, None]) * HEADS + head) * (2 * HALF) + column[None, :]
    n1, n2, _, w1, w2 = _normed(x_ptr, at, inside, weight_ptr, column, eps, HALF)
    z1, z2 = n1 * w1, n2 * w2
    rope = b * rope_stride + token[:, None] * (2 * HALF) + column[None, :]
    cos = tl.load(cos_ptr + rope, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + rope, mask=inside, other=0.0).to(tl.float32)
    to = ((b * HEADS + head) * L + token[:, None]) * (2 * HALF) + column[None, :]
    tl.store(out_ptr + to, (z1 * cos - z2 * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + to + HALF, (z2 * cos + z1 * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, L, eps, rope_stride,
              stride_b, stride_h, stride_l, HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, HALF)
    inside = (token < L)[:, None]
    at = ((b * L + token[:, None]) * HEADS + head) * (2 * HALF) + column[None, :]
    n1, n2, inverse, w1, w2 = _normed(x_ptr, at, inside, weight_ptr, column, eps, HALF)
    rope = b * rope_stride + token[:, None] * (2 * HALF) + column[None, :]
    cos = tl.load(cos_ptr + rope, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + rope, mask=inside, other=0.0).to(tl.float32)
    given = b * stride_b + head * stride_h + token[:, None].to(tl.int64) * stride_l + column[None, :]
    g1 = tl.load(grad_ptr + given, mask=inside, other=0.0).to(tl.float32)
    g2 = tl.load(grad_ptr + given + HALF, mask=inside, other=0.0).to(tl.float32)
    z1, z2 = g1 * cos + g2 * sin, g2 * cos - g1 * sin
    program = (b * HEADS + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + program * (2 * HALF) + column, tl.sum(z1 * n1, 0))
    tl.store(partial_ptr + program * (2 * HALF) + HALF + column, tl.sum(z2 * n2, 0))
    z1, z2 = z1 * w1, z2 * w2
    along = ((tl.sum(z1 * n1, 1) + tl.sum(z2 * n2, 1)) / (2 * HALF))[:, None]
    tl.store(dx_ptr + at, (inverse * (z1 - n1 * along)).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + at + HALF, (inverse * (z2 - n2 * along)).to(dx_ptr.dtype.element_ty), mask=inside)


@custom_op("dflash::norm_rope", mutates_args=())
def norm_rope(x_bLX: Tensor, weight_h: Tensor, cos_b1Lh: Tensor, sin_b1Lh: Tensor, eps: float) -> Tensor:
    """Return rotate(weight * x / rms(x)) of each head as (b, heads, L, h), in x's dtype.

    The sums and products are float32, rounded once. cos and sin as from `model.rotation`, their batch 1 or b.
    """
    (b, L, width), h = x_bLX.shape, weight_h.shape[0]
    out = x_bLX.new_empty(b, width // h, L, h)
    rope_stride = 0 if cos_b1Lh.shape[0] == 1 else L * h
    with launching_on(x_bLX):
        _forward[(triton.cdiv(L, TOKENS), width // h, b)](
            x_bLX.contiguous(), weight_h, cos_b1Lh.contiguous(), sin_b1Lh.contiguous(), out, L, eps, rope_stride,
            HEADS=width // h, HALF=h // 2, TOKENS=TOKENS,
        )  # fmt: skip
    return out


@custom_op("dflash::norm_rope_backward", mutates_args=())
def norm_rope_backward(
    grad_bHLh: Tensor, x_bLX: Tensor, weight_h: Tensor, cos_b1Lh: Tensor, sin_b1Lh: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (b, L, X) and of the weight (h,), the latter summed in float32 in a fixed order."""
    (b, L, width), h = x_bLX.shape, weight_h.shape[0]
    heads, blocks = width // h, triton.cdiv(L, TOKENS)
    if grad_bHLh.stride(-1) != 1:
        grad_bHLh = grad_bHLh.contiguous()
    dx = torch.empty_like(x_bLX, memory_format=torch.contiguous_format)
    partial = x_bLX.new_empty(b * heads * blocks, h, dtype=torch.float32)
    rope_stride = 0 if cos_b1Lh.shape[0] == 1 else L * h
    with launching_on(x_bLX):
        _backward[(blocks, heads, b)](
            grad_bHLh, x_bLX.contiguous(), weight_h, cos_b1Lh.contiguous(), sin_b1Lh.contiguous(), dx, partial, L, eps,
            rope_stride, grad_bHLh.stride(0), grad_bHLh.stride(1), grad_bHLh.stride(2),
            HEADS=heads, HALF=h // 2, TOKENS=TOKENS,
        )  # fmt: skip
    return dx, partial.sum(0).to(weight_h.dtype)


@norm_rope.register_fake
def _(x_bLX: Tensor, weight_h: Tensor, cos_b1Lh: Tensor, sin_b1Lh: Tensor, eps: float) -> Tensor:
    (b, L, width), h = x_bLX.shape, weight_h.shape[0]
    return x_bLX.new_empty(b, width // h, L, h)


@norm_rope_backward.register_fake
def _(
    grad_bHLh: Tensor, x_bLX: Tensor, weight_h: Tensor, cos_b1Lh: Tensor, sin_b1Lh: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_bLX, memory_format=torch.contiguous_format), torch.empty_like(weight_h)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad_bHLh: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight = norm_rope_backward(grad_bHLh, *ctx.saved_tensors, ctx.eps)
    return dx, dweight, None, None, None


norm_rope.register_autograd(_differentiate, setup_context=_save)
