"""Sampling by recorded steps: a replay draws new noise, and the seed alone decides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash.sampling import GREEDY, Sampling
from pipeline import static_decode
from pipeline.regenerate import sample_texts
from pipeline.static_decode import StaticDecoder
from tests.tiny import EOS_ID, tiny_model

pytestmark = pytest.mark.gpu

PREFIX = [1, 20, 30, 40]
NEW = 24
ROWS = 64
WARM = Sampling(temperature=1.0)


def _decoder(model: Any, sampling: Sampling = WARM, rows: int = ROWS) -> StaticDecoder:
    return StaticDecoder(model, (EOS_ID,), rows, len(PREFIX) + NEW, sampling)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PREFIX], device="cuda")).logits[0, -1]


def test_rows_and_steps_draw_noise_of_their_own() -> None:
    """With the logits of every step made equal: a graph that replays its noise would write one token again and again,
    one whose rows share it the same text in all."""
    model: Any = tiny_model().cuda()
    model.lm_head.register_forward_hook(lambda module, given, logits: logits * 0)
    texts = StaticDecoder(model, (), ROWS, len(PREFIX) + NEW, WARM).answers([PREFIX] * ROWS, NEW, 0)
    assert {len(text) for text in texts} == {NEW}
    assert len({tuple(text) for text in texts}) == ROWS
    # 24 even draws of 320 tokens repeat one in the text, on average less than once; 64 draws of a step 6 times.
    assert all(len(set(text)) > NEW - 8 for text in texts)
    assert all(len(set(step)) > ROWS - 24 for step in zip(*texts, strict=True))


def test_replayed_steps_draw_what_was_drawn_when_they_were_recorded() -> None:
    """The first batch records, the others replay; a seed gives the same texts however many batches came before."""
    model: Any = tiny_model().cuda()
    decoder = _decoder(model)
    first = decoder.answers([PREFIX] * ROWS, NEW, 7)
    recorded = dict(decoder.graphs)
    assert recorded
    second, again = (decoder.answers([PREFIX] * ROWS, NEW, seed) for seed in (8, 7))
    assert decoder.graphs == recorded
    assert first == again != second
    assert _decoder(model).answers([PREFIX] * ROWS, NEW, 8) == second


def test_rows_that_move_together_and_several_graphs_stay_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decode, "MIN_ROWS", 1)
    monkeypatch.setattr(static_decode, "CHECK_EVERY", 2)
    monkeypatch.setattr(static_decode, "KEY_BUCKET", 8)
    model: Any = tiny_model().cuda()
    stops = (EOS_ID, *_logits(model).topk(6).indices.tolist())
    decoder = StaticDecoder(model, stops, ROWS, len(PREFIX) + NEW, WARM)
    first, second, again = (decoder.answers([PREFIX] * ROWS, NEW, seed) for seed in (1, 2, 1))
    assert len({rows for rows, _ in decoder.graphs}) > 1 and len({keys for _, keys in decoder.graphs}) > 1
    assert first == again != second


def test_tokens_of_recorded_steps_follow_the_targets_distribution() -> None:
    """One new token of many rows, three times: run, and replayed twice. Compared by total variation."""
    model: Any = tiny_model().cuda()
    rows = 4096
    share_V = WARM.probabilities(_logits(model)).double().cpu()
    decoder = _decoder(model, rows=rows)
    for seed in range(3):
        tokens = torch.tensor(decoder.answers([PREFIX] * rows, 1, seed))[:, 0]
        found_V = torch.bincount(tokens, minlength=len(share_V)).double() / rows
        # The mean of the distance is at most the sum over tokens of sqrt(p (1 - p) / (2 pi rows)).
        expected = (share_V * (1 - share_V) / (2 * torch.pi * rows)).sqrt().sum()
        assert (found_V - share_V).abs().sum() / 2 < 1.5 * expected
    flat_V = Sampling(temperature=2.0).probabilities(_logits(model)).double().cpu()
    assert (found_V - flat_V).abs().sum() / 2 > 3 * expected


def test_greedy_answers_are_those_of_a_decoder_that_knows_no_sampling() -> None:
    """In the same process, after sampled batches: bit for bit, and no noise is recorded."""
    model: Any = tiny_model().cuda()
    prompts = [[1, 20 + row] for row in range(ROWS)]
    wanted = StaticDecoder(model, (EOS_ID,), ROWS, len(PREFIX) + NEW).answers(prompts, NEW)
    sampled = _decoder(model).answers(prompts, NEW, 0)
    greedy = _decoder(model, GREEDY)
    assert greedy.generator is None
    assert greedy.answers(prompts, NEW) == wanted != sampled
    assert greedy.answers(prompts, NEW) == wanted


def test_texts_by_the_whole_way_leave_the_default_generators_alone() -> None:
    model: Any = tiny_model().cuda()
    sliding: Any = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0).cuda()
    for target in (model, sliding):
        before = torch.cuda.get_rng_state(), torch.random.get_rng_state()
        given: dict[str, Any] = {"max_new_tokens": NEW, "batch_size": 8, "sampling": WARM, "seeds": (3, 4, 3)}
        first, second, again = sample_texts(target, (EOS_ID,), [PREFIX], **given)
        assert first == again != second
        assert torch.equal(torch.cuda.get_rng_state(), before[0])
        assert torch.equal(torch.random.get_rng_state(), before[1])
