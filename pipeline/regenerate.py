"""What the target writes: greedy answers, since a drafter learns the text of its own target, and sampled texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.sampling import GREEDY, Sampling
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


def _library_answers(
    model: PreTrainedModel,
    stops: tuple[int, ...],
    prompt_ids: Sequence[Sequence[int]],
    batches: Sequence[list[int]],
    max_new_tokens: int,
) -> Answers:
    for batch in batches:
        yield batch, _generate(model, stops, [prompt_ids[index] for index in batch], max_new_tokens, GREEDY)


@torch.inference_mode()
def _generate(
    model: PreTrainedModel,
    stops: tuple[int, ...],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[list[int]]:
    """Return what the library's loop writes after each prompt; sampled with torch's default generators."""
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    settings = GenerationConfig(
        do_sample=not sampling.greedy,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
        use_cache=True,
        **({} if sampling.greedy else drawn),
    )
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), stops[0], dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        attention_mask[row, width - len(prompt) :] = 1
    own = model.generation_config
    model.generation_config = settings  # else generate() takes what `settings` leaves open from the model's
    try:
        output = model.generate(  # type: ignore[operator]
            input_ids=input_ids.to(model.device), attention_mask=attention_mask.to(model.device)
        )
    finally:
        model.generation_config = own
    return [_cut(ids, stops) for ids in output[:, width:].tolist()]


def sample_texts(
    model: PreTrainedModel,
    stops: tuple[int, ...],
    prefixes: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    seeds: Iterable[int],
) -> Iterator[list[list[int]]]:
    """Yield for each seed `batch_size` texts that the target writes after a prefix, each up to its first stop token.

    prefixes   ids; batches take them in turn
    seeds   each of one batch, below 2**32 (torch's CPU generator ignores higher bits): what a batch holds depends on
            its own seed alone, not on the batches before it
    Reproducible on the same device and build of torch. On CUDA, no other thread may use the device meanwhile.
    """
    batches = zip(cycle([prefix] * batch_size for prefix in prefixes), seeds, strict=False)  # seeds may end, cycle not
    if reason := why_not_static(model):
        log.warning("the target writes prompts with the library's loop, many times slower on a GPU: %s", reason)
        for prompts, seed in batches:
            with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
                torch.manual_seed(seed)
                texts = _generate(model, stops, prompts, max_new_tokens, sampling)
            yield texts
        return
    decoder = StaticDecoder(model, stops, batch_size, max(map(len, prefixes)) + max_new_tokens, sampling)
    try:
        for prompts, seed in batches:
            yield decoder.answers(prompts, max_new_tokens, seed)
    finally:
        del decoder
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # memory of recorded steps serves nothing else until it is given back


def _cut(ids: list[int], stops: tuple[int, ...]) -> list[int]:
    """Return `ids` up to and including the first stop token: generate() fills the rest of a row with padding."""
    for position, token in enumerate(ids):
        if token in stops:
            return ids[: position + 1]
    return ids
