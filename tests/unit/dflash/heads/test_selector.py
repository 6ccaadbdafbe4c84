"""DFlash 2's path selector: plain at the start, its walk, its loss, and one against the other."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dflash.errors import DFlashError
from dflash.head import head_logits
from dflash.heads.selector import CandidateSelector, find_candidates, selector_loss
from dflash.objective import Weighting, head_loss, make_rows
from dflash.sampling import GREEDY, Sampling
from tests.drafters import drafter_config
from tests.unit.dflash.heads.known_text import ANCHORS, SEQUENCES, SLOTS, VOCAB, WIDTH, Problem

CONFIG = drafter_config(block_size=5)
TOP = 6
WEIGHTINGS = [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.5)]


def selector(scale: float = 0.5) -> CandidateSelector:
    """Return a selector in float64 whose three matrices all matter."""
    found = CandidateSelector(VOCAB, WIDTH, rank=8, top_k=TOP).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return found


def test_a_new_selector_drafts_each_slots_own_argmax() -> None:
    problem, fresh = Problem(), CandidateSelector(VOCAB, WIDTH, rank=8, top_k=TOP).double()
    logits = problem.states[:, 1:] @ problem.head.T
    anchors = problem.tokens.repeat_interleave(ANCHORS, 0).gather(1, problem.anchors.flatten()[:, None])[:, 0]
    drafts = fresh.pick(problem.states[:, 1:], logits, anchors, GREEDY, None)
    assert torch.equal(drafts.tokens_bk, logits.argmax(-1))
    unary, candidates = logits.topk(TOP, -1)
    assert torch.equal(
        fresh.scores(problem.states[:, 1:], anchors[:, None].expand(-1, SLOTS), unary, candidates), unary
    )
    scrambled = selector().pick(problem.states[:, 1:], logits, anchors, GREEDY, None)
    assert not torch.equal(scrambled.tokens_bk, drafts.tokens_bk)


def test_the_walk_maximizes_the_formula_after_the_token_that_it_chose_before() -> None:
    problem, head = Problem(), selector()
    logits = problem.states[:, 1:] @ problem.head.T
    drafted = head.pick(problem.states[:, 1:], logits, torch.arange(6), GREEDY, None).tokens_bk
    for block in range(6):
        before = block
        for slot in range(SLOTS):
            gate = head.predecessor_codebook[before] * (head.hidden_projection.weight @ problem.states[block, slot + 1])
            scores = logits[block, slot] + head.successor_codebook @ gate
            candidates = logits[block, slot].topk(TOP).indices
            before = int(candidates[scores[candidates].argmax()])
            assert int(drafted[block, slot]) == before


def test_the_scores_of_training_are_those_of_a_walk_that_draws_the_true_tokens() -> None:
    """anatomy 6.8, SpecForge#455. The walk is made to take the true tokens by giving them as the slots before."""
    problem, head = Problem(), selector()
    found = find_candidates(problem.hidden, problem.head, problem.rows, WEIGHTINGS[0], CONFIG, TOP)
    trained = head.scores(problem.hidden, problem.before, found.unary_Rc, found.token_Rc)
    logits = problem.states[:, 1:] @ problem.head.T
    for row, index in enumerate(problem.rows.index_R.tolist()):
        block, slot = divmod(index, SLOTS + 1)
        one = slice(slot - 1, slot)
        drafts = head.pick(
            problem.states[block : block + 1, 1:][:, one],
            logits[block : block + 1, one],
            problem.before[row : row + 1],
            Sampling(temperature=1.0),
            torch.zeros(1, 1, dtype=torch.float64),
        )
        assert drafts.probabilities_bkV is not None
        torch.testing.assert_close(
            drafts.probabilities_bkV[0, 0, found.token_Rc[row]], trained[row].softmax(-1), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("chunk_rows", [4, 100])
def test_loss_and_gradients_equal_the_dense_formula(weighting: Weighting, chunk_rows: int) -> None:
    problem, head = Problem(chunk_rows), selector()
    hidden = problem.hidden.clone().requires_grad_()
    found = find_candidates(hidden, problem.head, problem.rows, weighting, CONFIG, TOP)
    sums = selector_loss(head, hidden, problem.before, problem.rows, found)
    sums.numerator.backward()
    got = [p.grad.clone() for p in head.parameters() if p.grad is not None]
    assert hidden.grad is None, "the drafter is not trained by the selector's loss"

    dense = selector()
    logits = problem.hidden @ problem.head.T
    gate = dense.predecessor_codebook[problem.before] * (problem.hidden @ dense.hidden_projection.weight.T)
    scores = logits + gate @ dense.successor_codebook.T
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(TOP).indices, True)
    recalled = chosen.gather(1, problem.rows.label_R[:, None])[:, 0]
    assert 0 < int(recalled.sum()) < len(recalled), "the problem must have rows of both kinds"
    masked = torch.where(chosen, scores, float("-inf"))
    loss = masked.logsumexp(-1) - scores.gather(1, problem.rows.label_R[:, None])[:, 0]
    entropy = F.cross_entropy(logits, problem.rows.label_R, reduction="none")
    shape = (SEQUENCES * ANCHORS, SLOTS + 1)
    place = (problem.rows.index_R // (SLOTS + 1), problem.rows.slot_R)
    table = torch.zeros(shape, dtype=torch.float64).index_put(place, entropy)
    valid = torch.zeros(shape, dtype=torch.bool).index_put(place, torch.tensor(True))
    weight = weighting.slot_weights(table, valid)[place]
    wanted = (weight * torch.where(recalled, loss, 0.0)).sum()
    wanted.backward()
    torch.testing.assert_close(sums.numerator, wanted, rtol=1e-6, atol=0)
    for mine, parameter in zip(got, dense.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-12)
    assert int(sums.recalled) == int(recalled.sum())
    assert int(sums.correct) == int((masked.argmax(-1) == problem.rows.label_R).sum())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_its_weights_are_those_of_the_drafters_own_loss(weighting: Weighting) -> None:
    problem = Problem()
    found = find_candidates(problem.hidden, problem.head, problem.rows, weighting, CONFIG, TOP)
    sums = head_loss(problem.hidden, problem.head, problem.rows, weighting)
    torch.testing.assert_close(found.weight_R.sum(), sums.denominator, rtol=1e-6, atol=0)


def test_multiplier_and_softcap_act_on_the_candidates_logits() -> None:
    problem = Problem()
    config = drafter_config(block_size=5, output_multiplier=0.5, final_logit_softcapping=2.0)
    found = find_candidates(problem.hidden, problem.head, problem.rows, WEIGHTINGS[0], config, TOP)
    logits = head_logits(problem.hidden, problem.head, config)
    torch.testing.assert_close(found.unary_Rc, logits.topk(TOP).values, rtol=0, atol=1e-12)


def test_no_supervised_rows_give_a_loss_of_zero() -> None:
    problem, head = Problem(), selector()
    rows = make_rows(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.bool), 8)
    hidden = problem.hidden[:0]
    found = find_candidates(hidden, problem.head, rows, WEIGHTINGS[0], CONFIG, TOP)
    sums = selector_loss(head, hidden, problem.before[:0], rows, found)
    sums.numerator.backward()
    assert not sums.numerator.any()
    assert all(p.grad is None or not p.grad.any() for p in head.parameters())


