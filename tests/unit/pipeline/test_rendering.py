from __future__ import annotations

import pytest

from pipeline.errors import DataError
from pipeline.rendering import (
    Sample,
    check_mask_absent,
    check_supervised,
    make_sample,
    render_prompt,
    supervised_share,
)
from tests.tiny import EOS_ID, MASK_ID, START_ID, tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_prompt_ends_where_the_assistant_begins() -> None:
    tokenizer = tiny_tokenizer()
    ids = render_prompt(tokenizer, HELLO)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == START_ID and all(type(token) is int for token in ids)


def test_the_prompt_is_a_prefix_of_the_whole_conversation() -> None:
    """THUDM/slime#2263: rendering piece by piece must give the ids of one full rendering."""
    tokenizer = tiny_tokenizer()
    answer = [*tokenizer.encode("Hi 12", add_special_tokens=False), EOS_ID]
    sample = make_sample("a", render_prompt(tokenizer, HELLO), answer)
    whole = tokenizer.apply_chat_template([*HELLO, {"role": "assistant", "content": "Hi 12"}], return_dict=False)
    assert sample.input_ids == whole[: len(sample.input_ids)]


def test_a_system_prompt_is_put_first_unless_the_conversation_has_its_own() -> None:
    tokenizer = tiny_tokenizer()
    assert "system\nBe kind<|im_end|>" in tokenizer.decode(render_prompt(tokenizer, HELLO, "Be kind"))
    own = [{"role": "system", "content": "Be brief"}, *HELLO]
    assert render_prompt(tokenizer, own, "Be kind") == render_prompt(tokenizer, own)
    assert HELLO == [{"role": "user", "content": "Hello"}]


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        render_prompt(tokenizer, HELLO)


def test_a_template_that_refuses_the_roles_gives_one_line() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"roles system, user .no system role."):
        render_prompt(tokenizer, HELLO, "Be kind")


def test_only_the_answer_is_supervised_and_its_eos_too() -> None:
    sample = make_sample("a", [1, 7, 8], [9, 10, EOS_ID])
    assert sample == Sample(id="a", input_ids=[1, 7, 8, 9, 10, EOS_ID], loss_mask=[False] * 3 + [True] * 3)


def test_the_masked_text_is_the_answer() -> None:
    """Kuaishou-OneRec/OpenOneRec#38: the mask must cover the assistant's text and nothing else."""
    tokenizer = tiny_tokenizer()
    answer = tokenizer.encode("Yes.", add_special_tokens=False)
    sample = make_sample("a", render_prompt(tokenizer, HELLO), answer)
    masked = [token for token, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]
    assert tokenizer.decode(masked) == "Yes."


def test_supervised_share_counts_tokens_not_samples() -> None:
    assert supervised_share([make_sample("a", [1] * 6, [2] * 2), make_sample("b", [1], [2])]) == pytest.approx(0.3)
    assert supervised_share([]) == 0.0


def test_samples_without_two_supervised_tokens_in_a_row_are_left_out() -> None:
    one, two = make_sample("one", [1, 1], [EOS_ID]), make_sample("two", [1, 1], [9, EOS_ID])
    assert check_supervised([one, two]) == [two]


def test_no_supervised_tokens_at_all_is_an_error() -> None:
    """marin-community/marin#7237: an all-zero mask must not train in silence."""
    gaps = Sample(id="gaps", input_ids=[1, 2, 3], loss_mask=[True, False, True])
    with pytest.raises(DataError, match="no supervised tokens to train on: 2 samples hold 3"):
        check_supervised([gaps, make_sample("b", [1], [EOS_ID])])


def test_a_mask_token_in_the_data_is_named_with_its_sample() -> None:
    clean = make_sample("clean", [1, 5], [6, 7])
    check_mask_absent([clean], MASK_ID)
    with pytest.raises(DataError, match="sample dirty, position 2"):
        check_mask_absent([clean, make_sample("dirty", [1, 5], [MASK_ID, 7])], MASK_ID)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ 1 / 0 }}", "refuses .*division by zero"), ("{{ messages + 1 }}", "refuses"), ("{# #}", "writes nothing")],
)
def test_a_template_that_fails_or_writes_nothing_is_refused(template: str, message: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
