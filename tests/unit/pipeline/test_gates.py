"""Each gate on made-up numbers: what passes, what fails. The proofs that need models are in test_proofs.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from env.installed import Finding
from pipeline.gates import (
    Gate,
    environment_equals_lock,
    loss_fell,
    memory_flat,
    no_compiles_after_warmup,
    no_eager_bodies,
    replicas_equal,
    throughput_held,
)
from pipeline.verify import tau_gates

MANIFEST: dict[str, Any] = {
    "steps": 40,
    "workers": ["drafter-0 on cpu (sdpa)", "drafter-1 on cpu (sdpa)"],
    "replicas_equal": True,
    "compiles_after_warmup": 0,
    "eager_bodies": 0,
    "sessions": [
        {"warmup_seconds": 1.5, "gate": {"compiles": 4}},
        {"warmup_seconds": 2.0, "gate": {"compiles": 4}},
    ],
}


def _metrics(name: str, values: list[float]) -> list[dict[str, Any]]:
    return [{"step": i + 1, name: value} for i, value in enumerate(values)]


def test_a_gate_is_recorded_with_its_verdict() -> None:
    record = Gate("tau", 1.25, ">= 1.15", True, "why").record()
    assert record == {"name": "tau", "value": 1.25, "limit": ">= 1.15", "detail": "why", "verdict": "pass"}
    assert Gate("tau", 1.0, ">= 1.15", False).record()["verdict"] == "fail"
    assert json.loads(json.dumps(record)) == record


def test_one_difference_from_the_lock_fails_and_is_named_while_a_warning_is_none() -> None:
    warning = Finding(level="warning", what="is not in the lock", where="tqdm==1", fix="Remove it.")
    error = Finding(level="error", what="version 1 is installed, the lock says 2", where="torch", fix="Make it anew.")
    assert environment_equals_lock([]).holds
    assert environment_equals_lock([warning]).holds
    gate = environment_equals_lock([warning, error])
    assert (gate.holds, gate.value) == (False, 1)
    assert "torch: version 1 is installed" in gate.detail
    assert "tqdm" not in gate.detail


def test_one_compile_after_the_warm_up_fails() -> None:
    gate = no_compiles_after_warmup(MANIFEST)
    assert (gate.holds, gate.value) == (True, 0)
    assert gate.detail == "8 graphs traced or loaded in 3.5 s of warm-up"
    assert not no_compiles_after_warmup({**MANIFEST, "compiles_after_warmup": 1}).holds


def test_one_eager_body_fails() -> None:
    assert no_eager_bodies(MANIFEST).holds
    gate = no_eager_bodies({**MANIFEST, "eager_bodies": 3})
    assert (gate.holds, gate.value) == (False, 3)


def test_replicas_that_ended_different_fail() -> None:
    assert replicas_equal(MANIFEST).holds
    gate = replicas_equal({**MANIFEST, "replicas_equal": False})
    assert (gate.holds, gate.value) == (False, "different")


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        ([5.0 - 0.1 * i for i in range(20)], True),
        ([5.0] * 20, False),
        ([4.0] * 18 + [4.5] * 2, False),
        ([5.0, 4.0], True),
        ([5.0], False),
        ([5.0, math.nan, 4.0], False),
        ([5.0] + [4.0] * 18 + [math.nan], False),
        ([math.inf] + [4.0] * 19, False),
    ],
)
def test_the_loss_must_be_finite_everywhere_and_lower_at_the_end(losses: list[float], holds: bool) -> None:
    assert loss_fell(_metrics("loss", losses)).holds is holds


def test_the_loss_gate_compares_the_first_and_the_last_tenth() -> None:
    gate = loss_fell(_metrics("loss", [10.0, 8.0, *[1.0] * 16, 2.0, 4.0]))
    assert gate.detail == "9.000 -> 3.000 over 20 records"
    assert gate.value == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.parametrize(
    ("resident", "holds"),
    [
        ([100] * 40, True),
        ([50] * 5 + [100] * 35, True),  # the shards' pages are read early
        ([100 + i for i in range(40)], False),
        ([100] * 30 + [106] * 10, False),
        ([100] * 30 + [104] * 10, True),
        ([100], True),
    ],
)
def test_the_resident_set_must_not_grow_over_the_run(resident: list[int], holds: bool) -> None:
    assert memory_flat(_metrics("resident_bytes", [r << 20 for r in resident])).holds is holds


@pytest.mark.parametrize(
    ("reserved", "allocated", "retries", "holds"),
    [
        ([1, 2] + [4] * 8, [1000] * 10, [0] * 10, True),
        ([4] * 9 + [5], [1000] * 10, [0] * 10, False),
        ([4] * 10, [1000] * 10, [0] * 9 + [1], False),
        ([4] * 10, [1000] * 10, [2] * 10, True),  # before the second half
        ([4] * 10, [500] * 5 + [1000, 1009] * 2 + [1000], [0] * 10, True),  # up and down
        ([4] * 10, [1000 + 10 * i for i in range(10)], [0] * 10, False),  # a leak inside what is reserved
    ],
)
def test_on_cuda_memory_must_stay_and_the_allocator_not_retry(
    reserved: list[int], allocated: list[int], retries: list[int], holds: bool
) -> None:
    metrics = [
        {"reserved_bytes": r << 30, "allocated_bytes": a << 20, "allocator_retries": n}
        for r, a, n in zip(reserved, allocated, retries, strict=True)
    ]
    assert memory_flat(metrics).holds is holds


def test_throughput_is_compared_with_the_runs_own_beginning() -> None:
    steady = _metrics("tokens_per_second", [5.0] + [100.0] * 29)
    assert throughput_held(steady, 0.9).holds  # the first record, still warming up, does not count
    sinking = _metrics("tokens_per_second", [100.0] * 15 + [40.0] * 15)
    gate = throughput_held(sinking, 0.5)
    assert (gate.holds, gate.value) == (False, 0.4)
    assert throughput_held(sinking, 0.4).holds
    assert throughput_held(_metrics("tokens_per_second", [7.0]), 1.0).holds


def _tau(**changes: Any) -> dict[str, Any]:
    one = {"decoded": 1.4, "chained": 1.4, "untrained": 1.1, "tokens": 100, "calls": 70}
    return {"held_out": {**one, **changes.get("held_out", {})}, "out_of_domain": {**one, **changes.get("outside", {})}}


@pytest.mark.parametrize(
    ("changes", "limits", "failed"),
    [
        ({}, (1.15, 0.15, 0.0), []),
        ({}, (1.5, 0.15, 0.0), ["tau in domain"]),
        ({}, (1.15, 0.31, 0.0), ["tau in domain"]),
        ({}, (1.15, 0.15, 0.31), ["tau out of domain"]),
        ({"outside": {"untrained": 1.5}}, (1.15, 0.15, 0.0), ["tau out of domain"]),
        ({"held_out": {"chained": 1.38}}, (1.15, 0.15, 0.0), ["chained tau equals decoded"]),
        ({"outside": {"chained": 1.42}}, (1.15, 0.15, 0.0), ["chained tau equals decoded"]),
        ({"held_out": {"decoded": math.nan}}, (1.15, 0.15, 0.0), ["tau in domain", "chained tau equals decoded"]),
    ],
)
def test_tau_must_reach_its_minimum_and_its_gain_and_agree_with_the_chained_one(
    changes: dict[str, Any], limits: tuple[float, float, float], failed: list[str]
) -> None:
    gates = tau_gates(_tau(**changes), *limits)
    assert [gate.name for gate in gates] == ["tau in domain", "tau out of domain", "chained tau equals decoded"]
    assert [gate.name for gate in gates if not gate.holds] == failed
