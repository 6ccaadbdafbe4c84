"""Faults that users of other trainers reported, where they would show in a run's data, steps and resume.

Each test names the report in its docstring. Reports about one module only are cited in that module's own tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.acceptance import draft_text, estimate_tau
from dflash.taps import extract_features
from pipeline.batches import Collator
from pipeline.checkpoints import check_contract
from pipeline.data import data_key, prompt_len
from pipeline.errors import ConfigError
from pipeline.rendering import make_sample, render_prompt
from pipeline.replica import Borrowed, Replica, warm_batches
from pipeline.sessions import contract_of
from tests.drafters import drafter_config, random_drafter
from tests.tiny import CHATML, EOS_ID, tiny_model, tiny_tokenizer
from tests.tiny_run import made_up_samples, tiny_config

CPU = torch.device("cpu")
QUESTION = [{"role": "user", "content": "How many?"}]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On tiny matrices several threads cost more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Uncompiled:
    """A gate that leaves functions as they are: these tests look at a step's operations, not at its compilation."""

    def compile(self, function: Any, *, name: str) -> Any:
        return function


def _replica(train: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **drafter: Any) -> Replica:
    config = tiny_config(data={"buckets": [64]} | (data or {}), train=train or {})
    model = random_drafter(**drafter)
    borrowed = Borrowed.of(tiny_model(), CPU, torch.float32)
    return Replica("one", config, model.config, model, borrowed, CPU, cast(Any, _Uncompiled()))


THINKING = {
    "on": CHATML.replace("assistant\n", "assistant\n<think>\n"),
    "off": CHATML.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
}
"""What templates of models with a thinking mode write before the answer in each."""


def test_what_a_template_writes_of_thinking_is_never_supervised_and_each_mode_has_data_of_its_own() -> None:
    """Anatomy 6.1, z-lab/dflash#60: 9.5 tokens a call with thinking on, 2.7 with it off."""
    tokenizer, answer = tiny_tokenizer(), [70, 80, EOS_ID]
    supervised, keys = {}, set()
    for mode, template in THINKING.items():
        tokenizer.chat_template = template
        prompt = render_prompt(tokenizer, QUESTION)
        assert str(tokenizer.decode(prompt)).endswith("</think>\n\n" if mode == "off" else "<think>\n")
        sample = make_sample(mode, prompt, answer)
        supervised[mode] = [t for t, mine in zip(sample.input_ids, sample.loss_mask, strict=True) if mine]
        keys.add(data_key({"prompts": {"train": [["same id", prompt]]}}))
    assert supervised["on"] == supervised["off"] == answer
    assert len(keys) == 2, "answers of one mode would be taken for the other's"


def test_the_ids_that_are_trained_on_are_those_that_are_served() -> None:
    """Anatomy 6.28, Model-Optimizer#1211: the template of training was a simplified one."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING["off"]
    answer = tokenizer.encode("Seven", add_special_tokens=False)
    sample = make_sample("a", render_prompt(tokenizer, QUESTION), [*answer, EOS_ID])
    served: Any = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert sample.input_ids[: prompt_len(sample)] == served
    tokenizer.chat_template = CHATML  # the template that somebody made simpler
    assert render_prompt(tokenizer, QUESTION) != served


class _NoHostSync(TorchDispatchMode):
    """Raises where a GPU would have to answer before the host goes on, also on a machine that has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        picks_by_bool = any(index is not None and index.dtype == torch.bool for index in given)
        if picks_by_bool or name.startswith(("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")):
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("samples_per_row", [1, 3])
@pytest.mark.parametrize("soft_weight", [0.0, 0.5])
def test_a_whole_step_asks_the_device_for_nothing(
    monkeypatch: pytest.MonkeyPatch, soft_weight: float, samples_per_row: int
) -> None:
    """Anatomy 6.14, SpecForge#715: masks, forward, loss, backward and what the optimizer does to the gradients.

    torch's own AdamW is left out: it keeps its step counters on the host, where reading one waits for nothing.
    """
    layers = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "is_causal": None}
    train = {"soft_weight": soft_weight, "micro_batch": 2, "batch_size": 2}
    replica = _replica(train, {"samples_per_row": samples_per_row}, **layers)
    samples = made_up_samples(6)
    batch = Collator(replica.config, replica.drafter, samples).collate(0, 64, (0, 1))
    width = replica.drafter.feature_size + (64 if soft_weight else 0)
    features = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(replica.optimizer._adamw, "step", lambda: None)

    def step() -> Tensor:
        with _NoHostSync():
            sums = replica.forward_backward(batch, features)
            return replica.optimizer.step(1e-3, sums[1])

    assert step().isfinite()
    states = replica.states
    monkeypatch.setattr(replica, "states", lambda *given: states(*given) * float(bool(given[1].any().item())))
    with pytest.raises(RuntimeError, match="_local_scalar_dense waits for the device"):
        step()


