"""The static decoder's recorded steps on a GPU, against the library's loop on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline import regenerate, static_decode
from pipeline.regenerate import generate_answers
from pipeline.static_decode import StaticDecoder
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu

NEW = 20
LENGTHS = (1, 2, 3, 3, 4, 5, 7, 9, 12)


def _prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 260, (length,), generator=generator).tolist() for length in LENGTHS]


def _library(model: Any, prompts: list[list[int]], stops: tuple[int, ...]) -> list[list[int]]:
    ((_, answers),) = regenerate._library_answers(model, stops, prompts, [list(range(len(prompts)))], NEW)
    return answers


def _stops(model: Any) -> tuple[int, ...]:
    """Return tokens that end more and more of the first prompts' answers, so that the rows move together twice."""
    free = _library(model, _prompts(0), (EOS_ID,))
    return tuple(answer[2 * index] for index, answer in enumerate(free[:7]))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_recorded_steps_write_the_librarys_answers(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, where rounding moves no token. Several graphs, rows that move together, and a second batch on what the
    first one left, whose steps are replayed."""
    monkeypatch.setattr(static_decode, "MIN_ROWS", 1)
    monkeypatch.setattr(static_decode, "CHECK_EVERY", 2)
    monkeypatch.setattr(static_decode, "KEY_BUCKET", 8)
    model: Any = tiny_model(arch).cuda()
    stops = _stops(model)
    decoder = StaticDecoder(model, stops, len(LENGTHS), max(LENGTHS) + NEW)
    wanted = _library(model, _prompts(0), stops)
    assert len({len(answer) for answer in wanted}) > 2
    assert decoder.answers(_prompts(0), NEW) == wanted
    recorded = dict(decoder.graphs)
    assert len({rows for rows, _ in recorded}) > 1 and len({keys for _, keys in recorded}) > 1

    assert decoder.answers(_prompts(0), NEW) == wanted
    assert decoder.graphs == recorded
    for seed in (1, 2):
        assert decoder.answers(_prompts(seed), NEW) == _library(model, _prompts(seed), stops)
    assert decoder.answers(_prompts(1)[:4], NEW) == _library(model, _prompts(1)[:4], stops)
    assert all(decoder.graphs[key] is graph for key, graph in recorded.items())


def test_a_replayed_step_reads_the_buffers_and_not_what_they_held_when_it_was_recorded() -> None:
    model: Any = tiny_model().cuda()
    decoder = StaticDecoder(model, (EOS_ID,), len(LENGTHS), max(LENGTHS) + NEW)
    first, second = (decoder.answers(_prompts(seed), NEW) for seed in (0, 1))
    assert len(decoder.graphs) == 1
    assert first != second
    assert [first, second] == [_library(model, _prompts(seed), (EOS_ID,)) for seed in (0, 1)]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_answers_by_the_whole_way_are_the_librarys(arch: str) -> None:
    """Batches of 4: the last is not full, and all are in the order of their prompts."""
    model: Any = tiny_model(arch).cuda()
    prompts = _prompts(3)[::-1]
    got = generate_answers(model, tiny_tokenizer(), prompts, max_new_tokens=NEW, batch_size=4)
    assert got == _library(model, prompts, (EOS_ID,))
