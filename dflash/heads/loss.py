"""The loss of whichever head picks a drafter's tokens, beside the drafter's own."""

from __future__ import annotations

from torch import Tensor

from dflash.config import DrafterConfig
from dflash.heads.markov import MarkovHead, markov_loss
from dflash.heads.rows import predecessors
from dflash.heads.selector import CandidateSelector, find_candidates, selector_loss
from dflash.objective import Rows, Weighting


def picker_loss(
    picker: CandidateSelector | MarkovHead,
    hidden_RD: Tensor,
    head_VD: Tensor,
    tokens_bS: Tensor,
    anchors_bN: Tensor,
    rows: Rows,
    weighting: Weighting,
    config: DrafterConfig,
) -> Tensor:
    """Return the numerator of the head's loss, to be added to the drafter's and divided by the same sum of m * w.

    Each slot's predecessor is the true token before it. The drafter's states and the target's head get no gradient.
    """
    before_R = predecessors(tokens_bS, anchors_bN, rows)
    if isinstance(picker, MarkovHead):
        return markov_loss(picker, hidden_RD, head_VD, before_R, rows, weighting, config).numerator
    found = find_candidates(hidden_RD.detach(), head_VD, rows, weighting, config, picker.top_k)
    return selector_loss(picker, hidden_RD, before_R, rows, found).numerator