def test_a_micro_batch_without_samples_adds_nothing_and_is_a_step_like_any_other() -> None:
    """Anatomy 6.22, Automodel#2468: a rank without anchors left the step, and the others waited for it."""
    replica = _replica({"micro_batch": 2, "batch_size": 4})
    collator = Collator(replica.config, replica.drafter, made_up_samples(3))
    features = torch.randn(2, 64, replica.drafter.feature_size, generator=torch.Generator().manual_seed(0))
    full, empty = collator.collate(0, 64, (0, 1)), collator.collate(0, 64, ())
    sums = replica.forward_backward(full, features)
    before = [gradient.clone() for gradient in replica.optimizer.gradients]
    assert sums[1] > 0 and any(gradient.any() for gradient in before)
    nothing = replica.forward_backward(empty, features)
    assert not nothing.any() and nothing.shape == sums.shape
    assert (nothing[0] / nothing[1]).isnan(), "dividing before the sums are added would end the run here"
    assert all(torch.equal(a, b) for a, b in zip(before, replica.optimizer.gradients, strict=True))


@pytest.mark.parametrize("answer_len", [0, 1, 2, 3])
def test_measuring_on_texts_shorter_than_a_block_is_no_error(answer_len: int) -> None:
    """Anatomy 6.22, Automodel#2476: an evaluation ended at the first short row."""
    target, drafter = tiny_model(), random_drafter(block_size=16)
    table, prompt = target.get_input_embeddings().weight, [9]
    short = [*prompt, *range(50, 50 + answer_len)]
    longer = [*prompt, *range(50, 59)]
    drafts = []
    for text in (short, longer):
        features = extract_features(target, torch.tensor([text]), (1, 3))
        drafts.append(draft_text(drafter, features, text, 1, table, table))
    assert len(drafts[0].hits_Nk) == max(0, answer_len - 1)
    alone, beside = estimate_tau(drafts[1:]), estimate_tau(drafts)
    assert beside.chained >= 1.0
    if answer_len < 2:
        assert beside == alone, "a text without an anchor must not count"


def test_every_training_batch_has_the_shapes_of_the_batch_that_warms_up() -> None:
    """Anatomy 6.18, speculators#979: memory ran out part-way through an epoch, at a batch larger than any before."""
    for per_row in (1, 3):
        config = tiny_config(data={"buckets": [64], "samples_per_row": per_row}, train={"num_anchors": 40})
        drafter = drafter_config()
        warm = warm_batches(config, drafter, 64)[0]
        collator = Collator(config, drafter, made_up_samples(8))
        names = ("tokens_bS", "positions_bS", "noise_bQ", "anchors_bN", "positions_bQ")
        for indices in ((0, 1), (2,), ()):
            batch = collator.collate(3, 64, indices)
            for name in names:
                assert getattr(batch, name).shape == getattr(warm, name).shape, name
            assert (batch.starts_bN is None) == (warm.starts_bN is None) == (per_row == 1)
            assert batch.rows.block_size == warm.rows.block_size


def _contract(**changes: Any) -> dict[str, Any]:
    """Return what a training of these settings asks of a checkpoint it goes on from."""
    data = SimpleNamespace(
        drafter=drafter_config(**changes), target=SimpleNamespace(identity="target"), answers_key="answers"
    )
    return contract_of(tiny_config(), cast(Any, data))


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_token_id": 4},
        {"target_layer_ids": (0, 3)},
        {"target_layer_ids": (3, 1)},
        {"rope_theta": 1e6},
        {"block_size": 5},
        {"is_causal": True},
        {"input_embedding_scale": 2.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_resume_with_another_drafter_than_was_trained_is_refused(changes: dict[str, Any]) -> None:
    """Anatomy 6.23, Automodel#2824: a changed mask token went on as if nothing were wrong."""
    found = _contract()
    check_contract(found, _contract(), "step-000010")
    with pytest.raises(ConfigError, match=rf"drafter\..*{next(iter(changes)).removeprefix('is_')} was"):
        check_contract(found, _contract(**changes), "step-000010")
