"""Linear layers in fp8 the plain way: round both operands, then multiply in float32. What proofs measure fp8 by.

Nothing here is shared with `dflash.fp8`: a wrong scale or layout there must not show up here as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dflash.model import DFlashDraftModel

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in float32 with every value rounded to what `dtype` and one scale for all of x can hold."""
    scale = x.float().abs().max() / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).float() * scale if scale > 0 else x.float()


class _RoundedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        x_RK, w_NK = (rounded(t, torch.float8_e4m3fn) for t in (x.flatten(0, -2), weight_NK))
        ctx.save_for_backward(x_RK, w_NK)
        ctx.dtypes, ctx.shape = (x.dtype, weight_NK.dtype), x.shape
        return (x_RK @ w_NK.T).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x_RK, w_NK = ctx.saved_tensors
        grad_RN = rounded(grads[0].flatten(0, -2), torch.float8_e5m2)
        dx = (grad_RN @ w_NK).view(ctx.shape).to(ctx.dtypes[0])
        return dx, (grad_RN.T @ x_RK).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None


def rounded_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight.T in x's dtype; both operands of it and of both its gradients are rounded to fp8."""
    return cast(Tensor, _RoundedProducts.apply(x, weight_NK))


def round_linears(model: DFlashDraftModel) -> None:
    """Let the projections and MLPs of the drafter's layers round as fp8 does."""
    for module in model.layers.modules():
        for name, child in module.named_children():
            if name in LINEARS and isinstance(child, nn.Linear):
                child.forward = partial(_forward, child)  # type: ignore[method-assign]


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    y = rounded_product(x, linear.weight)
    return y if linear.bias is None else y + linear.bias
