"""The token before each supervised slot, and how its row counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dflash.objective import Weighting, head_loss
from tests.unit.dflash.heads.known_text import ANCHORS, SLOTS, Problem


def test_predecessors_are_the_tokens_one_position_before_the_labels() -> None:
    problem = Problem()
    for row, index in enumerate(problem.rows.index_R.tolist()):
        block, slot = divmod(index, SLOTS + 1)
        sequence, anchor = block // ANCHORS, int(problem.anchors.flatten()[block])
        assert problem.before[row] == problem.tokens[sequence, anchor + slot - 1]
        assert problem.rows.label_R[row] == problem.tokens[sequence, anchor + slot]


@pytest.mark.parametrize("weighting", [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.5)])
def test_the_weights_of_all_chunks_are_those_of_the_drafters_own_loss(weighting: Weighting) -> None:
    problem = Problem()
    assert len(problem.rows.chunks) > 1
    entropy = F.cross_entropy(problem.hidden @ problem.head.T, problem.rows.label_R, reduction="none")
    found = [
        problem.rows.weights(entropy[first:end], (first, end, count), weighting)[0]
        for first, end, count in problem.rows.chunks
    ]
    sums = head_loss(problem.hidden, problem.head, problem.rows, weighting)
    torch.testing.assert_close(torch.cat(found).sum(), sums.denominator, rtol=1e-6, atol=0)
    torch.testing.assert_close((torch.cat(found) * entropy).sum(), sums.numerator, rtol=1e-6, atol=0)
