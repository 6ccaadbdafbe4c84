"""A row of a batch gives the tokens that it gives alone, whatever the other rows accept and whenever they end.

In float64, where padding and batching change no argmax. The drafters know the targets' texts except in some places, so
that rows accept different numbers of tokens in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.attention import AttentionMask
from dflash.context import DraftContext, TargetContext
from dflash.decode import Decoded, draft_states, greedy_decode, speculative_decode, speculative_decode_batch
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel, KeyValues
from dflash.sampling import Sampling, row_generators
from dflash.taps import FeatureTaps, extract_features
from tests.drafters import block_inputs, drafter_config, random_drafter, training_states
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[10, 200, 31, 77], [5], [90, 91, 92, 93, 94, 95, 96, 97, 98], [40, 41]]
NUM_TOKENS = 26
NO_EOS: tuple[int, ...] = ()


@lru_cache
def _target(arch: str = "qwen3", **changes: Any) -> Any:
    return tiny_model(arch, **changes).double()


@lru_cache
def _answers(arch: str = "qwen3", **changes: Any) -> list[list[int]]:
    """Return the greedy answers, which are all different and varied."""
    target = _target(arch, **changes)
    found = [greedy_decode(target, p, max_new_tokens=NUM_TOKENS, eos_ids=NO_EOS) for p in PROMPTS]
    assert all(len(set(answer)) > NUM_TOKENS / 2 for answer in found)
    return found


class TextDrafter(DFlashDraftModel):
    """Drafts from texts that it knows, except about every `wrong_every`-th token, where it drafts another.

    It finds a row's text by the anchor's token at the anchor's position, since rows leave the batch: the first text
    that has it there, which is the same one in a batch and alone.
    """

    def __init__(self, texts: list[list[int]], head_VD: Tensor, *, block_size: int, wrong_every: int) -> None:
        super().__init__(drafter_config(block_size=block_size))
        self.double()
        self.texts, self.head_VD, self.wrong_every = texts, head_VD.detach(), wrong_every

    def draft(
        self,
        embeddings_bQD: Tensor,
        positions_bQ: Tensor,
        context: Sequence[KeyValues],
        masks: Sequence[AttentionMask],
        implementation: str,
    ) -> Tensor:
        """Return head rows (b, Q, D) of the tokens at `positions_bQ`."""
        anchors = (embeddings_bQD[:, 0] @ self.head_VD.T).argmax(-1).tolist()
        ids = []
        for anchor, positions in zip(anchors, positions_bQ.tolist(), strict=True):
            text = next(t for t in self.texts if positions[0] < len(t) and t[positions[0]] == anchor)
            known = [text[p] if p < len(text) else 0 for p in positions]
            wrong = [(p + t) % self.wrong_every == 0 for p, t in zip(positions, known, strict=True)]
            ids.append([(t + w) % len(self.head_VD) for t, w in zip(known, wrong, strict=True)])
        return self.head_VD[torch.tensor(ids)]


def _text_drafter(wrong_every: int = 5, block_size: int = 6) -> TextDrafter:
    texts = [[*p, *a] for p, a in zip(PROMPTS, _answers(), strict=True)]
    head_VD = _target().get_output_embeddings().weight
    return TextDrafter(texts, head_VD, block_size=block_size, wrong_every=wrong_every)


def _alone(target: Any, drafter: DFlashDraftModel, **settings: Any) -> list[Decoded]:
    return [speculative_decode(target, drafter, prompt, **settings) for prompt in PROMPTS]


def test_rows_that_accept_different_counts_give_what_they_give_alone() -> None:
    drafter = _text_drafter()
    settings: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "eos_ids": NO_EOS}
    batch = speculative_decode_batch(_target(), drafter, PROMPTS, **settings)
    assert [answer.tokens for answer in batch] == _answers()
    assert batch == _alone(_target(), drafter, **settings)
    # the rows are ragged in nearly every call, and end in different ones
    per_call = list(zip(*(answer.accepted for answer in batch), strict=False))
    assert sum(len(set(counts)) > 1 for counts in per_call) > len(per_call) / 2
    assert len({len(answer.accepted) for answer in batch}) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5, "is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5, "is_causal": None},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4, "window_reading": "anchor"},
    ],
    ids=["full", "mixed causal", "mixed by kind", "mixed, window on the anchor"],
)
def test_a_real_drafter_of_any_layout_draws_in_a_batch_what_it_draws_alone(changes: dict[str, Any]) -> None:
    """Sampled, as the drafter knows nothing: hot enough that its tokens are accepted, and every digit of q counts."""
    drafter, sampling = random_drafter(dtype=torch.float64, **changes), Sampling(temperature=3.0)
    settings: dict[str, Any] = {"max_new_tokens": 8, "eos_ids": NO_EOS, "sampling": sampling}
    batch = speculative_decode_batch(_target(), drafter, PROMPTS, generators=row_generators(0, 4), **settings)
    alone = [
        speculative_decode(_target(), drafter, prompt, generator=generator, **settings)
        for prompt, generator in zip(PROMPTS, row_generators(0, 4), strict=True)
    ]
    assert batch == alone
    assert len({count for answer in batch for count in answer.accepted}) > 2


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_other_targets_lose_nothing_in_a_batch(arch: str) -> None:
    drafter = random_drafter(dtype=torch.float64)
    batch = speculative_decode_batch(_target(arch), drafter, PROMPTS, max_new_tokens=8, eos_ids=NO_EOS)
    assert [answer.tokens for answer in batch] == [answer[:8] for answer in _answers(arch)]


def test_a_target_with_sliding_layers_loses_nothing_in_a_batch() -> None:
    """Its window is counted in cache columns by transformers, so columns must be as far apart as positions."""
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    target, answers = _target(**sliding), _answers(**sliding)
    assert "sliding_attention" in target.config.layer_types and answers != _answers()
    texts = [[*p, *a] for p, a in zip(PROMPTS, answers, strict=True)]
    drafter = TextDrafter(texts, target.get_output_embeddings().weight, block_size=6, wrong_every=5)
    batch = speculative_decode_batch(target, drafter, PROMPTS, max_new_tokens=NUM_TOKENS, eos_ids=NO_EOS)
    assert [answer.tokens for answer in batch] == answers
    assert len({tuple(answer.accepted) for answer in batch}) > 1


def test_eos_inside_an_accepted_run_ends_its_own_row_only() -> None:
    answers, drafter = _answers(), _text_drafter(wrong_every=100)
    eos = answers[0][3]  # inside the run of the first call, which accepts five
    batch = speculative_decode_batch(_target(), drafter, PROMPTS, max_new_tokens=NUM_TOKENS, eos_ids={eos})
    cut = [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in answers]
    assert [answer.tokens for answer in batch] == cut
    assert batch[0].tokens == answers[0][:4] and batch[0].accepted == [5]
    assert max(len(answer.accepted) for answer in batch) > 1


@pytest.mark.parametrize("limit", [1, 2, 7, 8])
def test_the_length_limit_cuts_every_row(limit: int) -> None:
    drafter = _text_drafter()
    batch = speculative_decode_batch(_target(), drafter, PROMPTS, max_new_tokens=limit, eos_ids=NO_EOS)
    assert [answer.tokens for answer in batch] == [answer[:limit] for answer in _answers()]
    assert batch == _alone(_target(), drafter, max_new_tokens=limit, eos_ids=NO_EOS)


def test_equal_prompts_and_a_row_that_ends_at_once_change_no_other_row() -> None:
    answers, drafter = _answers(), _text_drafter()
    first = answers[1][0]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[3]]
    assert first not in answers[0] + answers[3]
    batch = speculative_decode_batch(_target(), drafter, prompts, max_new_tokens=9, eos_ids={first})
    assert [answer.tokens for answer in batch] == [answers[0][:9], [first], answers[0][:9], answers[3][:9]]
    assert batch[1].accepted == [] and batch[0] == batch[2]


def test_other_generators_draw_other_tokens() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 6, "eos_ids": NO_EOS, "sampling": Sampling(3.0, top_k=90, top_p=0.95)}
    one, same, other = (
        speculative_decode_batch(_target(), random_drafter(), PROMPTS, generators=row_generators(seed, 4), **settings)
        for seed in (3, 3, 4)
    )
    assert one == same
    assert all(a.tokens != b.tokens for a, b in zip(one, other, strict=True))


def test_no_prompts_give_no_answers_and_no_room_gives_empty_ones() -> None:
    settings: dict[str, Any] = {"eos_ids": NO_EOS}
    assert speculative_decode_batch(_target(), random_drafter(), [], max_new_tokens=4, **settings) == []
    empty = speculative_decode_batch(_target(), random_drafter(), PROMPTS, max_new_tokens=0, **settings)
    assert empty == [Decoded()] * 4


def test_what_cannot_be_decoded_is_refused_by_name() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 4, "eos_ids": NO_EOS}
    with pytest.raises(DFlashError, match=r"is empty") as empty:
        speculative_decode_batch(_target(), random_drafter(), [[1], []], **settings)
    assert empty.value.where == "prompts[1]"
    for generators in (None, row_generators(0, 1)):
        with pytest.raises(DFlashError, match=r"(none|1) for 2 prompts at temperature 1"):
            speculative_decode_batch(
                _target(), random_drafter(), [[1], [2]], sampling=Sampling(1.0), generators=generators, **settings
            )
    hybrid = tiny_model()
    hybrid.config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(DFlashError, match=r"has linear_attention layers"):
        speculative_decode(hybrid, random_drafter(), [1], **settings)


def _decode_and_check_contexts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Decode the batch; after every call compare both contexts with those of the verified text, read in one call.

    Reading is causal, so one read of each text has the keys and values of all its beginnings.
    """
    target, drafter, calls = _target(), _text_drafter(), []
    expected: list[tuple[list[Any], list[KeyValues]]] = []
    for text in drafter.texts:
        with FeatureTaps(target, drafter.config.target_layer_ids) as taps, torch.no_grad():
            whole = TargetContext(target, taps)
            features = whole.prefill([text])[1][0][None]
            key_values = drafter.context_key_values(features, torch.arange(len(text))[None])
            expected.append((list(whole.cache.layers), key_values))
    verified: list[TargetContext] = []
    init, select, extend = TargetContext.__init__, TargetContext.select, DraftContext.extend

    def remember(self: TargetContext, *arguments: Any) -> None:
        init(self, *arguments)
        verified.append(self)

    def follow(self: TargetContext, rows: Sequence[int]) -> None:
        select(self, rows)
        expected[:] = [expected[row] for row in rows]

    def check(self: DraftContext, features: Tensor, counts: Sequence[int]) -> None:
        extend(self, features, counts)
        context = verified[0]
        assert self.lengths == context.lengths and context.cache.get_seq_length() == max(context.lengths)
        for row, (length, (layers, key_values)) in enumerate(zip(self.lengths, expected, strict=True)):
            held: list[Any] = context.cache.layers
            for layer, true in zip(held, layers, strict=True):
                torch.testing.assert_close(layer.keys[row, :, -length:], true.keys[0, :, :length])
                torch.testing.assert_close(layer.values[row, :, -length:], true.values[0, :, :length])
            for found, pair in zip(self.key_values, key_values, strict=True):
                for tensor, truth in zip(found, pair, strict=True):
                    torch.testing.assert_close(tensor[row, :, :length], truth[0, :, :length])
        calls.append(list(self.lengths))

    with monkeypatch.context() as patch:
        patch.setattr(TargetContext, "__init__", remember)
        patch.setattr(TargetContext, "select", follow)
        patch.setattr(DraftContext, "extend", check)
        speculative_decode_batch(target, drafter, PROMPTS, max_new_tokens=14, eos_ids=NO_EOS)
    assert len(expected) < len(PROMPTS), "no row left before the others"
    return len(calls)


