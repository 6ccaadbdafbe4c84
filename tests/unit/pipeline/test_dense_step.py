"""The compiled step equals the dense one, and differs when its mask leaks or a gradient is too large."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import replica
from pipeline.batches import StepBatch
from pipeline.cache import CachedData
from pipeline.dense_step import _of_every_bucket, compiled_equals_dense, relative_difference, times
from pipeline.targets import TargetFolder
from tests.drafters import drafter_config, leaky_masks, random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model()


def test_a_difference_that_is_no_number_is_infinite() -> None:
    a = torch.tensor([1.0, 2.0])
    assert relative_difference(a, a) == 0
    assert relative_difference(a, torch.tensor([1.0, 4.0])) == 0.5
    assert relative_difference(torch.tensor([1.0, float("nan")]), a) == float("inf")


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
        monkeypatch.setattr(replica, "layer_masks", leaky_masks)
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
