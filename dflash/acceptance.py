"""Acceptance length without decoding: exact chained tau over greedy target text, and the proxies beside it.

On text that the target wrote greedily, speculative decoding's path is known: from anchor a with r accepted tokens it
goes to a + r + 1. One training-mask forward drafts at every position, then the walk is counting. Uniform averages over
anchors (what trainers usually log) are not tau: decoding visits the positions that follow a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.attention import build_mask
from dflash.head import block_embeddings, head_logits
from dflash.masks import layer_layout
from dflash.model import DFlashDraftModel


def layer_masks(
    drafter: DFlashDraftModel,
    anchors_bN: Tensor,
    context_len: int,
    implementation: str,
    starts_bN: Tensor | None = None,
) -> list[Any]:
    """Return the training mask of each draft layer; layers of one kind share it. starts_bN as in masks.py."""
    layouts = [layer_layout(drafter.config, layer, context_len) for layer in range(drafter.config.num_hidden_layers)]
    made = {layout: build_mask(anchors_bN, layout, implementation, starts_bN) for layout in set(layouts)}
    return [made[layout] for layout in layouts]


@torch.no_grad()
def drafted_at(
    drafter: DFlashDraftModel,
    features_1TC: Tensor,
    tokens_T: Tensor,
    anchors_N: Tensor,
    embedding_VD: Tensor,
    head_VD: Tensor,
) -> Tensor:
    """Return the drafted token ids (N, B - 1) at each anchor, by the training mask in one forward.

    embedding_VD, head_VD   the target's raw embedding table and head
    """
    config = drafter.config
    N, B = len(anchors_N), config.block_size
    noise_NB = torch.full((N, B), config.mask_token_id, device=tokens_T.device)
    noise_NB[:, 0] = tokens_T[anchors_N]
    positions = (anchors_N[:, None] + torch.arange(B, device=anchors_N.device)).reshape(1, N * B)
    masks = layer_masks(drafter, anchors_N[None], features_1TC.shape[1], "sdpa")
    embeddings = block_embeddings(noise_NB.reshape(1, N * B), embedding_VD, config)
    states = drafter(features_1TC, embeddings, positions, masks, "sdpa")
    return head_logits(states.view(N, B, -1)[:, 1:], head_VD, config).argmax(-1)


@torch.no_grad()
def chained_walk(
    drafter: DFlashDraftModel,
    features_1TC: Tensor,
    tokens: Sequence[int],
    prompt_len: int,
    embedding_VD: Tensor,
    head_VD: Tensor,
) -> list[int]:
    """Return the accepted count of each verification that speculative decoding of `tokens` would make.

    `tokens` is the prompt and the target's greedy answer; features cover at least all but the last of them. The last
    block's count is what can be compared with the known text.
    """
    tokens_T = torch.tensor(list(tokens), device=features_1TC.device)
    anchors_N = torch.arange(prompt_len, len(tokens) - 1, device=tokens_T.device)
    if not len(anchors_N):
        return []
    drafted = drafted_at(drafter, features_1TC[:, : len(tokens)], tokens_T, anchors_N, embedding_VD, head_VD).tolist()
    counts: list[int] = []
    anchor = prompt_len
    while anchor < len(tokens) - 1:
        truth = tokens[anchor + 1 :]
        accepted = 0
        row = drafted[anchor - prompt_len]
        while accepted < min(len(row), len(truth)) and row[accepted] == truth[accepted]:
            accepted += 1
        counts.append(accepted)
        anchor += accepted + 1
    return counts


def pooled_tau(num_tokens: Sequence[int], num_calls: Sequence[int]) -> float:
    """Return tokens emitted per verification call over all prompts; each prompt's first token is not counted.

    Pooled, as vLLM counts it; a mean of per-prompt means (z-lab's benchmark) differs.
    """
    calls = sum(num_calls)
    return sum(n - 1 for n in num_tokens) / calls if calls else float("nan")
