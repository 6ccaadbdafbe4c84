"""DSpark's Markov bias: plain at the start, its walk, its loss, and one against the other."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dflash.errors import DFlashError
from dflash.heads.markov import MarkovHead, markov_loss
from dflash.objective import Weighting, head_loss, make_rows
from dflash.sampling import GREEDY, Sampling
from tests.drafters import drafter_config
from tests.unit.dflash.heads.known_text import ANCHORS, SEQUENCES, SLOTS, VOCAB, Problem

CONFIG = drafter_config(block_size=5)
WEIGHTINGS = [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.5)]


def markov(scale: float = 0.7) -> MarkovHead:
    """Return a head in float64 whose two matrices matter."""
    found = MarkovHead(VOCAB, rank=8).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return found


def test_a_new_head_adds_nothing_and_drafts_each_slots_own_argmax() -> None:
    problem, fresh = Problem(), MarkovHead(VOCAB, rank=8).double()
    states = problem.states[:, 1:]
    logits = states @ problem.head.T
    assert torch.equal(fresh.correct(logits, torch.arange(6)[:, None].expand(-1, SLOTS)), logits)
    assert torch.equal(fresh.pick(states, logits, torch.arange(6), GREEDY, None).tokens_bk, logits.argmax(-1))
    assert not torch.equal(markov().pick(states, logits, torch.arange(6), GREEDY, None).tokens_bk, logits.argmax(-1))


def test_a_new_head_has_the_loss_of_the_plain_drafter() -> None:
    problem, fresh = Problem(), MarkovHead(VOCAB, rank=8).double()
    plain = head_loss(problem.hidden, problem.head, problem.rows, WEIGHTINGS[0])
    sums = markov_loss(fresh, problem.hidden, problem.head, problem.before, problem.rows, WEIGHTINGS[0], CONFIG)
    torch.testing.assert_close(sums.numerator, plain.numerator, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums.denominator, plain.denominator, rtol=1e-6, atol=0)


def test_the_walk_maximizes_the_formula_after_the_token_that_it_chose_before() -> None:
    problem, head = Problem(), markov()
    logits = problem.states[:, 1:] @ problem.head.T
    drafted = head.pick(problem.states[:, 1:], logits, torch.arange(6), GREEDY, None).tokens_bk
    for block in range(6):
        before = block
        for slot in range(SLOTS):
            scores = logits[block, slot] + head.markov_w2.weight @ head.markov_w1.weight[before]
            before = int(scores.argmax())
            assert int(drafted[block, slot]) == before


def test_the_logits_of_training_are_those_of_a_walk_that_draws_the_true_tokens() -> None:
    """anatomy 6.8, SpecForge#455. Each slot is drafted after the true token, as if those before were accepted."""
    problem, head = Problem(), markov()
    trained = head.correct(problem.hidden @ problem.head.T, problem.before).softmax(-1)
    logits = problem.states[:, 1:] @ problem.head.T
    for row, index in enumerate(problem.rows.index_R.tolist()):
        block, slot = divmod(index, SLOTS + 1)
        drafts = head.pick(
            problem.states[block : block + 1, slot : slot + 1],
            logits[block : block + 1, slot - 1 : slot],
            problem.before[row : row + 1],
            Sampling(temperature=1.0),
            torch.zeros(1, 1, dtype=torch.float64),
        )
        assert drafts.probabilities_bkV is not None
        torch.testing.assert_close(drafts.probabilities_bkV[0, 0], trained[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("chunk_rows", [4, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_loss_and_gradients_equal_the_dense_formula(
    weighting: Weighting, chunk_rows: int, softcap: float | None
) -> None:
    problem, head = Problem(chunk_rows), markov()
    config = drafter_config(block_size=5, final_logit_softcapping=softcap, output_multiplier=0.5)
    hidden = problem.hidden.clone().requires_grad_()
    sums = markov_loss(head, hidden, problem.head, problem.before, problem.rows, weighting, config)
    (3 * sums.numerator).backward()
    got = [p.grad.clone() for p in head.parameters() if p.grad is not None]
    assert hidden.grad is None, "the drafter is not trained by the head's loss"

    dense = markov()
    logits = problem.hidden @ problem.head.T * 0.5
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits + dense.markov_w1.weight[problem.before] @ dense.markov_w2.weight.T
    entropy = F.cross_entropy(logits, problem.rows.label_R, reduction="none")
    shape = (SEQUENCES * ANCHORS, SLOTS + 1)
    place = (problem.rows.index_R // (SLOTS + 1), problem.rows.slot_R)
    table = torch.zeros(shape, dtype=torch.float64).index_put(place, entropy.detach())
    valid = torch.zeros(shape, dtype=torch.bool).index_put(place, torch.tensor(True))
    wanted = (weighting.slot_weights(table, valid)[place] * entropy).sum()
    (3 * wanted).backward()
    torch.testing.assert_close(sums.numerator, wanted, rtol=1e-6, atol=0)
    for mine, parameter in zip(got, dense.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-12)
    assert int(sums.correct) == int((logits.argmax(-1) == problem.rows.label_R).sum())


def test_no_supervised_rows_give_zeros_and_a_zero_gradient() -> None:
    problem, head = Problem(), markov()
    rows = make_rows(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.bool), 8)
    sums = markov_loss(head, problem.hidden[:0], problem.head, problem.before[:0], rows, WEIGHTINGS[0], CONFIG)
    sums.numerator.backward()
    assert not sums.numerator.any() and not sums.denominator.any()
    assert head.markov_w2.weight.grad is not None and not head.markov_w2.weight.grad.any()


def test_bfloat16_weights_give_the_loss_of_their_own_values() -> None:
    problem, head = Problem(), markov().bfloat16()
    hidden, table = problem.hidden.bfloat16(), problem.head.bfloat16()
    sums = markov_loss(head, hidden, table, problem.before, problem.rows, WEIGHTINGS[0], CONFIG)
    sums.numerator.backward()
    exact = markov_loss(
        head.double(), hidden.double(), table.double(), problem.before, problem.rows, WEIGHTINGS[0], CONFIG
    )
    assert sums.numerator.dtype == torch.float32
    torch.testing.assert_close(sums.numerator.double(), exact.numerator, rtol=0.01, atol=0)


def test_a_sampled_draft_comes_from_the_distribution_that_it_reports() -> None:
    """anatomy 4: rejection sampling is lossless only with the very distribution of the draw."""
    problem, head, count = Problem(), markov(), 4000
    states = problem.states[:1, 1:2].expand(count, 1, -1)
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5)[:, None] / count
    before = torch.full((count,), 7)
    drafts = head.pick(states, states @ problem.head.T, before, Sampling(temperature=0.7, top_k=9), uniforms)
    assert drafts.probabilities_bkV is not None
    shares = torch.bincount(drafts.tokens_bk[:, 0], minlength=VOCAB) / count
    torch.testing.assert_close(shares.double(), drafts.probabilities_bkV[0, 0], rtol=0, atol=1 / count + 1e-9)
    assert int((drafts.probabilities_bkV[0, 0] > 0).sum()) == 9


def test_tensor_names_are_the_published_ones() -> None:
    found = {name: tuple(t.shape) for name, t in MarkovHead(VOCAB, rank=8).state_dict().items()}
    assert found == {"markov_w1.weight": (VOCAB, 8), "markov_w2.weight": (VOCAB, 8)}


def test_a_rank_below_one_is_named() -> None:
    with pytest.raises(DFlashError, match="0 is not at least 1") as caught:
        MarkovHead(VOCAB, rank=0)
    assert caught.value.where == "markov_rank"
