"""Linear layers whose three products run in fp8: y = x W^T, and the gradients of x and of W.

Each operand gets one scale, largest magnitude over the dtype's largest number, found anew in every call: no history
that a checkpoint would have to hold. Values and weights are e4m3 (3 bits of mantissa), gradients e5m2 (2 bits and twice
the exponents: one scale must serve rows whose weights and confidence differ by orders of magnitude), as in
arXiv 2209.05433. The forward adds up in the tensor cores' short registers, the backward in float32 every 128 terms
(torchao's defaults): its sums run over thousands of rows.

One scale for each row would follow outliers better, but a product can only take scales along dimensions that it does
not sum over. Each of x, W and the gradient is summed over in one direction by one product and in the other by the next,
so each would need two scales, two passes to find them and two roundings, where one scale serves both layouts.

Weights stay what they were, float32 masters and copies in the model's dtype; their fp8 forms follow those copies.

Legend: R rows, P rows rounded up to MULTIPLE, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.library import custom_op

from dflash.errors import DFlashError

if TYPE_CHECKING:
    from dflash.model import DFlashDraftModel, DraftLayer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Every dimension that a product sums over, and its number of outputs, must be one (torch._scaled_mm)."""
SMALLEST = 1e-30
"""Largest magnitude that a tensor of zeros is taken to have: its scale is then neither 0 nor its inverse infinite."""
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def write_both(x_RC: Tensor, inverse: Tensor, rows8_RC: Tensor, columns8_CP: Tensor) -> None:
    """Write x * inverse in fp8 into rows8_RC and, transposed, into columns8_CP, whose columns past R become 0."""
    if x_RC.is_cuda:
        from dflash.kernels import cast as kernel  # needs Triton, which a machine without a GPU may lack

        kernel.write_both(x_RC, inverse, rows8_RC, columns8_CP)
        return
    rows8_RC.copy_(x_RC.float() * inverse)
    columns8_CP.zero_()
    columns8_CP[:, : len(x_RC)].copy_(rows8_RC.T)


