"""Conversations -> token ids and the loss mask.

A sample is one rendering of the prompt followed by the target's own answer ids, never a second tokenization of the
decoded answer: the drafter must learn the ids that the target emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DataError

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training sequence; `loss_mask[t]` is True where token t was written by the target."""

    id: str
    input_ids: list[int]
    loss_mask: list[bool]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], system_prompt: str | None = None
) -> list[int]:
    """Return the ids of `messages` up to where the assistant begins to write.

    system_prompt   put first unless `messages` bring a system message of their own; None keeps the template's default
    Raises DataError if the tokenizer has no chat template or the template refuses the conversation.
    """
    name = getattr(tokenizer, "name_or_path", "") or "tokenizer"
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template",
            where=name,
            fix="Take the instruct version of the target, or put its chat_template.jinja into the folder.",
        )
    conversation: list[Any] = list(messages)
    if system_prompt is not None and conversation[0]["role"] != "system":
        conversation.insert(0, {"role": "system", "content": system_prompt})
    try:
        ids: Any = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        roles = ", ".join(message["role"] for message in conversation)
        raise DataError(
            f"the chat template refuses a conversation of roles {roles} ({error})",
            where=name,
            fix="Change the roles, or set data.system_prompt: null.",
        ) from None
    if not len(ids):
        raise DataError("the chat template writes nothing", where=name, fix="Take the one of the target's release.")
    return [int(token) for token in ids]


def make_sample(sample_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Sample:
    """Return the sample whose loss mask is True exactly on the answer, its EOS included if it has one."""
    return Sample(
        id=sample_id,
        input_ids=[*prompt_ids, *answer_ids],
        loss_mask=[False] * len(prompt_ids) + [True] * len(answer_ids),
    )


def supervised_share(samples: Sequence[Sample]) -> float:
    """Return the share of all tokens that are supervised (0.0 without any token)."""
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    return sum(sum(sample.loss_mask) for sample in samples) / num_tokens if num_tokens else 0.0


def has_anchor(sample: Sample) -> bool:
    """Return whether some supervised token is followed by a supervised one: only there can a block begin."""
    return any(here and after for here, after in zip(sample.loss_mask, sample.loss_mask[1:], strict=False))


def check_supervised(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that can give an anchor, in order.

    Raises DataError if none can: training would run on an all-zero mask and look healthy.
    """
    usable = [sample for sample in samples if has_anchor(sample)]
    if not usable:
        num = sum(sum(sample.loss_mask) for sample in samples)
        raise DataError(
            f"no supervised tokens to train on: {len(samples)} samples hold {num}, nowhere two in a row",
            where="data.train",
            fix="The target's answers are empty: look at the prompts, and raise data.max_answer_tokens.",
        )
    return usable


def check_mask_absent(samples: Sequence[Sample], mask_token_id: int) -> None:
    """Raise DataError naming the first sample that contains the mask token: a clean token would pass for a slot."""
    for sample in samples:
        if mask_token_id in sample.input_ids:
            position = sample.input_ids.index(mask_token_id)
            raise DataError(
                f"token {mask_token_id} occurs in the data (sample {sample.id}, position {position})",
                where="drafter.mask_token_id",
                fix="Choose a token that no text contains, or remove the prompt.",
            )
