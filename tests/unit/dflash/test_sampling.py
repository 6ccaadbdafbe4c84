"""Rejection sampling emits the target's distribution; what looks like it and is wrong does not pass the same test.

Distributions are counted over many rows and compared with exact ones by chi-square: a true one is within 5 standard
deviations of its mean, df + 5 * sqrt(2 df), and seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash import decode
from dflash.decode import Decoded, conditional_acceptance, greedy_decode, sample_decode, speculative_decode_batch
from dflash.errors import DFlashError
from dflash.sampling import GREEDY, Drafts, Sampling, accept, choose, draw_uniforms, pick, row_generators
from tests.drafters import random_drafter
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
Accept = Callable[[Drafts, Tensor, Sampling, Tensor | None], tuple[Tensor, Tensor]]


def _excess(counts: Tensor, probabilities: Tensor) -> float:
    """Return chi-square's distance from its mean in standard deviations; infinity where p = 0 was counted.

    Cells that few are expected in are taken together: there chi-square is not chi-square.
    """
    expected = probabilities.double() * counts.sum()
    if counts[probabilities == 0].any():
        return float("inf")
    small = expected < 5
    observed = torch.cat((counts[~small].double(), counts[small].sum()[None].double()))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    df = len(expected) - 1
    assert df > 10
    return float((((observed - expected) ** 2 / expected).sum() - df) / (2 * df) ** 0.5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (5, None), (None, 0.7), (7, 0.9), (1, None), (99, 1.0)])
def test_the_processed_distribution_is_that_of_transformers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    ids: Any = None
    theirs = TemperatureLogitsWarper(temperature)(ids, logits)
    theirs = TopKLogitsWarper(top_k)(ids, theirs) if top_k else theirs
    theirs = TopPLogitsWarper(top_p)(ids, theirs) if top_p else theirs
    ours = Sampling(temperature, top_k, top_p).probabilities(logits)
    torch.testing.assert_close(ours, theirs.softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(ours == 0, theirs.softmax(-1) == 0)


def test_top_p_by_hand_and_a_token_equal_to_the_last_of_top_k() -> None:
    """p = 0.5, 0.3, 0.15, 0.05: two tokens reach 0.8 exactly, three are needed for 0.81."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64).log()
    kept = [(Sampling(1.0, None, p).probabilities(logits) > 0).tolist() for p in (0.01, 0.79, 0.81, 1.0)]
    assert kept == [[False, True, False, False], [False, True, False, True], [True, True, False, True], [True] * 4]
    torch.testing.assert_close(
        Sampling(1.0, None, 0.79).probabilities(logits), torch.tensor([0, 5 / 8, 0, 3 / 8], dtype=torch.float64)
    )
    assert Sampling(1.0, 2).probabilities(torch.tensor([1.0, 3.0, 1.0, 0.0])).count_nonzero() == 3


def test_bf16_logits_are_widened_and_float64_ones_stay() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert Sampling(0.5, 3, 0.9).probabilities(torch.randn(4, 9).to(dtype)).dtype == wide


def test_values_outside_their_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ]
    for settings in wrong:
        with pytest.raises(DFlashError) as caught:
            Sampling(**({"temperature": 1.0} | settings))
        assert caught.value.where == next(iter(settings))


def test_picking_by_inversion_is_exact_and_never_takes_a_weight_of_nothing() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0])
    grid = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    tokens = pick(weights.expand(800, -1), grid)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 200, 0, 100, 500, 0]
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for scale in (1.0, 0.3, 7.0):
        assert pick((weights * scale).expand(2, -1), edges).tolist() == [1, 4]


def test_each_row_has_its_own_stream_whatever_the_number_of_rows() -> None:
    few, many = (draw_uniforms(row_generators(5, n), 4, CPU) for n in (2, 5))
    assert torch.equal(few, many[:2])
    others = [draw_uniforms(row_generators(seed, 1), 4, CPU) for seed in (6, 5 + 2**32)]
    assert len({tuple(row) for row in [*many.tolist(), *(other[0].tolist() for other in others)]}) == 7


# Tables over 5 tokens: p(token | tokens before), as logits, and a drafter that sees nothing of its own block.
V, K, N = 5, 2, 60_000


@lru_cache
def _tables() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    target = [torch.randn(*[V] * (depth + 1), generator=generator, dtype=torch.float64) * 1.5 for depth in range(3)]
    return target, torch.randn(K, V, generator=generator, dtype=torch.float64) * 1.5