def test_both_contexts_hold_the_verified_tokens_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft cache length equals verified length after every call (anatomy 4), and so do the values."""
    assert _decode_and_check_contexts(monkeypatch) > 4


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_crop_that_is_one_off_is_caught_by_that_comparison(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    keep = TargetContext.keep

    def one_off(self: TargetContext, num_tokens: int, counts: Sequence[int]) -> None:
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        keep(self, num_tokens, [max(0, min(num_tokens, count + shift)) for count in counts])
        self.lengths = lengths

    monkeypatch.setattr(TargetContext, "keep", one_off)
    with pytest.raises(AssertionError):
        _decode_and_check_contexts(monkeypatch)


def test_a_draft_context_that_counts_a_rejected_token_is_caught_by_that_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extend = DraftContext.extend

    def one_more(self: DraftContext, features: Tensor, counts: Sequence[int]) -> None:
        extend(self, features, [min(features.shape[1], count + 1) for count in counts])

    monkeypatch.setattr(DraftContext, "extend", one_more)
    with pytest.raises(AssertionError):
        _decode_and_check_contexts(monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5, "is_causal": None},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3, "window_reading": "anchor"},
    ],
    ids=["full", "causal", "mixed", "window on the anchor"],
)
def test_training_equals_decoding_in_a_batch_of_different_lengths(changes: dict[str, Any]) -> None:
    """The training mask's states at each row's anchor (SpecForge#455), though the rows' contexts end apart."""
    target, drafter = _target(), random_drafter(dtype=torch.float64, block_size=5, **changes)
    embed, steps = target.get_input_embeddings().weight, [3, 2, 4]
    texts = [[*p, *a] for p, a in zip(PROMPTS, _answers(), strict=True)]
    features = [extract_features(target, torch.tensor([text]), drafter.config.target_layer_ids) for text in texts]
    context, ends = DraftContext(drafter, 4), [len(p) for p in PROMPTS]
    with torch.no_grad():
        context.extend(torch.cat([f[:, :9] for f in features]), ends)
        for step in steps:
            states = draft_states(drafter, context, [t[end] for t, end in zip(texts, ends, strict=True)], embed)
            for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
                inputs = block_inputs(drafter.config, text, [end], embed)
                trained = training_states(drafter, features[row], *inputs, [end])
                torch.testing.assert_close(states[row], trained[0], rtol=1e-10, atol=1e-10)
            counts = [1 + (step + row) % 4 for row in range(4)]
            new = [f[:, end : end + 4] for f, end in zip(features, ends, strict=True)]
            context.extend(torch.cat(new), counts)
            ends = [end + count for end, count in zip(ends, counts, strict=True)]
        assert len(set(ends)) > 2 and context.lengths == ends
