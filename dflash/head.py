"""The target's frozen head over drafter states: logits as training, decoding and acceptance all compute them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.config import DrafterConfig


def block_embeddings(ids: Tensor, table_VD: Tensor, config: DrafterConfig) -> Tensor:
    """Return rows of the target's raw table for token ids, times config.input_embedding_scale.

    The raw table, not the target's module: one that scales by itself (Gemma's) would do it twice.
    """
    return F.embedding(ids, table_VD) * config.input_embedding_scale


def head_logits(states: Tensor, head_VD: Tensor, config: DrafterConfig) -> Tensor:
    """Return the drafter's logits (..., V) of states (..., D): the product in the head's dtype, the rest in float32 at
    least. z-lab's order: multiplier, then softcap."""
    return shaped_logits(states.to(head_VD.dtype) @ head_VD.T, config)


def shaped_logits(product: Tensor, config: DrafterConfig) -> Tensor:
    """Return the logits (..., V) that the drafter makes of states @ head.T (..., V), in float32 at least."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32)) * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)
