"""Threads outside the gate that trace, and a CUDA build of torch without a GPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.compile.settings import shim_missing_gpu
from tests.gate_tools import DEADLINE, FLAG_IS_GLOBAL, Small, new_gate, run_threads, step_of


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
