"""The decoder that CUDA graphs are recorded from, unrecorded: every answer against the library's own loop."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from pipeline import regenerate, static_decode
from pipeline.regenerate import generate_answers
from pipeline.static_decode import StaticDecoder, why_not_static
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer

NEW = 20
LENGTHS = (7, 1, 12, 3, 3, 9, 2, 5, 4)


def prompts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 260, (length,), generator=generator).tolist() for length in lengths]


def library_answers(model: Any, prompts: list[list[int]], stops: tuple[int, ...] = (EOS_ID,)) -> list[list[int]]:
    ((_, answers),) = regenerate._library_answers(model, stops, prompts, [list(range(len(prompts)))], NEW)
    return answers


def static_answers(model: Any, prompts: list[list[int]], batch_size: int = 4) -> list[list[int]]:
    return generate_answers(model, tiny_tokenizer(), prompts, max_new_tokens=NEW, batch_size=batch_size)


def stops_of_some(answers: list[list[int]]) -> list[int]:
    """Two tokens that some of the free-running answers hold early, first and later, and others never."""
    stops = [answers[0][0], answers[1][4]]
    held = [bool(set(stops) & set(answer)) for answer in answers]
    assert any(held) and not all(held), "the stop tokens say nothing: choose another seed"
    return stops


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, attended slots) of every step taken."""
    taken: list[tuple[int, int]] = []
    step = StaticDecoder._step

    def counted(self: StaticDecoder, rows: int, num_keys: int) -> None:
        taken.append((rows, num_keys))
        step(self, rows, num_keys)

    monkeypatch.setattr(StaticDecoder, "_step", counted)
    return taken


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen2"])
def test_answers_are_the_librarys_whether_rows_stop_early_or_never(arch: str, batch_size: int) -> None:
    """Nine prompts of 1 to 12 tokens: with 4 rows the last batch is not full; one answer is its stop token alone."""
    model, prompts = tiny_model(arch), prompts_of()
    free = library_answers(model, prompts)
    assert static_answers(model, prompts, batch_size) == free
    stops = stops_of_some(free)
    model.generation_config.eos_token_id = [*stops, EOS_ID]
    got = static_answers(model, prompts, batch_size)
    assert got == library_answers(model, prompts, (*stops, EOS_ID))
    assert got[0] == stops[:1] and len({len(answer) for answer in got}) > 2


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen2"])
def test_logits_of_every_step_are_those_of_the_whole_text(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny_model(arch), prompts_of()
    seen: list[torch.Tensor] = []
    logits = StaticDecoder._logits

    def kept(self: StaticDecoder, rows: int, num_keys: int) -> torch.Tensor:
        seen.append(logits(self, rows, num_keys))
        return seen[-1]

    monkeypatch.setattr(StaticDecoder, "_logits", kept)
    answers = StaticDecoder(model, (EOS_ID,), len(prompts), 40).answers(prompts, NEW)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        got = torch.stack([step[row] for step in seen[: len(answer)]])
        assert wanted.abs().max() > 1
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_rows_move_together_when_half_are_finished_and_answers_stay_with_their_prompts(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(static_decode, "MIN_ROWS", 1)
    monkeypatch.setattr(static_decode, "CHECK_EVERY", 2)
    model, prompts = tiny_model(), prompts_of()
    free = library_answers(model, prompts)
    stops = [answer[2 * index] for index, answer in enumerate(free[:7])]  # end later and later
    model.generation_config.eos_token_id = stops
    got = static_answers(model, prompts, 16)
    assert got == library_answers(model, prompts, tuple(stops))
    assert sorted({rows for rows, _ in steps}, reverse=True) == [9, 5, 3]
    assert [rows for rows, _ in steps] == sorted((rows for rows, _ in steps), reverse=True)


def test_attended_slots_grow_with_the_text_and_do_not_change_it(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]]
) -> None:
    model, prompts = tiny_model(), prompts_of()
    wanted = static_answers(model, prompts, 16)
    assert {keys for _, keys in steps} == {128}
    steps.clear()
    monkeypatch.setattr(static_decode, "KEY_BUCKET", 8)
    assert static_answers(model, prompts, 16) == wanted
    assert [keys for _, keys in steps] == [16] * 5 + [24] * 8 + [32] * 7  # the longest prompt has 12 tokens


def test_steps_end_soon_after_the_last_row(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]]) -> None:
    monkeypatch.setattr(static_decode, "CHECK_EVERY", 4)
    model, prompts = tiny_model(), prompts_of()
    free = library_answers(model, prompts)
    model.generation_config.eos_token_id = sorted({answer[0] for answer in free})
    assert static_answers(model, prompts, 16) == [answer[:1] for answer in free]
    assert len(steps) == 4


