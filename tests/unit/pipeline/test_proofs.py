"""The proofs hold on an honest drafter, and fail when the thing that they prove is broken."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.acceptance import layer_masks
from dflash.checkpoint import save_drafter
from dflash.model import DFlashDraftModel
from pipeline import proofs, replica
from pipeline.batches import StepBatch
from pipeline.cache import CachedData
from pipeline.proofs import (
    DecodedSet,
    _of_every_bucket,
    chained_tau,
    compiled_equals_dense,
    decode_set,
    export_equals_training,
    lossless,
    relative_difference,
    times,
    train_equals_decode,
)
from pipeline.targets import TargetFolder
from tests.drafters import drafter_config, random_drafter
from tests.tiny import EOS_ID, tiny_model
from tests.tiny_run import made_up_samples, tiny_config


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def drafter() -> DFlashDraftModel:
    return random_drafter()


@pytest.fixture(scope="module")
def decoded(target: Any, drafter: DFlashDraftModel) -> DecodedSet:
    done = []
    prompts = [replace(s, loss_mask=[False] * len(s.input_ids)) for s in made_up_samples(3, answer_len=0)]
    found = decode_set(
        "held_out", target, drafter, prompts, max_new_tokens=14, eos_ids={EOS_ID}, advance=lambda: done.append(1)
    )
    assert len(done) == 3
    return found


def test_prompts_decoded_at_once_give_what_each_gives_alone(
    decoded: DecodedSet, target: Any, drafter: DFlashDraftModel
) -> None:
    prompts = [replace(s, loss_mask=[False] * len(s.input_ids)) for s in made_up_samples(3, answer_len=0)]
    limits: Any = {"max_new_tokens": 14, "eos_ids": {EOS_ID}, "advance": lambda: None}
    for at_once in (2, 3):
        found = decode_set("held_out", target, drafter, prompts, **limits, at_once=at_once)
        assert (found.prompts, found.plain) == (decoded.prompts, decoded.plain)
        assert [d.tokens for d in found.speculative] == [d.tokens for d in decoded.speculative]
        assert [d.accepted for d in found.speculative] == [d.accepted for d in decoded.speculative]
        assert lossless([found]).holds


def _leaky_masks(
    model: Any,
    anchors_bN: Tensor,
    context_len: int,
    implementation: str,
    starts_bN: Tensor | None = None,
    *,
    apart: bool = False,
) -> list[Any]:
    """The mistake that a mask can make most easily: the context reaches up to the anchor itself."""
    return layer_masks(model, anchors_bN + 1, context_len, implementation, starts_bN, apart=apart)


def test_a_difference_that_is_no_number_is_infinite() -> None:
    a = torch.tensor([1.0, 2.0])
    assert relative_difference(a, a) == 0
    assert relative_difference(a, torch.tensor([1.0, 4.0])) == 0.5
    assert relative_difference(torch.tensor([1.0, float("nan")]), a) == float("inf")


def test_speculative_decoding_is_lossless_and_a_single_other_token_is_found(decoded: DecodedSet) -> None:
    assert sum(len(p) for p in decoded.plain) > 30
    assert lossless([decoded]).holds
    tokens = list(decoded.plain[1])
    tokens[5] += 1
    wrong = replace(decoded, plain=[decoded.plain[0], tokens, decoded.plain[2]])
    gate = lossless([decoded, wrong])
    assert (gate.holds, gate.value) == (False, 1)
    assert gate.detail == "first difference: held_out prompt 1, token 5"
    short = replace(decoded, plain=[decoded.plain[0][:-1], *decoded.plain[1:]])
    assert lossless([short]).detail.endswith(f"prompt 0, token {len(decoded.plain[0]) - 1}")


def test_training_sees_what_decoding_sees_unless_the_mask_leaks(
    decoded: DecodedSet, drafter: DFlashDraftModel, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = train_equals_decode(decoded, drafter, target)
    assert gate.holds
    assert int(gate.detail.split()[2]) > 10  # anchors
    monkeypatch.setattr(proofs, "layer_masks", _leaky_masks)
    assert not train_equals_decode(decoded, drafter, target).holds


def test_texts_without_an_anchor_prove_nothing(decoded: DecodedSet, drafter: DFlashDraftModel, target: Any) -> None:
    empty = replace(decoded, plain=[p[:1] for p in decoded.plain])
    assert not train_equals_decode(empty, drafter, target).holds


def test_the_chained_tau_is_that_of_decoding(decoded: DecodedSet, drafter: DFlashDraftModel, target: Any) -> None:
    assert chained_tau(decoded, drafter, target) == pytest.approx(decoded.tau, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_equals_the_weights_it_was_made_from_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: p.detach() for name, p in random_drafter().named_parameters()}
    save_drafter(tmp_path / "drafter", drafter_config(), weights, dtype)
    assert export_equals_training(tmp_path / "drafter", weights, dtype).holds
    changed = {**weights, "fc.weight": weights["fc.weight"] * 1.01}
    gate = export_equals_training(tmp_path / "drafter", changed, dtype)
    assert (gate.holds, gate.value) == (False, "1 tensors differ")


def test_an_export_with_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    weights = {name: p.detach() for name, p in random_drafter().named_parameters()}
    save_drafter(tmp_path / "drafter", drafter_config(), weights, torch.float32)
    file = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.zeros(2, 2)}, file)
    gate = export_equals_training(tmp_path / "drafter", weights, torch.float32)
    assert (gate.holds, gate.value) == (False, "refused")
    assert "lm_head.weight" in gate.detail


STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (train, data, drafter)
    "two buckets, dpace": ({"loss": "dpace"}, {"buckets": [18, 64], "max_prompt_tokens": 2}, {}),
    "DFlash 2, packed": ({"soft_weight": 0.3}, {"samples_per_row": 3}, {"conv_kernel_size": 2, "selector_rank": 8}),
    "Markov bias, dpace": ({"loss": "dpace"}, {}, {"markov_rank": 8}),
    "packed, soft labels": ({"soft_weight": 0.7}, {"samples_per_row": 3}, {}),
    "multiplier and softcap, mixed layers": (
        {"soft_weight": 1.0, "loss": "dpace"},
        {},
        {
            "output_multiplier": 1.7,
            "final_logit_softcapping": 20.0,
            "input_embedding_scale": 3.0,
            "layer_types": ("sliding_attention", "full_attention"),
            "sliding_window": 5,
            "is_causal": None,
        },
    ),
}


LEAKING = ("two buckets, dpace", "packed, soft labels")
"""Rows of one text and of several, hard and soft labels."""


@pytest.mark.parametrize("name", STEPS)
def test_the_compiled_step_is_the_plain_one_unless_its_mask_leaks(
    target: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    train, data_changes, changes = STEPS[name]
    config = tiny_config(
        train={"batch_size": 2, "micro_batch": 2, "num_anchors": 4, **train},
        data={"buckets": [64], "features": "online", **data_changes},
    )
    data = CachedData(
        target=TargetFolder(path=Path("unused"), identity="", name=""),
        drafter=drafter_config(**changes),
        samples=made_up_samples(8),
        features=None,
        answers_key="",
        prompts={},
    )
    cpu = torch.device("cpu")
    gate = compiled_equals_dense(config, data, target, random_drafter(**changes), cpu)
    assert gate.holds
    count = len(config.data.buckets)
    assert f"{count} of {count} buckets" in gate.detail
    if name in LEAKING:
        monkeypatch.setattr(replica, "layer_masks", _leaky_masks)
        assert not compiled_equals_dense(config, data, target, random_drafter(**changes), cpu).holds


@pytest.mark.parametrize("too_large", [1.0, 1.15])
def test_in_bf16_rounding_is_told_from_a_gradient_that_is_a_seventh_too_large(
    target: Any, monkeypatch: pytest.MonkeyPatch, too_large: float
) -> None:
    right = replica.head_loss

    def scaled(*given: Any, **more: Any) -> Any:
        sums = right(*given, **more)
        return replace(sums, numerator=sums.numerator * too_large)

    monkeypatch.setattr(replica, "head_loss", scaled)
    train = {"batch_size": 2, "micro_batch": 2, "num_anchors": 4, "precision": "bf16", "loss": "dpace"}
    config = tiny_config(train=train, data={"buckets": [64], "features": "online"})
    data = CachedData(
        target=TargetFolder(path=Path("unused"), identity="", name=""),
        drafter=drafter_config(),
        samples=made_up_samples(16),
        features=None,
        answers_key="",
        prompts={},
    )
    gate = compiled_equals_dense(config, data, target, random_drafter(dtype=torch.bfloat16), torch.device("cpu"))
    assert gate.holds == (too_large == 1.0), gate.value
    assert "4 micro-batches, 1 of 1 buckets" in gate.detail


@pytest.mark.parametrize(
    ("error", "cost", "size", "expected"),
    [(9.0, 1.0, 0.0, 3.0), (4.0, 0.0, 4e6, 1.0), (0.0, 0.0, 0.0, 0.0), (1.0, inf, 1.0, inf), (nan, 1.0, 1.0, inf)],
)
def test_an_error_is_counted_in_what_rounding_costs(error: float, cost: float, size: float, expected: float) -> None:
    assert times(error, cost, size) == pytest.approx(expected)


def test_the_compared_batches_have_every_bucket_and_then_the_longest() -> None:
    steps = [StepBatch(0, bucket, (i,)) for i, bucket in enumerate([8, 64, 8, 64, 64, 16])]
    chosen = _of_every_bucket(steps, 4)
    assert [(s.bucket, s.indices[0]) for s in chosen] == [(16, 5), (64, 1), (8, 0), (64, 3)]
    assert len(_of_every_bucket(steps, 1)) == 3
