"""Acceptance length without decoding: exact chained tau over greedy target text, and the proxies beside it.

On text that the target wrote greedily, speculative decoding's path is known: from anchor a with r accepted tokens it
goes to a + r + 1. The training mask drafts at every position of the text, then the walk is counting. Averages over all
anchors (what trainers usually log) are not tau: decoding visits the positions that follow a rejection.

Legend: N anchors, B block size, k = B - 1 drafted slots, Q = N * B, T tokens, C feature width, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash.attention import build_mask
from dflash.head import block_embeddings, head_logits
from dflash.masks import layer_layout
from dflash.model import DFlashDraftModel
from dflash.pick import pick_drafts
from dflash.sampling import GREEDY

ANCHORS_AT_ONCE = 64
"""Blocks drafted in one forward over a text: the dense mask is (Q, T + Q), whatever the text's length."""
HEAD_ROWS = 512
"""Drafted slots whose logits exist at once."""


def layer_masks(
    drafter: DFlashDraftModel,
    anchors_bN: Tensor,
    context_len: int,
    implementation: str,
    starts_bN: Tensor | None = None,
    *,
    apart: bool = False,
) -> list[Any]:
    """Return the training mask of each draft layer; layers of one kind share it. starts_bN as in masks.py.

    apart   for `forward_blocks` of a drafter that drafts_slots_apart: the last layer's queries are slots 1 on
    """
    layouts = [layer_layout(drafter.config, layer, context_len) for layer in range(drafter.config.num_hidden_layers)]
    if apart:
        layouts[-1] = replace(layouts[-1], first_slot=1)
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
    """Return the drafted token ids (N, k), int64, at each anchor, by the training mask over a context computed once.

    embedding_VD, head_VD   the target's raw embedding table and head
    """
    config, device = drafter.config, tokens_T.device

    def head(states: Tensor) -> Tensor:
        return head_logits(states, head_VD, config)

    B, context_len = config.block_size, features_1TC.shape[1]
    context = drafter.context_key_values(features_1TC, torch.arange(context_len, device=device)[None])
    drafted = [torch.empty(0, B - 1, dtype=torch.long, device=device)]
    for anchors_n in anchors_N.split(ANCHORS_AT_ONCE) if len(anchors_N) else ():
        noise_nB = torch.full((len(anchors_n), B), config.mask_token_id, device=device)
        noise_nB[:, 0] = tokens_T[anchors_n]
        embeddings = block_embeddings(noise_nB.view(1, -1), embedding_VD, config)
        positions = (anchors_n[:, None] + torch.arange(B, device=device)).view(1, -1)
        masks = layer_masks(drafter, anchors_n[None], context_len, "sdpa")
        states_nBD = drafter.draft(embeddings, positions, context, masks, "sdpa").view(len(anchors_n), B, -1)
        at_once = max(1, HEAD_ROWS // (B - 1))
        for states_pBD, first_p in zip(states_nBD.split(at_once), noise_nB[:, 0].split(at_once), strict=True):
            drafted.append(pick_drafts(drafter, states_pBD[:, 1:], first_p, head, GREEDY, None).tokens_bk)
    return torch.cat(drafted)


@dataclass(frozen=True)
class TextDrafts:
    """What a drafter drafts at every anchor of one answer, against the answer.

    hits_Nk   bool, on the CPU: slot i of the n-th anchor is the text's token there; False past the text's end. The
              anchors are all tokens of the answer but the last, so N is the answer's length less one.
    """

    hits_Nk: Tensor

    @property
    def accepted(self) -> list[int]:
        """The drafted tokens that a verification at each anchor would accept, as far as the text is known."""
        accepted: list[int] = self.hits_Nk.long().cumprod(1).sum(1).tolist()
        return accepted

    def walk(self) -> list[int]:
        """Return the accepted counts of those anchors only that decoding visits, in its order."""
        accepted, counts, anchor = self.accepted, list[int](), 0
        while anchor < len(accepted):
            counts.append(accepted[anchor])
            anchor += accepted[anchor] + 1
        return counts


def draft_text(
    drafter: DFlashDraftModel,
    features_1TC: Tensor,
    tokens: Sequence[int],
    prompt_len: int,
    embedding_VD: Tensor,
    head_VD: Tensor,
) -> TextDrafts:
    """Return what `drafter` drafts at every anchor of the answer tokens[prompt_len:].

    `tokens` is the prompt and the target's greedy answer; features cover at least all but the last of them.
    """
    tokens_T = torch.tensor(list(tokens), device=features_1TC.device)
    last = len(tokens) - 1
    anchors_N = torch.arange(prompt_len, max(prompt_len, last), device=tokens_T.device)
    drafted_Nk = drafted_at(drafter, features_1TC[:, : len(tokens)], tokens_T, anchors_N, embedding_VD, head_VD)
    places_Nk = anchors_N[:, None] + torch.arange(1, drafter.config.block_size, device=tokens_T.device)
    hits_Nk = (drafted_Nk == tokens_T[places_Nk.clamp(max=last)]) & (places_Nk <= last)
    return TextDrafts(hits_Nk.cpu())


def chained_walk(
    drafter: DFlashDraftModel,
    features_1TC: Tensor,
    tokens: Sequence[int],
    prompt_len: int,
    embedding_VD: Tensor,
    head_VD: Tensor,
) -> list[int]:
    """Return the accepted count of each verification that speculative decoding of `tokens` would make.

    Arguments as draft_text. The last block's count is what can be compared with the known text.
    """
    return draft_text(drafter, features_1TC, tokens, prompt_len, embedding_VD, head_VD).walk()


@dataclass(frozen=True)
class TauEstimates:
    """Tokens per verification call by the exact walk, and what the usual proxies make of the same drafts.

    chained     decoding's own path, pooled over the texts (pooled_tau)
    uniform     mean over all anchors of accepted + 1: exact within a block, every anchor counted once
    marginals   1 + sum over slots k of prod over i <= k of acc_i, acc_i being the share of hits in slot i over all
                anchors, earlier misses or not: TorchSpec's simulated_acc_len and speculators' eal, plus 1

    The proxies are not tau. Decoding jumps over what it accepts and stands on every token that it does not, so hard
    stretches are visited more often than `uniform` counts them: it is too high where misses come in clusters, too low
    where they come at a block's rhythm. `marginals` also takes the slots of a block for independent, which
    underrates runs of hits.

    Near a text's end a block reaches past it. There `uniform` counts the anchor, with the hits that the text still
    shows (as trainers count a cut block: verl-SpeCo#62), and `marginals` counts a slot only where the text has a token.
    All are not a number when no text has an anchor.
    """

    chained: float
    uniform: float
    marginals: float


def estimate_tau(texts: Sequence[TextDrafts]) -> TauEstimates:
    """Return chained tau and both proxies over all texts, from the same drafts (anatomy 2.6)."""
    num_anchors = [len(text.hits_Nk) for text in texts]
    total = sum(num_anchors)
    if not total:
        return TauEstimates(float("nan"), float("nan"), float("nan"))
    chained = pooled_tau([n + 1 for n in num_anchors], [len(text.walk()) for text in texts])
    uniform = 1 + sum(sum(text.accepted) for text in texts) / total
    hits_k = torch.cat([text.hits_Nk for text in texts]).sum(0).tolist()
    marginals, product = 1.0, 1.0
    for slot, hits in enumerate(hits_k, start=1):
        known = sum(max(0, n + 1 - slot) for n in num_anchors)
        product *= hits / known if known else 0.0
        marginals += product
    return TauEstimates(chained, uniform, marginals)


def pooled_tau(num_tokens: Sequence[int], num_calls: Sequence[int]) -> float:
    """Return tokens emitted per verification call over all prompts; each prompt's first token is not counted.

    Pooled, as vLLM counts it; a mean of per-prompt means (z-lab's benchmark) differs.
    """
    calls = sum(num_calls)
    return sum(n - 1 for n in num_tokens) / calls if calls else float("nan")
