"""The target writes the answers: a drafter learns the text that its own target would write, greedily."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.errors import DataError
from pipeline.static_decode import StaticDecoder, why_not_static

log = logging.getLogger(__name__)

Answers = Iterator[tuple[list[int], list[list[int]]]]
"""One item a batch: the indices of its prompts and their answers."""


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

    Greedy is the argmax of the target's logits: of its generation_config only the stop tokens count, since a repetition
    penalty there would make texts that speculative decoding of the bare target never sees. Prompts are batched by
    length. Rounding in a batch may move a near-tie: the answers are the target's own text, but not always token for
    token what a batch of one would give. On CUDA, no other thread may use the device meanwhile (StaticDecoder).
    """
    stops = stop_ids(model, tokenizer)
    order = sorted(range(len(prompt_ids)), key=lambda index: (len(prompt_ids[index]), index))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    decode = _static_answers
    if reason := why_not_static(model):
        log.warning("the target's answers are made with the library's loop, many times slower on a GPU: %s", reason)
        decode = _library_answers
    answers: list[list[int]] = [[] for _ in prompt_ids]
    num_prompts = num_tokens = 0
    for batch, written in decode(model, stops, prompt_ids, batches, max_new_tokens):
        for index, answer in zip(batch, written, strict=True):
            answers[index] = answer
        num_prompts += len(batch)
        num_tokens += sum(map(len, written))
        if progress:
            progress(num_prompts, num_tokens)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # memory of recorded steps serves nothing else until it is given back
    return answers


def _static_answers(
    model: PreTrainedModel,
    stops: tuple[int, ...],
    prompt_ids: Sequence[Sequence[int]],
    batches: Sequence[list[int]],
    max_new_tokens: int,
) -> Answers:
    decoder = None
    for batch in batches:
        prompts = [prompt_ids[index] for index in batch]
        num_slots = len(prompts[-1]) + max_new_tokens  # the longest: batches are sorted
        if decoder is None or decoder.num_slots < num_slots:
            decoder = None  # frees the old one's cache before the new one's is made
            decoder = StaticDecoder(model, stops, len(batches[0]), num_slots)
        yield batch, decoder.answers(prompts, max_new_tokens)


@torch.inference_mode()
def _library_answers(
    model: PreTrainedModel,
    stops: tuple[int, ...],
    prompt_ids: Sequence[Sequence[int]],
    batches: Sequence[list[int]],
    max_new_tokens: int,
) -> Answers:
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
        use_cache=True,
    )
    for batch in batches:
        width = max(len(prompt_ids[index]) for index in batch)
        input_ids = torch.full((len(batch), width), stops[0], dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, index in enumerate(batch):
            length = len(prompt_ids[index])
            input_ids[row, width - length :] = torch.tensor(prompt_ids[index], dtype=torch.long)
            attention_mask[row, width - length :] = 1
        own = model.generation_config
        model.generation_config = settings  # else generate() takes what `settings` leaves open from the model's
        try:
            output = model.generate(  # type: ignore[operator]
                input_ids=input_ids.to(model.device), attention_mask=attention_mask.to(model.device)
            )
        finally:
            model.generation_config = own
        yield batch, [_cut(ids, stops) for ids in output[:, width:].tolist()]


def _cut(ids: list[int], stops: tuple[int, ...]) -> list[int]:
    """Return `ids` up to and including the first stop token: generate() fills the rest of a row with padding."""
    for position, token in enumerate(ids):
        if token in stops:
            return ids[: position + 1]
    return ids
