"""Greedy decoding, plain and speculative. Both emit the target's own argmax, so both give the same tokens.

The drafter's cache never holds a block: a block's keys and values exist for one call, so nothing needs cropping, and a
drafted token becomes context only with the target features it got when it was verified.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash.head import block_embeddings, head_logits
from dflash.masks import dense_mask, layer_layout
from dflash.model import DFlashDraftModel, KeyValues
from dflash.taps import FeatureTaps


@dataclass
class Decoded:
    """tokens: what was emitted after the prompt. accepted: drafted tokens accepted by each verification, before any cut
    at EOS or the length limit; one entry per verification call of the target (the prompt's own call is not one)."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens emitted per verification call. The first token comes from the prompt's call and is not counted."""
        return (len(self.tokens) - 1) / len(self.accepted) if self.accepted else float("nan")


@torch.no_grad()
def greedy_decode(
    target: nn.Module, prompt_ids: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int]
) -> list[int]:
    """Return the target's greedy continuation, one token a call, ending with EOS or at `max_new_tokens`."""
    device = next(target.parameters()).device
    cache = DynamicCache()
    step = torch.tensor([list(prompt_ids)], device=device)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        logits = target(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in eos_ids:
            break
        step = torch.tensor([[tokens[-1]]], device=device)
    return tokens


class DraftContext:
    """The drafter's keys and values of all verified tokens, one pair per layer."""

    def __init__(self, drafter: DFlashDraftModel) -> None:
        self.drafter = drafter
        self.length = 0
        self.key_values: list[KeyValues] = []

    def extend(self, features_1TC: Tensor) -> None:
        """Append newly verified tokens by their target features."""
        count = features_1TC.shape[1]
        positions = torch.arange(self.length, self.length + count, device=features_1TC.device)[None]
        fresh = self.drafter.context_key_values(features_1TC, positions)
        if self.key_values:
            fresh = [
                (torch.cat((k0, k1), 2), torch.cat((v0, v1), 2))
                for (k0, v0), (k1, v1) in zip(self.key_values, fresh, strict=True)
            ]
        self.key_values = fresh
        self.length += count


def _decode_masks(drafter: DFlashDraftModel, context_len: int, device: torch.device) -> list[Tensor | None]:
    """Return each layer's mask for one block after `context_len` tokens; None where everything is visible."""
    config = drafter.config
    anchor = torch.full((1, 1), context_len, device=device)
    masks: list[Tensor | None] = []
    for layer in range(config.num_hidden_layers):
        layout = layer_layout(config, layer, context_len)
        masks.append(dense_mask(anchor, layout) if layout.window or layout.causal else None)
    return masks


@torch.no_grad()
def draft_states(drafter: DFlashDraftModel, context: DraftContext, anchor_token: int, embedding_VD: Tensor) -> Tensor:
    """Return the drafter's states (1, B, D) of the block whose anchor is the next token after the context."""
    config = drafter.config
    device = context.key_values[0][0].device
    ids = torch.full((1, config.block_size), config.mask_token_id, device=device)
    ids[0, 0] = anchor_token
    positions = torch.arange(context.length, context.length + config.block_size, device=device)[None]
    masks = _decode_masks(drafter, context.length, device)
    return drafter.draft(
        block_embeddings(ids, embedding_VD, config).to(drafter.fc.weight.dtype),
        positions,
        context.key_values,
        masks,
        "sdpa",
    )


@torch.no_grad()
def speculative_decode(
    target: Any, drafter: DFlashDraftModel, prompt_ids: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int]
) -> Decoded:
    """Return the target's greedy continuation, drafted in blocks and verified one call a block. Batch of one.

    Each call verifies the anchor and B - 1 drafted tokens; the longest prefix equal to the target's argmax is kept, and
    the target's own next token after it becomes the next anchor.
    """
    if max_new_tokens < 1:
        return Decoded()
    device = next(target.parameters()).device
    embedding_VD, head_VD = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    cache, result, context = DynamicCache(), Decoded(), DraftContext(drafter)
    dtype = drafter.fc.weight.dtype
    with FeatureTaps(target, drafter.config.target_layer_ids) as taps:
        out = target(
            input_ids=torch.tensor([list(prompt_ids)], device=device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        context.extend(taps.features().to(dtype))
        result.tokens.append(int(out.logits[0, -1].argmax()))
        while len(result.tokens) < max_new_tokens and result.tokens[-1] not in eos_ids:
            states = draft_states(drafter, context, result.tokens[-1], embedding_VD)
            drafted = head_logits(states[0, 1:], head_VD, drafter.config).argmax(-1).tolist()
            block = [result.tokens[-1], *drafted]
            logits = target(
                input_ids=torch.tensor([block], device=device), past_key_values=cache, use_cache=True
            ).logits
            chosen = logits[0].argmax(-1).tolist()
            accepted = 0
            while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
                accepted += 1
            verified = accepted + 1  # the anchor and the accepted tokens now have target features
            context.extend(taps.features()[:, :verified].to(dtype))
            rejected = cache.get_seq_length() - context.length
            if rejected:
                cache.crop(-rejected)
            result.accepted.append(accepted)
            emitted = [*drafted[:accepted], chosen[accepted]]
            for position, token in enumerate(emitted):
                if token in eos_ids:
                    emitted = emitted[: position + 1]
                    break
            result.tokens += emitted[: max_new_tokens - len(result.tokens)]
    return result
