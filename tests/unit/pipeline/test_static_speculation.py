"""Static speculative decoding, unrecorded: tokens, accepted drafts and tau against dflash.decode and plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dflash.decode import Decoded, greedy_decode, speculative_decode
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from dflash.taps import extract_features
from pipeline import static_layers, static_speculation
from pipeline.static_decode import StaticDecoder
from pipeline.static_speculation import StaticSpeculator
from tests.drafters import block_inputs, random_drafter, training_states
from tests.tiny import EOS_ID, tiny_model

BUCKET = 16
NEW = 24
ROUNDS = 16
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4},
    "markov": {"markov_rank": 8},
    "sliding": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6, "is_causal": None},
    "anchor window": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 6,
        "window_reading": "anchor",
        "attention_bias": True,
    },
}


@pytest.fixture(autouse=True)
def small_and_single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several buckets and pieces of a prompt in short texts, on one thread: the matrices are tiny."""
    monkeypatch.setattr(static_speculation, "KEY_BUCKET", BUCKET)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((1, BUCKET, BUCKET + 3))]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def trained(target: Any) -> DFlashDraftModel:
    """A drafter that has seen the target's answers to PROMPTS too often, and gets most but not all of them right."""
    torch.set_num_threads(1)
    drafter = random_drafter()
    size, table_VD = drafter.config.block_size, target.get_input_embeddings().weight.detach()
    head_VD = target.get_output_embeddings().weight.detach()
    batches = []
    for prompt in PROMPTS:
        text = prompt + greedy_decode(target, prompt, max_new_tokens=NEW + size, eos_ids=())
        anchors = list(range(len(prompt), len(text) - size))
        features = extract_features(target, torch.tensor([text]), drafter.config.target_layer_ids)
        labels = torch.tensor([text[anchor + 1 : anchor + size] for anchor in anchors])
        embeddings, positions = block_inputs(drafter.config, text, anchors, table_VD)
        batches.append((features, embeddings, positions, anchors, labels))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(ROUNDS):
        for features, embeddings, positions, anchors, labels in batches:
            states = training_states(drafter, features, embeddings, positions, anchors)[:, 1:]
            loss = F.cross_entropy((states @ head_VD.T).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.requires_grad_(False)


def reference(target: Any, drafter: Any, prompt: list[int], stops: tuple[int, ...] = (), new: int = NEW) -> Decoded:
    return speculative_decode(target, drafter, prompt, max_new_tokens=new, eos_ids=stops)


def speculator(target: Any, drafter: Any, stops: tuple[int, ...] = (), **how: Any) -> StaticSpeculator:
    return StaticSpeculator(target, drafter, stops=stops, num_tokens=BUCKET + 3 + NEW, **how)


@pytest.mark.parametrize("head", HEADS)
def test_any_drafter_drafts_as_in_the_reference(target: Any, head: str) -> None:
    """Tokens and the number accepted by every call, so tau too: what is trained for is what decoding gets (anatomy 6.8,
    SpecForge#455)."""
    drafter = random_drafter(**HEADS[head])
    static = speculator(target, drafter)
    for prompt in PROMPTS:
        assert static.answer(prompt, 12) == reference(target, drafter, prompt, new=12)


def test_a_context_that_is_not_written_is_seen_in_what_is_accepted(
    target: Any, trained: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would say nothing."""
    wanted = reference(target, trained, PROMPTS[2])
    static = speculator(target, trained)
    assert static.answer(PROMPTS[2], NEW).accepted == wanted.accepted
    monkeypatch.setattr(StaticSpeculator, "_remember", lambda *arguments: None)
    got = speculator(target, trained).answer(PROMPTS[2], NEW)
    assert got.tokens == wanted.tokens and got.accepted != wanted.accepted


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_plain_and_speculative_texts_are_the_references(arch: str) -> None:
    model: Any = tiny_model(arch)
    drafter = random_drafter()
    plain, speculative = speculator(model, None), speculator(model, drafter)
    for prompt in PROMPTS:
        wanted = greedy_decode(model, prompt, max_new_tokens=12, eos_ids=())
        got = plain.answer(prompt, 12)
        assert (got.tokens, got.accepted, got.drafted) == (wanted, [0] * 11, [0] * 11)
        assert speculative.answer(prompt, 12).tokens == wanted
        assert StaticDecoder(model, (), 1, BUCKET + 15).answers([prompt], 12) == [wanted]


def test_several_tokens_a_step_are_kept_and_counted(target: Any, trained: DFlashDraftModel) -> None:
    static = speculator(target, trained)
    answers = [static.answer(prompt, NEW) for prompt in PROMPTS]
    assert answers == [reference(target, trained, prompt) for prompt in PROMPTS]
    accepted = [number for answer in answers for number in answer.accepted]
    assert {0, 1, 2, 3} == set(accepted), "runs of all lengths must be seen: train the drafter longer or shorter"
    assert min(answer.tau for answer in answers) > 1.5


@pytest.mark.parametrize("drafted", [1, 2])
def test_fewer_tokens_can_be_drafted(target: Any, trained: DFlashDraftModel, drafted: int) -> None:
    got = speculator(target, trained, drafted=drafted).answer(PROMPTS[1], NEW)
    assert got.tokens == greedy_decode(target, PROMPTS[1], max_new_tokens=NEW, eos_ids=())
    assert set(got.drafted) == {drafted} and max(got.accepted) == drafted and got.tau > 1.3


def test_an_answer_ends_at_every_length_and_at_every_token(target: Any, trained: DFlashDraftModel) -> None:
    """Inside a run of accepted drafts, after it, and with the prompt's own first token."""
    static, prompt = speculator(target, trained), PROMPTS[2]
    free = greedy_decode(target, prompt, max_new_tokens=NEW, eos_ids=())
    for new in range(1, 12):
        assert static.answer(prompt, new) == reference(target, trained, prompt, new=new)
    for token in sorted({*free[:8]}):
        got = speculator(target, trained, (EOS_ID, token)).answer(prompt, NEW)
        assert got == reference(target, trained, prompt, (EOS_ID, token))
        assert got.tokens[-1] == token and token not in got.tokens[:-1]


def test_a_step_attends_to_all_it_needs_and_to_no_more_than_the_host_must_allow_for(
    target: Any, trained: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host knows the position as it was a step ago."""
    seen: list[tuple[int, int]] = []
    step = StaticSpeculator._step

    def counted(self: StaticSpeculator, num_keys: int) -> None:
        seen.append((int(self.state.position), num_keys))
        step(self, num_keys)

    counted.__name__ = "_step"
    monkeypatch.setattr(StaticSpeculator, "_step", counted)
    speculator(target, trained).answer(PROMPTS[1], NEW)
    width = trained.config.block_size
    assert all(position + width <= num_keys < position + 2 * width + BUCKET for position, num_keys in seen)
    assert len({num_keys for _, num_keys in seen}) > 1


def test_a_short_answer_after_a_long_one_is_not_touched_by_what_that_left(target: Any, trained: Any) -> None:
    static = speculator(target, trained)
    first = static.answer(PROMPTS[0], NEW)
    assert static.answer(PROMPTS[2], NEW) == reference(target, trained, PROMPTS[2])
    assert static.answer(PROMPTS[0], NEW) == first == reference(target, trained, PROMPTS[0])


def test_after_the_warm_up_nothing_is_recorded(target: Any, trained: DFlashDraftModel) -> None:
    static, cold = speculator(target, trained), speculator(target, trained)
    static.warm_up()
    before = len(static._recordings)
    assert before == 2 * static.num_slots // BUCKET
    assert static.answer(PROMPTS[2], NEW) == cold.answer(PROMPTS[2], NEW)
    assert len(static._recordings) == before > len(cold._recordings) > 0


def test_compiled_each_function_is_compiled_once_for_all_layers_and_lengths(
    target: Any, trained: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as for a GPU, without generating code. A graph break would be an error."""
    counted: list[str] = []
    backend = static_layers.counting_backend
    monkeypatch.setattr(static_layers, "BACKEND", "aot_eager")
    monkeypatch.setattr(static_layers, "counting_backend", lambda name, note: backend(name, counted.append))
    static_layers._compiled.cache_clear()
    static = speculator(target, trained, compiled=True)
    static.warm_up()
    assert len(counted) == 11  # enter, between, leave of both models, two places, pick, context, take
    assert static.answer(PROMPTS[2], NEW) == reference(target, trained, PROMPTS[2])
    assert len(counted) == 11
    static_layers._compiled.cache_clear()


def test_what_cannot_be_decoded_is_refused_by_name(target: Any) -> None:
    drafter = random_drafter()
    sliding: Any = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(DFlashError, match="sliding_attention"):
        speculator(sliding, drafter)
    with pytest.raises(DFlashError, match="4 slots are more than the 3"):
        speculator(target, drafter, drafted=4)
    with pytest.raises(DFlashError, match=r"\[4\] are not among the target's 4 layers"):
        speculator(target, random_drafter(target_layer_ids=(1, 4), num_target_layers=5))
    static = speculator(target, drafter)
    for prompt, new in (([], 4), (prompt_of(BUCKET + 4), NEW), ([7], 0)):
        with pytest.raises(DFlashError, match=f"prompt: .*has {len(prompt)} tokens"):
            static.answer(prompt, new)
