"""The gate's guarantee, and each guard shown to matter: the same schedule without it goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx._symbolic_trace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dflash.compile import CompileGate, CompileMiss, GateAborted, GateError
from dflash.compile.settings import SETTINGS, shim_missing_gpu

DEADLINE = 60.0
FLAG_IS_GLOBAL = hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
"""True up to torch 2.13; from 2.14 the flag is thread-local (pytorch#168999)."""


class Small(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    before = {name: getattr(torch._dynamo.config, name) for name in SETTINGS}
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)
    torch._dynamo.reset()


def new_gate(workers: int, on_miss: str = "raise") -> CompileGate:
    return CompileGate(workers=workers, on_miss=on_miss, backend="aot_eager")


def run_threads(work: Callable[[int], None], count: int) -> list[BaseException | None]:
    """Run work(0..count-1) in threads; return what each raised. Fails the test if one hangs."""
    raised: list[BaseException | None] = [None] * count

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return raised


def step_of(body: Callable[[Tensor], Tensor], length: int) -> None:
    body(torch.randn(length, 8, requires_grad=True)).sum().backward()


def test_warm_up_runs_one_worker_at_a_time_and_seals_when_all_are_warm() -> None:
    gate = new_gate(3)
    bodies = [gate.compile(Small(), name=f"drafter-{i}") for i in range(3)]
    inside, most = 0, 0

    def watched(index: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        step_of(bodies[index], 3)
        time.sleep(0.02)
        inside -= 1

    def gated(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: watched(index))
            assert gate.sealed
            with gate.step():
                step_of(bodies[index], 3)

    assert run_threads(gated, 3) == [None] * 3
    gate.close()
    assert most == 1
    report = gate.report()
    assert (report["compiles"], report["compiles_after_warmup"], report["eager_bodies"]) == (6, 0, 0)

    def ungated(index: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.1)
        inside -= 1

    most = 0
    run_threads(ungated, 3)
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


def hold_a_trace() -> tuple[threading.Thread, threading.Event, threading.Event]:
    """Start a thread outside the gate that stays inside an FX trace until it is released."""
    inside, release = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        inside.set()
        release.wait(DEADLINE)
        return x + 1

    thread = threading.Thread(target=lambda: make_fx(slow)(torch.ones(2)), daemon=True)
    thread.start()
    assert inside.wait(DEADLINE)
    return thread, inside, release


@pytest.mark.parametrize("protected", [True, False])
def test_a_warm_call_survives_a_trace_in_a_thread_outside_the_gate(protected: bool) -> None:
    """pytorch#126024: the process-wide flag makes a cached call raise; with the switch off it does so here too."""
    gate = new_gate(1)
    body = gate.compile(Small(), name="drafter-0")
    with gate.worker("drafter-0"):
        gate.warm_up(lambda: step_of(body, 3))
        torch._dynamo.config.force_compile_during_fx_trace = protected
        thread, _, release = hold_a_trace()
        try:
            with gate.step():
                if protected or not FLAG_IS_GLOBAL:
                    step_of(body, 3)
                else:
                    with pytest.raises(RuntimeError, match="symbolically trace"):
                        step_of(body, 3)
        finally:
            release.set()
            thread.join(DEADLINE)
    gate.close()
    report = gate.report()
    assert (report["eager_bodies"], report["compiles_after_warmup"]) == (0, 0)


@pytest.mark.parametrize("gated", [True, False])
def test_a_first_call_beside_a_trace_waits_and_is_compiled(gated: bool) -> None:
    """Without the gate it raises, on a torch whose flag is global; behind it the trace ends first."""
    eager: list[int] = []
    order: list[str] = []
    inside = threading.Event()
    gate = new_gate(2)
    module = Small()

    def probed(x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            eager.append(1)
        return module(x)

    body = gate.compile(probed, name="caller") if gated else torch.compile(probed, backend="aot_eager")

    def slow(x: Tensor) -> Tensor:
        inside.set()
        time.sleep(0.5)
        return x + 1

    def trace() -> None:
        make_fx(slow)(torch.ones(2))
        order.append("trace ended")

    def call() -> None:
        body(torch.randn(3, 8))
        order.append("called")

    def work(index: int) -> None:
        if index == 1:
            assert inside.wait(DEADLINE)
        action = trace if index == 0 else call
        if not gated:
            return action()
        with gate.worker(f"w{index}"):
            gate.warm_up(action)

    if not gated:  # what the gate sets for all of torch would hide the fault
        torch._dynamo.config.force_compile_during_fx_trace = False
    raised = run_threads(work, 2)
    if gated:
        gate.close()
        assert raised == [None, None] and order == ["trace ended", "called"] and not eager
    elif FLAG_IS_GLOBAL:
        assert "symbolically trace" in str(raised[1])


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for a CUDA build without a GPU")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a CPU build of torch has no guard to swap")
def test_torch_looks_the_guard_swap_up_where_the_shim_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-test of the one patch: if torch stopped calling it by this name, the shim would do nothing, in silence."""
    calls = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: calls.append(1))
    with FakeTensorMode():
        pass
    assert calls
    replaced = torch._C._ensureCUDADeviceGuardSet
    assert shim_missing_gpu()
    assert torch._C._ensureCUDADeviceGuardSet is not replaced
    count = len(calls)
    with FakeTensorMode():
        pass
    assert len(calls) == count, "torch still reached what the shim is there to avoid"


def checkpointed_training_ends(device: str, backend: str) -> dict[str, Any]:
    """Train two drafters whose bodies recompute in the backward, in threads; return the gate's report."""
    gate = CompileGate(workers=2, backend=backend)

    def body_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(module, x, use_reentrant=False)

    bodies = [gate.compile(body_of(Small().to(device)), name=f"drafter-{i}") for i in range(2)]

    def step(index: int, length: int) -> None:
        bodies[index](torch.randn(length, 8, device=device, requires_grad=True)).sum().backward()

    def work(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: [step(index, length) for length in (3, 5)].clear())  # type: ignore[func-returns-value]
            for number in range(20):
                with gate.step():
                    step(index, (3, 5)[number % 2])

    assert run_threads(work, 2) == [None, None]
    gate.close()
    return gate.report()


def test_recomputation_in_the_backward_ends_and_compiles_nothing_after_the_warm_up() -> None:
    """On CUDA it runs on autograd's thread for the device, where a lock held by the step would never come free."""
    report = checkpointed_training_ends("cpu", "aot_eager")
    assert (report["compiles_after_warmup"], report["eager_bodies"]) == (0, 0)
