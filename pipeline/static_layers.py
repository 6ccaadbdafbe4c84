"""A column of attention layers over keys and values that never move, one sequence at a time.

The target's layers and the drafter's run here by the same lines: a block of Q tokens stands at slots p to p + Q - 1, a
token's slot being its position, writes its keys and values there and attends to the first slots through a mask. What
lies behind p + Q is junk that the masks hide and later blocks overwrite, so nothing is ever taken back.

All between two attentions is one function without the number of attended slots in it: compiled, it is compiled once
for all layers and all lengths. Attention itself is one kernel of torch's.

Shape suffixes: Q tokens of the block, S slots, T slots attended to, L layers, D model width, X heads side by side,
H query heads, N key-value heads, G query heads of one key-value head, h head width, V vocabulary. The batch axis is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.compile.counters import counting_backend
from dflash.compile.settings import configure_thread
from dflash.model import DraftLayer, Rotation, rotate

BACKEND = "inductor"

Function = Callable[..., Any]


def compiled_once(function: Function) -> Function:
    """Return `function` compiled, the same one for every caller: each shape is compiled once in a process.

    Anything that would make a slower program in silence, a graph break or too many shapes, is an error.
    """
    return _compiled(function, BACKEND)


@functools.cache
def _compiled(function: Function, backend: str) -> Function:
    configure_thread()
    made: Function = torch.compile(
        function, backend=counting_backend(backend, lambda direction: None), fullgraph=True, dynamic=False
    )
    return made


def as_written(function: Function) -> Function:
    """Return `function`: what stands where compiled_once could."""
    return function


@dataclass(frozen=True)
class Block:
    """Where Q tokens stand: their slots (Q,), the rotation of their positions, and one mask (Q, S) for each layer, of
    the layers' dtype, 0 where a query sees and -inf where not."""

    slots_Q: Tensor
    rope: Rotation
    masks: Sequence[Tensor]


class StaticLayers:
    """`layers` (transformers' Llama, Qwen2 or Qwen3 ones, or DraftLayers) with num_slots slots.

    rope   cos and sin of every slot, each (S, h), in the layers' dtype
    The cache holds num_slots x layers x 2 x N x h numbers of that dtype.
    """

    def __init__(self, layers: nn.ModuleList, num_key_value_heads: int, rope: Rotation) -> None:
        self.layers: list[Any] = list(layers)
        self.rope = rope
        shape = (len(layers), num_key_value_heads, *rope[0].shape)
        # Zeros: an unwritten slot has weight 0, but 0 times a NaN of uninitialised memory would be NaN.
        self.keys_LNSh, self.values_LNSh = rope[0].new_zeros(shape), rope[0].new_zeros(shape)

    def run(self, x_1QD: Tensor, block: Block, num_keys: int, wrap: Callable[[Function], Function]) -> list[Tensor]:
        """Return what each layer gives (1, Q, D), after writing the block's keys and values.

        num_keys   slots attended to; none behind it may be visible
        wrap       compiled_once or as_written
        """
        enter, between, leave = wrap(_enter), wrap(_between), wrap(_leave)
        outputs: list[Tensor] = []
        slots_Q, rope = block.slots_Q, block.rope
        query, after = enter(x_1QD, self.layers[0], rope, self.keys_LNSh[0], self.values_LNSh[0], slots_Q)
        for index, (layer, mask_QS) in enumerate(zip(self.layers, block.masks, strict=True)):
            keys, values = self.keys_LNSh[index, :, :num_keys], self.values_LNSh[index, :, :num_keys]
            attended = _attend(query, keys, values, mask_QS[:, :num_keys])
            if index + 1 < len(self.layers):
                following, cache = self.layers[index + 1], (self.keys_LNSh[index + 1], self.values_LNSh[index + 1])
                x_1QD, query, after = between(attended, x_1QD, after, layer, following, rope, *cache, slots_Q)
            else:
                x_1QD = leave(attended, x_1QD, after, layer)
            outputs.append(x_1QD)
        return outputs


def _attend(query_1HQh: Tensor, key_NTh: Tensor, value_NTh: Tensor, mask_QT: Tensor) -> Tensor:
    """Return attention (N, G, Q, h). The N heads stand as a batch, so that their keys serve G query heads uncopied."""
    query_NGQh = query_1HQh[0].unflatten(0, (len(key_NTh), -1))
    groups = query_NGQh.shape[1]
    key_NGTh, value_NGTh = (x[:, None].expand(-1, groups, -1, -1) for x in (key_NTh, value_NTh))
    return F.scaled_dot_product_attention(query_NGQh, key_NGTh, value_NGTh, attn_mask=mask_QT[None, None])


def _enter(
    x_1QD: Tensor, layer: Any, rope: Rotation, key_NSh: Tensor, value_NSh: Tensor, slots_Q: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's queries (1, H, Q, h) and, with a convolution, the taps of the side after its attention; writes
    the tokens' keys and values."""
    attention, conv, after = layer.self_attn, getattr(layer, "attention_conv", None), None
    normed = layer.input_layernorm(x_1QD)
    if conv is not None:
        before, after = conv.kernels(normed)
        normed = conv.convolve(normed, before)
    q_1QX, k_1QX, v_1QX = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
    key_NSh.index_copy_(1, slots_Q, rotate(_heads(k_1QX, attention, "k_norm"), rope)[0])
    value_NSh.index_copy_(1, slots_Q, _heads(v_1QX, attention)[0])
    return rotate(_heads(q_1QX, attention, "q_norm"), rope), after


def _heads(x_1QX: Tensor, attention: Any, norm: str | None = None) -> Tensor:
    """Return (1, heads, Q, h), normed if the layer has such a norm."""
    x_1QHh = x_1QX.unflatten(-1, (-1, attention.head_dim))
    of_layer = getattr(attention, norm, None) if norm else None
    return (x_1QHh if of_layer is None else of_layer(x_1QHh)).transpose(1, 2)


def _leave(attended_NGQh: Tensor, x_1QD: Tensor, after: Tensor | None, layer: Any) -> Tensor:
    """Return what a layer gives (1, Q, D) from its attention and its input."""
    added = layer.self_attn.o_proj(attended_NGQh.flatten(0, 1).transpose(0, 1).flatten(1)[None])
    if after is not None:
        added = layer.attention_conv.convolve(added, after)
    x_1QD = x_1QD + added
    if isinstance(layer, DraftLayer):
        return layer.feed_forward(x_1QD)
    fed: Tensor = layer.mlp(layer.post_attention_layernorm(x_1QD))
    return x_1QD + fed


def _between(
    attended_NGQh: Tensor, x_1QD: Tensor, after: Tensor | None, layer: Any, following: Any, rope: Rotation,
    key_NSh: Tensor, value_NSh: Tensor, slots_Q: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return what `layer` gives, and what `_enter` gives for the layer that follows it."""
    x_1QD = _leave(attended_NGQh, x_1QD, after, layer)
    return x_1QD, *_enter(x_1QD, following, rope, key_NSh, value_NSh, slots_Q)
