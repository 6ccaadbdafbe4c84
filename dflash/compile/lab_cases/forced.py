"""Cases that hold one thread at the critical point by events, so they need no luck."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from dflash.compile.gate import CompileGate
from dflash.compile.lab_cases.common import Drafter, Outcome, Threads, compiled_by, step_of

WAIT = 20.0
"""Seconds a forced case waits at most for the other thread; without the gate it never waits so long."""


def _caller_beside_a_trace(gated: bool, outcome: Outcome, *, before_call: Callable[[], None] = lambda: None) -> None:
    """Thread "tracer" is inside an FX trace; thread "caller" makes a call that it has compiled before."""
    gate = CompileGate(workers=2, backend="aot_eager") if gated else None
    drafter = compiled_by(gate, Drafter(8, outcome), "caller")
    x = torch.randn(1, 3, 8)
    warm, tracing, called = threading.Event(), threading.Event(), threading.Event()

    def hold(t: Tensor) -> Tensor:
        tracing.set()
        called.wait(1.0 if gated else WAIT)  # behind the gate the caller does not come before this trace ends
        return t + 1

    def trace() -> None:
        warm.wait(WAIT)
        make_fx(hold)(torch.ones(2))

    def tracer() -> None:
        if gate is None:
            return trace()
        with gate.worker("tracer"):
            gate.warm_up(trace)

    def caller() -> None:
        def first() -> None:
            drafter(x)
            warm.set()

        def second() -> None:
            tracing.wait(WAIT)
            before_call()
            try:
                with step_of(gate):
                    drafter(x)
            finally:
                called.set()

        if gate is None:
            first()
            return second()
        with gate.worker("caller"):
            gate.warm_up(first)
            second()

    threads = Threads(outcome)
    threads.start("caller", caller)
    if gated:
        warm.wait(WAIT)
    threads.start("tracer", tracer)
    threads.join()


def cached_call(gated: bool, device: str, seed: int) -> Outcome:
    """A call that is in the cache raises because another thread traces."""
    outcome = Outcome()
    _caller_beside_a_trace(gated, outcome)
    return outcome


def silent_eager(gated: bool, device: str, seed: int) -> Outcome:
    """The tempting switch error_on_nested_fx_trace=False turns the crash into eager code that nobody is told about."""
    outcome = Outcome()

    def tempt() -> None:
        if not gated:  # the gate sets the switch back and never needs it
            torch._dynamo.config.error_on_nested_fx_trace = False

    _caller_beside_a_trace(gated, outcome, before_call=tempt)
    return outcome


def recompile_limit(gated: bool, device: str, seed: int) -> Outcome:
    """Ten drafters of one class share torch's eight entries; the last ones run eagerly for ever."""
    outcome = Outcome()
    gate = CompileGate(workers=1, backend="aot_eager") if gated else None
    widths = [8 + 4 * i for i in range(10)]
    drafters = [compiled_by(gate, Drafter(w, outcome), f"drafter-{i}") for i, w in enumerate(widths)]

    def run() -> None:
        for drafter, width in zip(drafters, widths, strict=True):
            drafter(torch.randn(1, 3, width))

    if gate is None:
        run()
    else:
        with gate.worker("all"):
            gate.warm_up(run)
    return outcome


def _beside_a_compile(gated: bool, outcome: Outcome, meanwhile: Callable[[], None]) -> None:
    """Thread "compiler" is inside dynamo; thread "other" does `meanwhile` in its step."""
    gate = CompileGate(workers=2, backend="aot_eager") if gated else None
    inside, done = threading.Event(), threading.Event()

    @torch.compiler.assume_constant_result
    def hold() -> int:  # dynamo calls it while it traces
        inside.set()
        done.wait(1.0 if gated else WAIT)
        return 1

    def body(x: Tensor) -> Tensor:
        return x + hold()

    compiled = compiled_by(gate, body, "compiler")

    def other() -> None:
        def act() -> None:
            inside.wait(WAIT)
            with step_of(gate):
                meanwhile()
            done.set()

        if gate is None:
            return act()
        with gate.worker("other"):
            gate.warm_up(lambda: None)
            act()

    def compiler() -> None:
        if gate is None:
            return compiled(torch.ones(2))
        with gate.worker("compiler"):
            gate.warm_up(lambda: compiled(torch.ones(2)))

    threads = Threads(outcome)
    threads.start("other", other)
    threads.start("compiler", compiler)
    threads.join()


def rng_rewind(gated: bool, device: str, seed: int) -> Outcome:
    """A compile restores the default generators when it ends: what another thread drew meanwhile is drawn again."""
    outcome = Outcome()
    drawn: list[Tensor] = []
    torch.manual_seed(seed)
    _beside_a_compile(gated, outcome, lambda: drawn.append(torch.rand(4)))
    outcome.wrong = int(torch.equal(drawn[0], torch.rand(4)))
    outcome.details += ["the same four numbers were drawn twice"] if outcome.wrong else []
    return outcome


def settings_undone(gated: bool, device: str, seed: int) -> Outcome:
    """What another thread sets during a compile (default dtype here) is undone when it ends."""
    outcome = Outcome()
    _beside_a_compile(gated, outcome, lambda: torch.set_default_dtype(torch.float64))
    outcome.wrong = int(torch.get_default_dtype() != torch.float64)
    outcome.details += [f"default dtype is {torch.get_default_dtype()} again"] if outcome.wrong else []
    torch.set_default_dtype(torch.float32)
    return outcome


def stuck_flag(gated: bool, device: str, seed: int) -> Outcome:
    """Eager flex_attention beside a trace saves the flag as set and restores it so: later compiled calls raise."""
    outcome = Outcome()
    gate = CompileGate(workers=2, backend="aot_eager") if gated else None
    tracing, in_flex, traced = threading.Event(), threading.Event(), threading.Event()
    patience = 1.0 if gated else WAIT

    def trace() -> None:
        def hold(t: Tensor) -> Tensor:
            tracing.set()
            in_flex.wait(patience)
            return t + 1

        make_fx(hold)(torch.ones(2))
        traced.set()

    @torch.compiler.assume_constant_result
    def hold_flex() -> int:
        in_flex.set()
        traced.wait(patience)
        return 0

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + hold_flex()

    def flex() -> None:
        tracing.wait(WAIT)
        q = torch.randn(1, 1, 16, 8)
        flex_attention(q, q, q, score_mod=score)

    def flex_worker() -> None:
        if gate is None:
            return flex()
        with gate.worker("flex"):
            gate.warm_up(flex)  # it compiles inside, so behind the gate it belongs into the warm-up

    def tracer() -> None:
        if gate is None:
            return trace()
        with gate.worker("tracer"):
            gate.warm_up(trace)

    threads = Threads(outcome)
    tracer_thread = threads.start("tracer", tracer)
    if gated:
        tracing.wait(WAIT)
    threads.start("flex", flex_worker)
    threads.join()
    assert not tracer_thread.is_alive()
    if gate is not None:
        gate.close()
    later = Threads(outcome)
    later.start("later call", lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3)))
    later.join()
    return outcome