def test_bfloat16_weights_give_the_loss_of_their_own_values() -> None:
    problem, head = Problem(), selector().bfloat16()
    hidden, table = problem.hidden.bfloat16(), problem.head.bfloat16()
    found = find_candidates(hidden, table, problem.rows, WEIGHTINGS[0], CONFIG, TOP)
    sums = selector_loss(head, hidden, problem.before, problem.rows, found)
    sums.numerator.backward()
    exact = selector_loss(head.double(), hidden.double(), problem.before, problem.rows, found)
    assert sums.numerator.dtype == found.unary_Rc.dtype == torch.float32
    torch.testing.assert_close(sums.numerator.double(), exact.numerator.double(), rtol=0.01, atol=0)


def test_a_sampled_draft_comes_from_the_distribution_that_it_reports() -> None:
    """anatomy 4: rejection sampling is lossless only with the very distribution of the draw."""
    head, generator = selector(), torch.Generator().manual_seed(3)
    one = torch.randn(1, 1, WIDTH, generator=generator, dtype=torch.float64)
    logits = torch.randn(1, 1, VOCAB, generator=generator, dtype=torch.float64)
    count = 4000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5)[:, None] / count
    wide = (one.expand(count, 1, -1), logits.expand(count, 1, -1), torch.zeros(count, dtype=torch.long))
    drafts = head.pick(*wide, Sampling(temperature=0.7), uniforms)
    assert drafts.probabilities_bkV is not None
    shares = torch.bincount(drafts.tokens_bk[:, 0], minlength=VOCAB) / count
    torch.testing.assert_close(shares.double(), drafts.probabilities_bkV[0, 0], rtol=0, atol=1 / count + 1e-9)
    assert int((drafts.probabilities_bkV[0, 0] > 0).sum()) == TOP


def test_tensor_names_are_the_published_ones() -> None:
    """The codebooks have no .weight, unlike an embedding's (anatomy 3.1); with it they were dropped: verl-SpeCo#62."""
    found = {
        name: tuple(t.shape) for name, t in CandidateSelector(VOCAB, WIDTH, rank=8, top_k=TOP).state_dict().items()
    }
    assert found == {
        "predecessor_codebook": (VOCAB, 8),
        "successor_codebook": (VOCAB, 8),
        "hidden_projection.weight": (8, WIDTH),
    }


@pytest.mark.parametrize(("settings", "where"), [({"rank": 0}, "selector_rank"), ({"top_k": 41}, "selector_top_k")])
def test_a_setting_that_cannot_be_is_named(settings: dict[str, int], where: str) -> None:
    with pytest.raises(DFlashError) as caught:
        CandidateSelector(VOCAB, WIDTH, **settings)
    assert caught.value.where == where
    assert str(next(iter(settings.values()))) in caught.value.what