def test_a_finished_row_keeps_its_last_token_whatever_its_later_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed again with other rows, and other rounding, until the batch ends."""
    model, prompts = tiny_model(), prompts_of()
    stops = stops_of_some(library_answers(model, prompts))
    model.generation_config.eos_token_id = stops
    wanted = static_answers(model, prompts, 16)
    logits = StaticDecoder._logits

    def rounded_badly(self: StaticDecoder, rows: int, num_keys: int) -> torch.Tensor:
        found = logits(self, rows, num_keys)
        return torch.where(self.finished_B[:rows, None], -found, found)

    monkeypatch.setattr(StaticDecoder, "_logits", rounded_badly)
    assert static_answers(model, prompts, 16) == wanted


def test_prompts_read_in_several_passes_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny_model(), prompts_of()
    wanted = static_answers(model, prompts, 16)
    passes: list[int] = []
    forward = model.model.forward

    def counted(**given: Any) -> Any:
        passes.append(len(given["input_ids"]))
        return forward(**given)

    monkeypatch.setattr(model.model, "forward", counted)
    monkeypatch.setattr(static_decode, "PREFILL_TOKENS", 4 * (max(LENGTHS) - 1))
    assert static_answers(model, prompts, 16) == wanted
    assert passes[:4] == [4, 4, 1, len(prompts)]


def test_one_decoder_serves_all_batches_that_fit_and_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch starts on the first one's leftovers; the third is longer than 128 slots."""
    made: list[weakref.ref[StaticDecoder]] = []
    alive: list[int] = []

    class Watched(StaticDecoder):
        def __init__(self, *given: Any) -> None:
            alive.append(sum(ref() is not None for ref in made))
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr(regenerate, "StaticDecoder", Watched)
    model, prompts = tiny_model(), prompts_of((3, 4, 5, 6, 115, 116))
    gc.disable()
    try:
        got = static_answers(model, prompts, 2)
        assert [ref() for ref in made] == [None, None]
    finally:
        gc.enable()
    assert alive == [0, 0]
    assert got == library_answers(model, prompts)


def test_an_unwritten_slot_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight is 0, and 0 times NaN is NaN: with torch.empty for torch.zeros answers depend on old memory."""
    model, prompts = tiny_model(), prompts_of()
    wanted = library_answers(model, prompts)
    decoder = StaticDecoder(model, (EOS_ID,), len(prompts), 40)
    assert decoder.answers(prompts, NEW) == wanted
    for values in decoder.values:
        values[:, :, 39:] = torch.nan
    assert decoder.answers(prompts, NEW) != wanted


def test_a_penalty_in_the_generation_config_leaves_answers_greedy() -> None:
    """Qwen2.5's has repetition_penalty, which generate() takes for what its caller left open."""
    model, prompts = tiny_model(), prompts_of()
    wanted = static_answers(model, prompts)
    model.generation_config.repetition_penalty = 5.0
    penalised = model.generate(torch.tensor(prompts[:1]), do_sample=False, max_new_tokens=NEW)[0, len(prompts[0]) :]
    assert penalised.tolist() != wanted[0]
    assert static_answers(model, prompts) == wanted
    assert library_answers(model, prompts) == wanted
    assert model.generation_config.repetition_penalty == 5.0


def test_a_target_with_sliding_windows_takes_the_librarys_loop_and_says_so(
    caplog: pytest.LogCaptureFixture, steps: list[tuple[int, int]]
) -> None:
    """The window is 4: the static decoder, which attends to everything, would write other answers."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    model, prompts = tiny_model("qwen2", **window), prompts_of()
    wanted = library_answers(model, prompts)
    assert StaticDecoder(model, (EOS_ID,), len(prompts), 40).answers(prompts, NEW) != wanted
    steps.clear()
    with caplog.at_level(logging.WARNING):
        assert static_answers(model, prompts) == wanted
    assert [record.getMessage() for record in caplog.records if record.name == "pipeline.regenerate"] == [
        "the target's answers are made with the library's loop, many times slower on a GPU: "
        "it has layers of sliding_attention"
    ]
    assert not steps


def test_the_reason_names_what_cannot_be_decoded_in_place() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert why_not_static(model) == "rope_type 'dynamic' is none of default, linear, llama3, yarn"
    model = tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert why_not_static(model) is None
    assert static_answers(model, prompts_of()) == library_answers(model, prompts_of())
    model.config.model_type = "mistral"
    assert why_not_static(model) == "model_type 'mistral' is none of llama, qwen2, qwen3"


def test_the_targets_own_attention_is_back_after_a_batch_and_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    before = model.config._attn_implementation
    static_answers(model, prompts_of())
    assert model.config._attn_implementation == before == "sdpa"

    def failing(*_: Any) -> None:
        assert model.config._attn_implementation == static_decode.ATTENTION
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StaticDecoder, "_step", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        static_answers(model, prompts_of())
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("lengths", "num_new"), [((3, 4, 5), 4), ((3, 125), 4), ((3, 0), 4)], ids=["rows", "slots", "empty"]
)
def test_prompts_that_do_not_fit_are_refused(lengths: tuple[int, ...], num_new: int) -> None:
    decoder = StaticDecoder(tiny_model(), (EOS_ID,), 2, 10)  # 10 slots become 128
    with pytest.raises(ValueError, match="do not fit in 2 rows of 128 slots"):
        decoder.answers(prompts_of(lengths), num_new)
    assert [len(answer) for answer in decoder.answers(prompts_of((3, 124)), 4)] == [4, 4]


def test_sizes_halve_down_to_the_smallest_that_is_worth_recording() -> None:
    assert static_decode._sizes(1024) == [1024, 512, 256]
    assert static_decode._sizes(300) == [300, 150]
    assert static_decode._sizes(100) == [100]