def _padded(num_rows: int) -> int:
    return -(-num_rows // MULTIPLE) * MULTIPLE


@custom_op("dflash::both_layouts", mutates_args=())
def both_layouts(x_RC: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x * inverse in fp8 as (R, C) and as (C, P); an operator that torch.compile calls as it is.

    No clamp: at inverse = largest / amax a product exceeds the range by a rounding of bf16, which the cast takes away.
    """
    rows8_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    columns8_CP = torch.empty(x_RC.shape[1], _padded(x_RC.shape[0]), dtype=dtype, device=x_RC.device)
    write_both(x_RC, inverse, rows8_RC, columns8_CP)
    return rows8_RC, columns8_CP


@both_layouts.register_fake
def _(x_RC: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    columns8_CP = torch.empty(x_RC.shape[1], _padded(x_RC.shape[0]), dtype=dtype, device=x_RC.device)
    return torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device), columns8_CP


def quantize(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x / scale in fp8 as (R, C) and transposed as (C, P), and the float32 scalar scale.

    Zeros give zeros. NaN or infinity make the scale one, so that all that is computed from it is not finite either.
    """
    largest = torch.finfo(dtype).max
    # On its own so that torch.compile makes it in the kernel that makes x.
    amax = torch.linalg.vector_norm(x_RC, ord=float("inf"), dtype=torch.float32).clamp(min=SMALLEST)
    rows8_RC, columns8_CP = both_layouts(x_RC, largest / amax, dtype)
    return rows8_RC, columns8_CP, amax / largest


def product(
    a8_RK: Tensor, b8_NK: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool, out: Any = None
) -> Tensor:
    """Return a @ b.T (R, N) in `dtype`, or write it into `out`. Both are contiguous; `scales` are theirs.

    fast: sums stay in the tensor cores' registers, about 14 bits wide; good for some thousand terms.
    """
    more = {} if out is None else {"out": out}
    a_scale, b_scale = scales
    return torch._scaled_mm(
        a8_RK, b8_NK.T, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast, **more
    )


class _Products(torch.autograd.Function):
    """x W^T with W given in fp8; `weight` itself is there to receive its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_RK: Tensor, weight_NK: Tensor, weight8_NK: Tensor, weight8_KN: Tensor, weight_scale: Tensor
    ) -> Tensor:
        x8_RK, x8_KP, x_scale = quantize(x_RK, E4M3)
        ctx.save_for_backward(x8_KP, x_scale, weight8_KN, weight_scale)
        return product(x8_RK, weight8_NK, (x_scale, weight_scale), x_RK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad_RN,) = grads
        x8_KP, x_scale, weight8_KN, weight_scale = ctx.saved_tensors
        grad8_RN, grad8_NP, grad_scale = quantize(grad_RN, E5M2)
        dx_RK = product(grad8_RN, weight8_KN, (grad_scale, weight_scale), grad_RN.dtype, fast=False)
        dweight_NK = product(grad8_NP, x8_KP, (grad_scale, x_scale), grad_RN.dtype, fast=False)
        return dx_RK, dweight_NK, None, None, None


class Fp8Linear(nn.Linear):
    """nn.Linear with the same parameters and fp8 products; its fp8 weights are buffers that no state dict holds.

    Compiled code reads those buffers: call `refresh` when weights have changed. Uncompiled calls do so by themselves.
    """

    weight8_NK: Tensor
    weight8_KN: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear, name: str) -> None:
        """Take over the parameters of `linear`. Raises DFlashError when its shape is not one for fp8."""
        N, K = linear.weight.shape
        if N % MULTIPLE or K % MULTIPLE:
            raise DFlashError(
                f"{name} has {N} outputs and {K} inputs, not multiples of {MULTIPLE}",
                where="precision fp8",
                fix="Use bf16.",
            )
        super().__init__(K, N, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.register_buffer("weight8_NK", torch.empty(N, K, dtype=E4M3, device=device), persistent=False)
        self.register_buffer("weight8_KN", torch.empty(K, N, dtype=E4M3, device=device), persistent=False)
        self.register_buffer("weight_scale", torch.empty((), device=device), persistent=False)
        self.seen = -1
        """The version of the weight that the buffers were made from."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias (..., N) in input's dtype."""
        if not torch.compiler.is_compiling():
            refresh([self])
        weights = (self.weight, self.weight8_NK, self.weight8_KN, self.weight_scale)
        flat_RN = cast(Tensor, _Products.apply(input.reshape(-1, self.in_features), *weights))
        y = flat_RN.view(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def refresh(linears: Sequence[Fp8Linear]) -> None:
    """Make the fp8 weights anew where anything wrote to a weight since; the buffers stay where they are.

    Nothing waits for the device, and where no weight changed nothing runs.
    """
    stale = [linear for linear in linears if linear.seen != linear.weight._version]
    if not stale:
        return
    largest = torch.finfo(E4M3).max
    weights = [linear.weight.detach() for linear in stale]
    # Of bf16 weights the norms are bf16, and exact: each is the magnitude of one of them.
    amax = torch.stack(torch._foreach_norm(weights, ord=float("inf"))).float().clamp(min=SMALLEST)
    torch._foreach_copy_([linear.weight_scale for linear in stale], list((amax / largest).unbind()))
    for linear, weight_NK, inverse in zip(stale, weights, (largest / amax).unbind(), strict=True):
        write_both(weight_NK, inverse, linear.weight8_NK, linear.weight8_KN)
        linear.seen = linear.weight._version


def use_fp8(model: DFlashDraftModel) -> list[Fp8Linear]:
    """Let the projections and MLPs of a drafter's layers run in fp8, and return them for `refresh`.

    Call it on a model that is on its device and in its dtype: a later `to(dtype)` would cast the fp8 weights as well.
    Names, parameters and state dict stay the same. What else has matrices stays as it is: `fc`, which reads the
    target's states before any norm, outliers and all, and has 1.4 % of a step's operations; the head (`fp8_head`); and
    added heads and convolutions.
    Raises DFlashError when a layer's widths are not multiples of 16; the model is then unchanged.
    """
    places = []
    for number, module in enumerate(model.layers):
        layer = cast("DraftLayer", module)
        for owner, names in ((layer.self_attn, ATTENTION), (layer.mlp, MLP)):
            places += [(owner, name, Fp8Linear(getattr(owner, name), f"layers.{number}.{name}")) for name in names]
    for owner, name, made in places:
        setattr(owner, name, made)
    linears = [made for *_, made in places]
    refresh(linears)
    return linears
