from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import DataError
from pipeline.regenerate import generate_answers, stop_ids
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer

PROMPTS = [[1, 20, 30, 40, 50], [1, 99], [1, 60, 61, 62, 63, 64, 65, 66, 67], [1, 150, 151], [1, 200, 9, 201]]


def greedy_by_hand(model: Any, prompt: list[int], num_tokens: int, stops: tuple[int, ...]) -> list[int]:
    ids = list(prompt)
    while len(ids) - len(prompt) < num_tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen2"])
def test_batched_answers_equal_greedy_decoding_one_by_one(arch: str) -> None:
    model = tiny_model(arch)
    wanted = [greedy_by_hand(model, prompt, 24, (EOS_ID,)) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in wanted}) == len(PROMPTS) and max(map(len, map(set, wanted))) > 8
    got = generate_answers(model, tiny_tokenizer(), PROMPTS, max_new_tokens=24, batch_size=2)
    assert got == wanted


def test_answers_end_with_their_first_stop_token_and_hold_no_padding() -> None:
    """Whatever token a free run emits early is made a stop token; the others in the batch go on longer."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    free = [greedy_by_hand(model, prompt, 24, ()) for prompt in PROMPTS]
    stop = free[0][5]
    model.generation_config.eos_token_id = [EOS_ID, stop]
    got = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=24, batch_size=len(PROMPTS))
    assert got[0] == free[0][: free[0].index(stop) + 1] and len(got[0]) < 24
    assert max(map(len, got)) == 24
    for answer, whole in zip(got, free, strict=True):
        assert answer == whole[: len(answer)]
        assert all(token not in (EOS_ID, stop) for token in answer[:-1])


def test_an_immediate_eos_is_an_answer_of_one_token() -> None:
    model = tiny_model()
    first = greedy_by_hand(model, PROMPTS[1], 1, ())[0]
    model.generation_config.eos_token_id = first
    got = generate_answers(model, tiny_tokenizer(), [PROMPTS[1]], max_new_tokens=8, batch_size=4)
    assert got == [[first]]


def test_progress_counts_prompts_and_tokens() -> None:
    seen: list[tuple[int, int]] = []
    got = generate_answers(
        tiny_model(),
        tiny_tokenizer(),
        PROMPTS,
        max_new_tokens=4,
        batch_size=2,
        progress=lambda num_prompts, num_tokens: seen.append((num_prompts, num_tokens)),
    )
    assert [num_prompts for num_prompts, _ in seen] == [2, 4, 5]
    assert seen[-1][1] == sum(map(len, got))


def test_stop_ids_come_from_the_generation_config_before_the_tokenizer() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 8]
    assert stop_ids(model, tokenizer) == (7, 8)
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == (EOS_ID,)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        stop_ids(model, tokenizer)
    assert PAD_ID != EOS_ID


@pytest.mark.parametrize("eos", [[], "x", -1, 9999])
def test_a_stop_token_that_the_target_does_not_have_is_refused(eos: Any) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = eos
    with pytest.raises(DataError, match="is no token of its 320"):
        stop_ids(model, tiny_tokenizer())