def _emit_three(accepting: Accept, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return three tokens of N rows, (N, 3), by one call and then the target alone; and what the call accepted (N,)."""
    target, drafter = _tables()
    uniforms = torch.rand(N, 3 * K + 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drafts = Drafts(*choose(drafter.expand(N, -1, -1), sampling, uniforms[:, :K]))
    first, second = drafts.tokens_bk.unbind(1)
    logits = torch.stack((target[0].expand(N, -1), target[1][first], target[2][first, second]), 1)
    accepted, following = accepting(drafts, logits, sampling, uniforms[:, K : 2 * K + 1])
    tokens = torch.cat((drafts.tokens_bk, following[:, None]), 1)
    tokens[torch.arange(N), accepted] = following
    one = choose(target[1][tokens[:, 0]], sampling, uniforms[:, -2])[0]
    tokens[:, 1] = torch.where(accepted < 1, one, tokens[:, 1])
    two = choose(target[2][tokens[:, 0], tokens[:, 1]], sampling, uniforms[:, -1])[0]
    tokens[:, 2] = torch.where(accepted < 2, two, tokens[:, 2])
    return tokens, accepted


def _exact(sampling: Sampling) -> Tensor:
    p0, p1, p2 = (sampling.probabilities(table) for table in _tables()[0])
    return (p0[:, None, None] * p1[:, :, None] * p2).flatten()


def _cells(tokens: Tensor) -> Tensor:
    return torch.bincount((tokens * torch.tensor([V * V, V, 1])).sum(1), minlength=V**3)


def _residual_is_p(drafts: Drafts, logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> Any:
    """A rejected slot is drawn from p again: what q has too much of is then counted twice."""
    assert uniforms is not None
    accepted, _ = accept(drafts, logits, sampling, uniforms)
    p = sampling.probabilities(logits)[torch.arange(len(accepted)), accepted]
    return accepted, pick(p, uniforms[:, -1])


def _residual_is_p_without_the_draft(
    drafts: Drafts, logits: Tensor, sampling: Sampling, uniforms: Tensor | None
) -> Any:
    """A rejected slot is drawn from p without the drafted token, which is the residual of a greedy draft only."""
    assert uniforms is not None
    accepted, following = accept(drafts, logits, sampling, uniforms)
    row = torch.arange(len(accepted))
    p = sampling.probabilities(logits)[row, accepted]
    rejected = accepted < drafts.tokens_bk.shape[1]
    p[row[rejected], drafts.tokens_bk[row[rejected], accepted[rejected]]] = 0
    return accepted, torch.where(rejected, pick(p, uniforms[:, -1]), following)


def _equal_to_the_argmax(drafts: Drafts, logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> Any:
    """A drafted token is kept if it is the target's likeliest; the next one is drawn from p."""
    assert uniforms is not None
    accepted, _ = accept(drafts, logits, GREEDY, None)
    p = sampling.probabilities(logits)[torch.arange(len(accepted)), accepted]
    return accepted, pick(p, uniforms[:, -1])


def _equal_to_a_draw(drafts: Drafts, logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> Any:
    """z-lab's loop of April 2026: the target draws at every slot, and a drafted token is kept if it is that draw."""
    assert uniforms is not None
    drawn = pick(sampling.probabilities(logits), uniforms)
    accepted = (drafts.tokens_bk == drawn[:, :-1]).long().cumprod(1).sum(1)
    return accepted, drawn.gather(1, accepted[:, None])[:, 0]


def _drafted_as_if_certain(drafts: Drafts, logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> Any:
    """q is taken for 1, as if the draft were greedy: a token is kept with probability p, else drawn from the others."""
    certain = torch.nn.functional.one_hot(drafts.tokens_bk, logits.shape[-1]).to(logits.dtype)
    return accept(Drafts(drafts.tokens_bk, certain), logits, sampling, uniforms)


SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "temperature 0.7": Sampling(0.7),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(1.3, top_p=0.85),
    "both": Sampling(0.9, top_k=4, top_p=0.9),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_three_emitted_tokens_have_the_targets_distribution(name: str) -> None:
    sampling = SAMPLINGS[name]
    tokens, accepted = _emit_three(accept, sampling)
    assert all(1000 < count < N for count in torch.bincount(accepted).tolist())  # every length is exercised
    assert _excess(_cells(tokens), _exact(sampling)) < 5


@pytest.mark.parametrize("wrong", [_residual_is_p, _residual_is_p_without_the_draft, _equal_to_the_argmax])
def test_a_wrong_rule_fails_that_comparison(wrong: Accept) -> None:
    tokens, _ = _emit_three(wrong, Sampling(1.0))
    assert _excess(_cells(tokens), _exact(Sampling(1.0))) > 100


def test_true_rejection_sampling_accepts_the_overlap_of_p_and_q_which_equality_does_not() -> None:
    """Slot 1 is accepted with probability sum min(p, q). Two other rules are lossless too, with sum p * q."""
    sampling, (target, drafter) = Sampling(1.0), _tables()
    p, q = target[0].softmax(-1), drafter[0].softmax(-1)
    overlap, agreement = torch.minimum(p, q).sum(), (p * q).sum()
    for rule, rate in ((accept, overlap), (_equal_to_a_draw, agreement), (_drafted_as_if_certain, agreement)):
        tokens, accepted = _emit_three(rule, sampling)
        deviation = float((rate * (1 - rate) / N) ** 0.5)
        assert abs(float((accepted > 0).double().mean()) - float(rate)) < 5 * deviation
        assert _excess(_cells(tokens), _exact(sampling)) < 5
    assert overlap > 1.5 * agreement


def test_equal_distributions_are_always_accepted_and_disjoint_ones_never() -> None:
    logits = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(200, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drafts = Drafts(*choose(logits[:, :2], Sampling(1.0), uniforms[:, :2]))
    accepted, _ = accept(drafts, logits, Sampling(1.0), uniforms[:, 2:])
    assert accepted.tolist() == [2] * 200
    low, high = (logits.masked_fill(torch.arange(8) < 4, -1e4), logits.masked_fill(torch.arange(8) >= 4, -1e4))
    drafts = Drafts(*choose(low[:, :2], Sampling(1.0), uniforms[:, :2]))
    accepted, following = accept(drafts, high, Sampling(1.0), uniforms[:, 2:])
    assert accepted.tolist() == [0] * 200
    assert int(following.max()) < 4


def test_a_residual_that_rounding_emptied_falls_back_to_p() -> None:
    """The drafted token has q above p by one rounding and u nearly 1, so it is refused; nothing else has p above q."""
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    drafts = Drafts(torch.tensor([[0]]), torch.tensor([[[0.5 + 1e-10, 0.5]]], dtype=torch.float64))
    accepted, following = accept(drafts, p.log(), Sampling(1.0), torch.tensor([[1 - 1e-11, 0.75]], dtype=torch.float64))
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


SMALL = 5
"""Rows of the small target's embedding."""


@lru_cache
def _small_target() -> Any:
    return tiny_model(vocab_size=SMALL)


@torch.no_grad()
def _exact_answers(prompt: list[int], sampling: Sampling, length: int) -> Tensor:
    """Return the probability of every answer of `length` tokens, by reading them all."""
    answers = torch.tensor(list(product(range(SMALL), repeat=length)))
    ids = torch.cat((torch.tensor([prompt]).expand(len(answers), -1), answers), 1)
    steps = sampling.probabilities(_small_target()(input_ids=ids).logits[:, len(prompt) - 1 : -1])
    return steps.gather(2, answers[..., None])[..., 0].double().prod(1)


def _answers(prompt: list[int], sampling: Sampling, length: int, rows: int = 3000) -> list[Decoded]:
    drafter = random_drafter(vocab_size=SMALL, block_size=3)
    return speculative_decode_batch(
        _small_target(),
        drafter,
        [prompt] * rows,
        max_new_tokens=length,
        eos_ids=(),
        sampling=sampling,
        generators=row_generators(0, rows),
    )


def _answer_excess(answers: list[Decoded], prompt: list[int], sampling: Sampling) -> float:
    length = len(answers[0].tokens)
    weights = torch.tensor([SMALL**place for place in reversed(range(length))])
    cells = (torch.tensor([answer.tokens for answer in answers]) * weights).sum(1)
    return _excess(torch.bincount(cells, minlength=SMALL**length), _exact_answers(prompt, sampling, length))


@pytest.mark.parametrize("sampling", [Sampling(1.5), Sampling(2.0, top_k=3, top_p=0.95)], ids=["plain", "cut"])
def test_decoding_a_target_speculatively_emits_its_distribution(sampling: Sampling) -> None:
    answers = _answers([1, 4], sampling, 4)
    assert _answer_excess(answers, [1, 4], sampling) < 5
    assert all(0.05 < share < 0.95 for share in conditional_acceptance(answers))


@pytest.mark.parametrize("wrong", [_residual_is_p, _equal_to_the_argmax])
def test_decoding_by_a_wrong_rule_fails_that_comparison(monkeypatch: pytest.MonkeyPatch, wrong: Accept) -> None:
    monkeypatch.setattr(decode, "accept", wrong)
    assert _answer_excess(_answers([1, 4], Sampling(1.5), 4), [1, 4], Sampling(1.5)) > 10


def test_plain_sampling_draws_by_the_same_numbers_from_the_targets_distribution() -> None:
    target, prompt, sampling = tiny_model(), [10, 200, 31], Sampling(0.8, top_k=30)
    (generator,) = row_generators(7, 1)
    tokens = sample_decode(target, prompt, max_new_tokens=6, eos_ids=(), sampling=sampling, generator=generator)
    (again,) = row_generators(7, 1)
    for index, token in enumerate(tokens):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([[*prompt, *tokens[:index]]])).logits[0, -1]
        assert token == int(pick(sampling.probabilities(logits), draw_uniforms([again], 1, CPU)[0, 0]))
    assert tokens != greedy_decode(target, prompt, max_new_tokens=6, eos_ids=())


def test_a_temperature_of_next_to_nothing_is_greedy() -> None:
    target, prompt = tiny_model(), [10, 200, 31]
    plain = greedy_decode(target, prompt, max_new_tokens=8, eos_ids=())
    settings: dict[str, Any] = {"max_new_tokens": 8, "eos_ids": (), "sampling": Sampling(1e-5)}
    (generator,) = row_generators(0, 1)
    assert sample_decode(target, prompt, generator=generator, **settings) == plain
    found = speculative_decode_batch(target, random_drafter(), [prompt], generators=row_generators(0, 1), **settings)
    assert found[0].tokens == plain
