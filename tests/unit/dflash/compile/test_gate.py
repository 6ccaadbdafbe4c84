"""The gate's guarantee, and each guard shown to matter: the same schedule without it goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor

from dflash.compile import CompileGate, CompileMiss, GateAborted, GateError
from tests.gate_tools import DEADLINE, Small, checkpointed_training_ends, new_gate, run_threads, step_of


def test_warm_up_runs_one_worker_at_a_time_and_seals_when_all_are_warm() -> None:
    gate = new_gate(3)
    bodies = [gate.compile(Small(), name=f"drafter-{i}") for i in range(3)]
    inside, most = 0, 0

    def watched(body: Callable[[Tensor], Tensor]) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            step_of(body, 3)
            time.sleep(0.02)
        finally:
            inside -= 1

    def gated(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: watched(bodies[index]))
            assert gate.sealed
            with gate.step():
                step_of(bodies[index], 3)

    assert run_threads(gated, 3) == [None] * 3
    gate.close()
    assert most == 1
    report = gate.report()
    assert (report["compiles"], report["compiles_after_warmup"], report["eager_bodies"]) == (6, 0, 0)

    plain = [torch.compile(Small(), backend="aot_eager") for _ in range(3)]
    most = 0
    run_threads(lambda index: watched(plain[index]), 3)  # on a torch with the global flag some of them raise
    assert most > 1, "the same work without the gate overlaps, so the first assertion means something"


def test_an_undeclared_length_after_the_seal_names_drafter_shape_and_guard_and_others_go_on() -> None:
    gate = new_gate(2)
    bodies = [gate.compile(Small(), name=f"drafter-{i}") for i in range(2)]
    done = []
    missed = threading.Event()

    def work(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: step_of(bodies[index], 3))
            if index == 1:
                try:
                    with gate.step(), pytest.raises(CompileMiss) as raised:
                        step_of(bodies[1], 5)
                finally:
                    missed.set()
                text = str(raised.value)
                assert "drafter-1" in text and "[5, 8]" in text and "expected 3, actual 5" in text
            else:
                assert missed.wait(DEADLINE)
            for _ in range(3):
                with gate.step():
                    step_of(bodies[index], 3)
            done.append(index)

    assert run_threads(work, 2) == [None, None]
    gate.close()
    assert sorted(done) == [0, 1]
    report = gate.report()
    assert (report["misses"], report["compiles_after_warmup"]) == (1, 0)


def test_a_backward_that_was_never_warmed_is_caught_though_the_stance_lets_it_through() -> None:
    gate = new_gate(1)
    body = gate.compile(Small(), name="drafter-0")
    with gate.worker("drafter-0"):
        gate.warm_up(lambda: body(torch.randn(3, 8, requires_grad=True)).sum().item() and None)
        with gate.step(), pytest.raises(CompileMiss, match=r"drafter-0 .*backward"):
            step_of(body, 3)
    gate.close()

    torch._dynamo.reset()
    compiled = torch.compile(Small(), backend="aot_eager")
    out = compiled(torch.randn(3, 8, requires_grad=True))
    torch.compiler.set_stance("fail_on_recompile")
    out.sum().backward()  # torch's own seal does not see it


def test_park_compiles_a_miss_with_all_others_outside_their_steps_and_counts_it() -> None:
    gate = new_gate(3, on_miss="park")
    bodies = [gate.compile(Small(), name=f"drafter-{i}") for i in range(3)]
    running: set[int] = set()
    seen: list[set[int]] = []
    original = gate._note

    def note(counters: object, direction: str) -> None:
        if gate.sealed:
            seen.append(set(running))
        original(counters, direction)  # type: ignore[arg-type]

    gate._note = note  # type: ignore[method-assign]

    def work(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: step_of(bodies[index], 3))
            for number in range(12):
                length = 5 if number == 6 and index != 2 else 3
                with gate.step():
                    if length == 3:
                        running.add(index)
                    step_of(bodies[index], length)
                    time.sleep(0.002)
                    running.discard(index)

    assert run_threads(work, 3) == [None] * 3
    gate.close()
    report = gate.report()
    assert report["misses"] == 2
    assert report["compiles_after_warmup"] == 4  # forward and backward of two drafters
    assert seen and all(not others for others in seen), "someone was inside a step while a miss compiled"


def test_two_workers_that_miss_at_once_take_turns_without_waiting_for_a_timeout() -> None:
    gate = CompileGate(workers=2, on_miss="park", backend="aot_eager", patience_seconds=30.0)
    bodies = [gate.compile(Small(), name=f"drafter-{i}") for i in range(2)]
    together = threading.Barrier(2)

    def work(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: step_of(bodies[index], 3))
            with gate.step():
                together.wait(DEADLINE)  # both are inside a step when both miss
                time.sleep(0.2 * index)
                step_of(bodies[index], 5)

    assert run_threads(work, 2) == [None, None]
    gate.close()
    report = gate.report()
    assert (report["misses"], report["compiles_after_warmup"]) == (2, 4)
    assert report["seconds_parked"] < 20.0, "a worker slept until its patience ended: nobody woke it"


def test_a_dead_worker_ends_the_waiting_ones_with_its_reason() -> None:
    gate = new_gate(3)
    bodies = [gate.compile(Small(), name=f"drafter-{i}") for i in range(3)]

    def work(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            if index == 1:
                raise ValueError("no such file")
            gate.warm_up(lambda: step_of(bodies[index], 3))

    raised = run_threads(work, 3)
    assert isinstance(raised[1], ValueError)
    for index in (0, 2):
        assert isinstance(raised[index], GateAborted)
        assert "drafter-1 failed (ValueError: no such file)" in str(raised[index])


def test_more_drafters_than_torch_keeps_for_one_code_object_all_stay_compiled() -> None:
    gate = new_gate(1)
    bodies = [gate.compile(Small(8 + i), name=f"drafter-{i}") for i in range(10)]
    inputs = [torch.randn(3, 8 + i) for i in range(10)]
    with gate.worker("all"):

        def warm() -> None:
            for body, x in zip(bodies, inputs, strict=True):
                body(x)

        gate.warm_up(warm)
        with gate.step():
            for body, x in zip(bodies, inputs, strict=True):
                body(x)
    gate.close()
    report = gate.report()
    assert report["eager_bodies"] == 0
    assert all(function["cache_entries"] == 1 for function in report["functions"])

    torch._dynamo.reset()
    eager = 0

    class Shared(Small):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal eager
            if not torch.compiler.is_dynamo_compiling():
                eager += 1
            return super().forward(x)

    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        for i in range(10):
            torch.compile(Shared(8 + i), backend="aot_eager")(torch.randn(3, 8 + i))
    assert eager > 0, "drafters that share a code object do fall back, in silence"


def test_an_eager_body_is_counted() -> None:
    gate = new_gate(1)
    body = gate.compile(Small(), name="drafter-0")
    with gate.worker("drafter-0"):
        gate.warm_up(lambda: step_of(body, 3))
        torch.compiler.set_stance("force_eager")
        with gate.step():
            step_of(body, 3)
    gate.close()
    assert gate.report()["eager_bodies"] == 1


def test_a_function_called_outside_a_step_or_by_a_stranger_is_refused() -> None:
    gate = new_gate(1)
    body = gate.compile(Small(), name="drafter-0")
    with pytest.raises(GateError, match=r"outside gate\.step"):
        body(torch.randn(3, 8))
    with pytest.raises(GateError, match="not a worker"), gate.step():
        pass
    with gate.worker("drafter-0"):
        with pytest.raises(GateError, match=r"outside gate\.step"):
            body(torch.randn(3, 8))
        with gate.step(), pytest.raises(GateError, match=r"compiles outside warm_up"):
            body(torch.randn(3, 8))
    gate.close()


def test_past_the_recompile_limit_a_gated_function_raises_instead_of_running_eagerly() -> None:
    gate = new_gate(1)
    body = gate.compile(Small(), name="drafter-0")

    def too_many() -> None:
        torch._dynamo.config.recompile_limit = 2
        for length in (2, 3, 4):
            body(torch.randn(length, 8))

    with pytest.raises(Exception, match="recompile_limit"), gate.worker("drafter-0"):
        gate.warm_up(too_many)
    assert gate.report()["eager_bodies"] == 0


def test_recomputation_in_the_backward_ends_and_compiles_nothing_after_the_warm_up() -> None:
    """On CUDA it runs on autograd's thread for the device, where a lock held by the step would never come free."""
    report = checkpointed_training_ends("cpu", "aot_eager")
    assert (report["compiles_after_warmup"], report["eager_bodies"]) == (0, 0)
