"""One attention function for every place: flex on CUDA, dense SDPA anywhere, eager for tests. Same shapes and numbers.

Legend: b batch, H query heads, G key/value heads, Q queries, T keys, h head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.errors import DFlashError
from dflash.masks import MaskLayout, dense_mask, flex_mask

IMPLEMENTATIONS = ("flex", "sdpa", "eager")
AttentionMask = Tensor | BlockMask | None
MANY_KEY_HEADS = 64
"""Key heads of a batch from which flex shares them among their query heads. With fewer, the backward of early context
tiles, which nearly every block sees, is so long a job that the GPU waits for the last ones; copies of keys and values
cut it (8 heads on an H200: 1.9 ms for 2.5)."""


def choose_attention(name: str, device: torch.device) -> str:
    """Return the implementation for `name`; "auto" is flex on CUDA and sdpa elsewhere.

    Raises DFlashError for flex on a device where torch cannot train it, rather than running something slower.
    """
    if name == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    if name not in IMPLEMENTATIONS:
        raise DFlashError(f"{name!r} is not one of {', '.join(IMPLEMENTATIONS)}", where="attention", fix="Use auto.")
    if name == "flex" and device.type != "cuda":
        raise DFlashError(f"flex attention has no backward on {device.type}", where="attention", fix="Use sdpa there.")
    return name


def build_mask(
    anchors_bN: Tensor, layout: MaskLayout, implementation: str, starts_bN: Tensor | None = None
) -> Tensor | BlockMask:
    """Return the training mask in the form that `implementation` takes; starts_bN as in masks.py."""
    make = flex_mask if implementation == "flex" else dense_mask
    return make(anchors_bN, layout, starts_bN)


class _ContiguousGradient(torch.autograd.Function):
    """The identity. Its gradient is copied to (b, H, Q, h): flex's backward is an eighth slower on one that the output
    projection left as (b, Q, H, h)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def _tiles(q_bHQh: Tensor) -> dict[str, Any]:
    """Return flex's tiles where others than torch's are better (heads of 128, bf16, H200: 2.59 ms a layer for 2.72)."""
    if q_bHQh.shape[-1] != 128 or q_bHQh.dtype != torch.bfloat16:
        return {}
    if torch.cuda.get_device_properties(q_bHQh.device).major != 9:
        return {}
    forward = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 2, "fwd_num_warps": 8}
    tiles = {f"bwd_BLOCK_{name}": 64 for name in ("M1", "N1", "M2", "N2")}
    return {"USE_TMA": True, **forward, **tiles, "bwd_num_stages": 2, "bwd_num_warps": 4}


def block_attention(q_bHQh: Tensor, k_bGTh: Tensor, v_bGTh: Tensor, mask: AttentionMask, implementation: str) -> Tensor:
    """Return softmax(q k^T / sqrt(h) + mask) v as (b, H, Q, h); `mask` None lets every query see every key."""
    scale = q_bHQh.shape[-1] ** -0.5
    if implementation == "flex":
        assert mask is None or isinstance(mask, BlockMask)
        grouped = k_bGTh.shape[0] * k_bGTh.shape[1] >= MANY_KEY_HEADS
        if not grouped:
            groups = q_bHQh.shape[1] // k_bGTh.shape[1]
            k_bGTh, v_bGTh = k_bGTh.repeat_interleave(groups, dim=1), v_bGTh.repeat_interleave(groups, dim=1)
        # Left to itself, torch takes its decoding kernel for fewer than 128 queries, which did not compile in bf16 with
        # a block mask on an H200 (torch 2.11.0; SpecForge#759 pins the kernel too).
        options: Any = {"BACKEND": "TRITON", **_tiles(q_bHQh)}
        out_bHQh = flex_attention(
            q_bHQh, k_bGTh, v_bGTh, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options
        )
        return cast(Tensor, _ContiguousGradient.apply(out_bHQh))
    assert mask is None or isinstance(mask, Tensor)
    groups = q_bHQh.shape[1] // k_bGTh.shape[1]
    k, v = k_bGTh.repeat_interleave(groups, dim=1), v_bGTh.repeat_interleave(groups, dim=1)
    if implementation == "sdpa":
        return F.scaled_dot_product_attention(q_bHQh, k, v, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q_bHQh.dtype, torch.float32)
    scores = (q_bHQh.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v.to(wide)).to(q_bHQh.dtype)
