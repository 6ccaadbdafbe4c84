"""Each gate on made-up numbers: what passes, what fails. Those that need models: test_proofs.py, test_dense_step.py."""

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
    assert memory_flat(_metrics("resident_bytes", [r << 20 for r in resident]), ONE_SESSION).holds is holds


ONE_SESSION = [{"from_step": 0, "to_step": 40}]
TWO_SESSIONS = [{"from_step": 0, "to_step": 20}, {"from_step": 20, "to_step": 40}]


def _on_gpu(allocated: list[int], reserved: list[int], retries: list[int]) -> list[dict[str, Any]]:
    return [
        {"step": i + 1, "allocated_bytes": a, "reserved_bytes": r << 30, "allocator_retries": n}
        for i, (a, r, n) in enumerate(zip(allocated, reserved, retries, strict=True))
    ]


CONSTANT, NEVER = [1000] * 40, [0] * 40


@pytest.mark.parametrize(
    ("allocated", "reserved", "retries", "sessions", "holds"),
    [
        (CONSTANT, [4] * 40, NEVER, ONE_SESSION, True),
        ([1, 2, 3, 900, *CONSTANT[4:]], [1, 2, 3, 3, *[4] * 36], NEVER, ONE_SESSION, True),  # 40 // 10 steps to settle
        ([*CONSTANT[:4], 1512, *CONSTANT[5:]], [4] * 40, NEVER, ONE_SESSION, False),
        ([*CONSTANT[:39], 1001], [4] * 40, NEVER, ONE_SESSION, False),  # one byte that is not let go
        ([*CONSTANT[:39], 999], [4] * 40, NEVER, ONE_SESSION, False),
        ([1000 + i for i in range(40)], [4] * 40, NEVER, ONE_SESSION, False),  # a leak inside what is reserved
        (CONSTANT, [*[4] * 39, 5], NEVER, ONE_SESSION, False),
        (CONSTANT, [*[4] * 5, *[5] * 35], NEVER, ONE_SESSION, False),
        (CONSTANT, [4] * 40, [*[0] * 39, 1], ONE_SESSION, False),
        (CONSTANT, [4] * 40, [2] * 40, ONE_SESSION, True),  # in the warm-up
        ([*[1000] * 20, *[900] * 20], [*[4] * 20, *[3] * 20], [*[1] * 20, *[0] * 20], TWO_SESSIONS, True),
        ([*[1000] * 20, *[900] * 20], [4] * 40, NEVER, ONE_SESSION, False),  # the same in one process
        ([*[1000] * 20, 1, 2, 3, *[900] * 17], [4] * 40, NEVER, TWO_SESSIONS, True),  # each settles anew
        ([*[1000] * 20, *[900] * 3, *[901] * 16, 902], [4] * 40, NEVER, TWO_SESSIONS, False),
    ],
)
def test_on_cuda_a_sessions_memory_is_constant_to_the_byte_once_it_has_settled(
    allocated: list[int],
    reserved: list[int],
    retries: list[int],
    sessions: list[dict[str, int]],
    holds: bool,
) -> None:
    assert memory_flat(_on_gpu(allocated, reserved, retries), sessions).holds is holds


def test_evaluation_and_checkpoint_lines_are_held_to_the_same_bytes() -> None:
    metrics = _on_gpu(CONSTANT, [4] * 40, NEVER)
    metrics[19] |= {"tau": {"chained": 2.0}, "allocated_bytes": 1001}
    gate = memory_flat(metrics, ONE_SESSION)
    assert (gate.holds, gate.value) == (False, "1 allocated, 0 reserved")
    assert gate.detail == "0.00 GiB allocated, 4.00 GiB reserved, 0 retries over 36 records"


def test_each_gpu_is_held_to_it_and_the_worst_is_named() -> None:
    """What one takes and another lets go in the same step leaves the sums as they were."""
    names = ("cuda:0", "cuda:1 of b")

    def line(step: int, first: int, second: int) -> dict[str, Any]:
        of = {name: _on_gpu([bytes_], [4], [0])[0] for name, bytes_ in zip(names, (first, second), strict=True)}
        return {**_on_gpu([first + second], [8], [0])[0], "gpus": of, "step": step}

    constant = [line(step, 1000, 2000) for step in range(1, 41)]
    gate = memory_flat(constant, ONE_SESSION)
    assert gate.holds and gate.value == "0 allocated, 0 reserved" and "8.00 GiB reserved on 2 GPUs" in gate.detail

    moved = [*constant[:39], line(40, 1512, 1488)]
    assert {m["allocated_bytes"] for m in moved} == {3000}
    gate = memory_flat(moved, ONE_SESSION)
    assert not gate.holds and gate.value == "512 allocated, 0 reserved on cuda:0"
    assert memory_flat([{k: v for k, v in m.items() if k != "gpus"} for m in moved], ONE_SESSION).holds, (
        "lines of before"
    )
    assert memory_flat([*moved[:39], {**moved[39], "gpus": {}}], ONE_SESSION).holds


def test_sparse_lines_and_short_sessions_are_judged_by_what_there_is() -> None:
    lines = _on_gpu(CONSTANT, [4] * 40, NEVER)[9::10]
    assert memory_flat(lines, ONE_SESSION).holds
    assert memory_flat(lines, [{"from_step": 0, "to_step": 38}, {"from_step": 38, "to_step": 40}]).holds
    assert not memory_flat(lines, [{"from_step": 50, "to_step": 60}]).holds, "no line was compared"


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
