"""Rows of whole blocks, for steps of a few shapes: what is not supervised fills them up and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash.heads.loss import picker_loss
from dflash.heads.markov import MarkovHead
from dflash.heads.selector import CandidateSelector
from dflash.objective import Rows, Weighting, head_loss, level_blocks, make_rows
from dflash.soft_labels import Teacher
from tests.drafters import drafter_config

BLOCKS, SLOTS, VOCAB, WIDTH = 12, 5, 23, 8
WEIGHTINGS = [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.5)]


def _text(empty: int = 3) -> tuple[Tensor, Tensor]:
    """Return labels and validity (M, K) with `empty` blocks of nothing and cut ones between full ones."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, VOCAB, (BLOCKS, SLOTS), generator=generator)
    valid = torch.rand(BLOCKS, SLOTS, generator=generator) < 0.7
    valid[:, 1] = True
    valid[:, 0] = False
    valid[torch.randperm(BLOCKS, generator=generator)[:empty]] = False
    return labels, valid


def _states() -> tuple[Tensor, Tensor, Tensor]:
    """Return states (M*K, D), a teacher's, and the head (V, D), in float64."""
    generator = torch.Generator().manual_seed(2)
    shape = (BLOCKS * SLOTS, WIDTH)
    states, taught = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return states, taught, torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)


def _loss(rows: Rows, weighting: Weighting, soft_weight: float) -> tuple[Tensor, Tensor]:
    """Return all sums and the gradient of all states."""
    states, taught, head = _states()
    leaf = states.requires_grad_()
    teacher = Teacher(state_RD=taught[rows.index_R], multiplier=1.0, softcap=None)
    sums = head_loss(leaf[rows.index_R], head, rows, weighting, soft_weight=soft_weight, teacher=teacher)
    (gradient,) = torch.autograd.grad(sums.numerator, leaf)
    return sums.vector(), gradient


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("soft_weight", [0.0, 0.4])
@pytest.mark.parametrize("levels", [1, 3, 12])
def test_sums_and_gradient_are_those_of_the_supervised_rows(
    weighting: Weighting, soft_weight: float, levels: int
) -> None:
    exact = make_rows(*_text(), 9)
    whole = make_rows(*_text(), 9, levels)
    assert len(whole.index_R) > len(exact.index_R) and not whole.valid_R.all() and exact.valid_R.all()
    sums, gradient = _loss(whole, weighting, soft_weight)
    expected, expected_gradient = _loss(exact, weighting, soft_weight)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
    forgotten = replace(whole, valid_R=torch.ones_like(whole.valid_R))
    assert not torch.allclose(_loss(forgotten, weighting, soft_weight)[0], expected, rtol=1e-3)


@pytest.mark.parametrize("head", ["selector", "markov"])
def test_the_loss_of_a_head_that_looks_back_is_the_same_too(head: str) -> None:
    config = drafter_config(block_size=SLOTS, hidden_size=WIDTH, vocab_size=VOCAB)
    picker: CandidateSelector | MarkovHead
    if head == "selector":
        picker = CandidateSelector(VOCAB, WIDTH, rank=4, top_k=6)
    else:
        picker = MarkovHead(VOCAB, rank=4)
    picker.initialise(0, 0.5)
    picker.double()
    states, _, table = _states()
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    anchors = torch.tensor([[0, 1, 2, 3, 4, 8]]).repeat(2, 1)  # blocks from 5 on reach past the row's end

    def of(rows: Rows) -> tuple[Tensor, list[Tensor]]:
        loss = picker_loss(
            picker, states[rows.index_R], table, tokens, anchors, rows, Weighting("decay", gamma=3.0), config
        )
        return loss.detach(), list(torch.autograd.grad(loss, list(picker.parameters()), allow_unused=True))

    labels, valid = _text()
    valid[5], valid[11] = False, False
    expected, gradients = of(make_rows(labels, valid, 9))
    found, others = of(make_rows(labels, valid, 9, levels=1))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert float(expected) > 0
    for one, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_rows_come_in_as_many_shapes_as_there_are_levels() -> None:
    labels, _ = _text()
    seen = set()
    for needed in range(BLOCKS + 1):
        valid = torch.zeros(BLOCKS, SLOTS, dtype=torch.bool)
        valid[BLOCKS - needed :, 2] = True
        rows = make_rows(labels, valid, 9, levels=4)
        blocks = len(rows.index_R) // (SLOTS - 1)
        assert blocks == next(level for level in (3, 6, 9, 12) if level >= needed)
        assert int(rows.valid_R.sum()) == needed and rows.index_R.unique().numel() == len(rows.index_R)
        assert (rows.index_R % SLOTS == rows.slot_R).all() and rows.slot_R.min() == 1
        assert rows.chunks[0][0] == 0 and rows.chunks[-1][1] == len(rows.index_R)
        assert all(end - first <= 9 and (end - first) % (SLOTS - 1) == 0 for first, end, _ in rows.chunks)
        seen.add((len(rows.index_R), rows.chunks))
    assert len(seen) == 4
    assert level_blocks(BLOCKS, 4) == [3, 6, 9, 12] and level_blocks(3, 8) == [1, 2, 3] and level_blocks(5, 1) == [5]
