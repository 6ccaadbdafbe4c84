"""Sampling by the static decoder, unrecorded, and by the library's loop; tests/gpu has the recorded steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dflash.sampling import GREEDY, Sampling
from pipeline import static_decode
from pipeline.regenerate import sample_texts
from pipeline.static_decode import StaticDecoder
from tests.tiny import EOS_ID, tiny_model

PREFIX = [1, 20, 30, 40]
NEW = 12
WARM = Sampling(temperature=1.0)


def texts_of(
    model: Any, *seeds: int, rows: int = 8, sampling: Sampling = WARM, **changes: Any
) -> list[list[list[int]]]:
    given: dict[str, Any] = {"prefixes": [PREFIX], "max_new_tokens": NEW, "batch_size": rows, "stops": (EOS_ID,)}
    given |= changes
    return list(sample_texts(model, sampling=sampling, seeds=seeds, **given))


def sliding_model() -> Any:
    """A target that StaticDecoder refuses."""
    return tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)


def misfit(tokens: list[int], share_V: torch.Tensor) -> float:
    """Return chi squared of drawn tokens, in standard deviations over its mean; rare tokens count as one."""
    found = torch.bincount(torch.tensor(tokens), minlength=len(share_V)).double()
    wanted = share_V.double() * len(tokens)
    often = wanted >= 5
    if wanted[~often].sum() >= 5:
        found = torch.cat([found[often], found[~often].sum()[None]])
        wanted = torch.cat([wanted[often], wanted[~often].sum()[None]])
    else:
        found, wanted = found[often], wanted[often]
    freedom = len(wanted) - 1
    assert freedom > 10
    return float((((found - wanted) ** 2 / wanted).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=0.7), Sampling(temperature=1.5, top_p=0.9)])
def test_tokens_are_drawn_from_the_targets_distribution(sampling: Sampling) -> None:
    """The test has teeth: a temperature a sixth higher does not pass it."""
    model = tiny_model()
    with torch.no_grad():
        logits_V = model(torch.tensor([PREFIX])).logits[0, -1]
    (texts,) = texts_of(model, 0, rows=4096, sampling=sampling, max_new_tokens=1)
    tokens = [text[0] for text in texts]
    share_V = sampling.probabilities(logits_V)
    assert misfit(tokens, share_V) < 4
    assert not share_V[tokens].eq(0).any()
    other = Sampling(temperature=sampling.temperature * 7 / 6, top_p=sampling.top_p)
    assert misfit(tokens, other.probabilities(logits_V)) > 8


@pytest.mark.parametrize("make", [tiny_model, sliding_model], ids=["static", "library"])
def test_the_seed_decides_a_batch_and_the_batches_before_it_do_not(make: Any) -> None:
    model = make()
    first, second, again = texts_of(model, 5, 6, 5)
    assert first == again != second
    assert len({tuple(text) for text in first}) == len(first), "rows share their noise"
    assert texts_of(model, 6) == [second]


@pytest.mark.parametrize("make", [tiny_model, sliding_model], ids=["static", "library"])
def test_texts_end_with_their_first_stop_token(make: Any) -> None:
    model = make()
    ((first, *_),) = texts_of(model, 0)
    stops = {EOS_ID, *first[1:]}  # many, so that some of the texts meet one whatever the target prefers
    (texts,) = texts_of(model, 0, stops=tuple(stops), rows=32)
    assert {len(text) for text in texts} > {NEW}
    for text in texts:
        assert not stops & set(text[:-1])
        assert len(text) == NEW or text[-1] in stops


def test_batches_take_the_prefixes_in_turn() -> None:
    """One token after each, by a temperature so low that it is the likeliest one."""
    model, other = tiny_model(), [1, 99]
    with torch.no_grad():
        best = [int(model(torch.tensor([prefix])).logits[0, -1].argmax()) for prefix in (PREFIX, other)]
    assert best[0] != best[1]
    cold = Sampling(temperature=1e-3)
    batches = texts_of(model, 0, 1, 2, rows=2, prefixes=[PREFIX, other], max_new_tokens=1, sampling=cold)
    assert batches == [[[best[0]]] * 2, [[best[1]]] * 2, [[best[0]]] * 2]


def test_rows_that_move_together_stay_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decode, "MIN_ROWS", 1)
    monkeypatch.setattr(static_decode, "CHECK_EVERY", 2)
    sizes: set[int] = set()
    step = StaticDecoder._step

    def counted(self: StaticDecoder, rows: int, num_keys: int) -> None:
        sizes.add(rows)
        step(self, rows, num_keys)

    monkeypatch.setattr(StaticDecoder, "_step", counted)
    model = tiny_model()
    ((first, second, *_),) = texts_of(model, 0)
    stops = (EOS_ID, *first[:3], *second[:3])
    sizes.clear()
    batch, again = texts_of(model, 0, 0, stops=stops, rows=16)
    assert batch == again and len(sizes) > 1


def test_a_decoder_that_samples_takes_nothing_from_the_default_generator() -> None:
    """Training's own noise must not depend on whether prompts were written or found in the cache."""
    for model in (tiny_model(), sliding_model()):
        before = torch.random.get_rng_state()
        texts_of(model, 0)
        assert torch.equal(torch.random.get_rng_state(), before)


def test_a_greedy_decoder_draws_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*_: Any, **__: Any) -> None:
        raise AssertionError("noise was drawn")

    monkeypatch.setattr(torch.Tensor, "exponential_", drawn)
    model = tiny_model()
    decoder = StaticDecoder(model, (EOS_ID,), 2, 32, GREEDY)
    assert decoder.generator is None
    assert decoder.answers([PREFIX, PREFIX], NEW) == StaticDecoder(model, (EOS_ID,), 2, 32).answers([PREFIX] * 2, NEW)
    with pytest.raises(AssertionError, match="noise was drawn"):
        texts_of(model, 0)


def test_the_librarys_loop_is_named_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        texts_of(sliding_model(), 0)
    assert [record.getMessage() for record in caplog.records if record.name == "pipeline.regenerate"] == [
        "the target writes prompts with the library's loop, many times slower on a GPU: "
        "it has layers of sliding_attention"
    ]


def test_the_librarys_loop_draws_from_all_tokens() -> None:
    """Its own defaults would keep the 50 likeliest of 320."""
    hot = Sampling(temperature=100.0)
    (texts,) = texts_of(sliding_model(), 0, rows=64, sampling=hot, stops=(EOS_ID,))
    assert len({token for text in texts for token in text}) > 250
