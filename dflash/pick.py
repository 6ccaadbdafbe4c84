"""Which token a drafter proposes for each slot: the one place that decoding and tau without decoding share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dflash.model import DFlashDraftModel
from dflash.sampling import Drafts, Sampling, choose


def pick_drafts(
    drafter: DFlashDraftModel,
    states_bkD: Tensor,
    anchor_b: Tensor,
    head: Callable[[Tensor], Tensor],
    sampling: Sampling,
    uniforms_bk: Tensor | None,
) -> Drafts:
    """Return the drafted tokens of slots 1 to k from their states and the anchors' tokens.

    head   logits (..., V) of states (..., D). A plain drafter takes each slot by itself; with a selector or a Markov
           bias slots are taken from left to right, each after the token before it.
    """
    logits_bkV = head(states_bkD)
    if drafter.picker is None:
        return Drafts(*choose(logits_bkV, sampling, uniforms_bk))
    return drafter.picker.pick(states_bkD, logits_bkV, anchor_b, sampling, uniforms_bk)
