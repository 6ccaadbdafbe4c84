"""The target writes the answers: a drafter learns the text that its own target would write, greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.errors import DataError


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends an answer: generation_config's (one or a list), else the tokenizer's EOS."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        raise DataError("the target names no EOS token", where="target.source", fix="Add generation_config.json to it.")
    ids = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    rows = model.config.get_text_config().vocab_size
    if not ids or not all(isinstance(token, int) and 0 <= token < rows for token in ids):
        raise DataError(
            f"the target's eos_token_id {found!r} is no token of its {rows}",
            where="target.source",
            fix="Correct its generation_config.json.",
        )
    return ids


@torch.inference_mode()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the greedy answer to each prompt, in input order: at least one token, none after a stop token.

    progress   called with (answered prompts, new tokens so far) after each batch

    Prompts are batched by length and padded on the left. Rounding in a batch may move a near-tie: the answers are the
    target's own text, but not always token for token what a batch of one would give.
    """
    stops = stop_ids(model, tokenizer)
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
        use_cache=True,
    )
    order = sorted(range(len(prompt_ids)), key=lambda index: (len(prompt_ids[index]), index))
    answers: list[list[int]] = [[] for _ in prompt_ids]
    num_tokens = 0
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        width = max(len(prompt_ids[index]) for index in chunk)
        input_ids = torch.full((len(chunk), width), stops[0], dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, index in enumerate(chunk):
            length = len(prompt_ids[index])
            input_ids[row, width - length :] = torch.tensor(prompt_ids[index], dtype=torch.long)
            attention_mask[row, width - length :] = 1
        output = model.generate(  # type: ignore[operator]
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=settings,
        )
        for row, index in enumerate(chunk):
            answers[index] = _cut(output[row, width:].tolist(), stops)
            num_tokens += len(answers[index])
        if progress:
            progress(start + len(chunk), num_tokens)
    return answers


def _cut(ids: list[int], stops: tuple[int, ...]) -> list[int]:
    """Return `ids` up to and including the first stop token: generate() fills the rest of a row with padding."""
    for position, token in enumerate(ids):
        if token in stops:
            return ids[: position + 1]
    return ids
