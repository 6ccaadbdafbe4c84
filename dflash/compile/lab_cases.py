"""What goes wrong when threads and torch.compile meet, one case a function, with the gate and without it.

Each case runs alone in a process of its own (lab.py starts it) and returns an Outcome. "forced" cases hold one thread
at the critical point by events, so they need no luck; "random" ones let threads collide.
Sources: pytorch#126024, #118260, #105943, #168042 and the study behind this project.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.compile.gate import CompileGate
from dflash.compile.settings import shim_missing_gpu

WAIT = 20.0
"""Seconds a forced case waits at most for the other thread; without the gate it never waits so long."""


@dataclass
class Outcome:
    """crashed: threads that raised. eager: bodies that ran as plain Python. wrong: results or states that are not what
    they should be. A hang is seen from outside."""

    crashed: int = 0
    eager: int = 0
    wrong: int = 0
    details: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    run: Callable[[bool, str, int], Outcome]
    schedule: str
    devices: tuple[str, ...]
    shows: str
    """What a person sees without the gate."""


class Drafter(nn.Module):
    """A small stand-in with attention; counts its own bodies that were not compiled."""

    def __init__(self, width: int, outcome: Outcome) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.outcome = outcome

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            self.outcome.eager += 1
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The same numbers without the probe: the reference."""
        weights = torch.softmax(x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5, -1)
        return x + self.outer(torch.nn.functional.gelu(self.inner(weights @ x)))


class FlexDrafter(nn.Module):
    """One attention layer through flex_attention with a block mask, as drafters on CUDA have."""

    def __init__(self, width: int, outcome: Outcome) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.outcome = outcome

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            self.outcome.eager += 1
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return x + out.transpose(1, 2).reshape(batch, length, width)


class Threads:
    """Starts threads, joins them, and books what they raise."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._threads = outcome, list[threading.Thread]()

    def start(self, name: str, work: Callable[[], Any]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._outcome.crashed += 1
                self._outcome.details.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def _compiled(gate: CompileGate | None, function: Any, name: str) -> Any:
    if gate is not None:
        return gate.compile(function, name=name)
    return torch.compile(function, backend="aot_eager")


def _step(gate: CompileGate | None) -> AbstractContextManager[None]:
    return gate.step() if gate is not None else nullcontext()


def _caller_beside_a_trace(gated: bool, outcome: Outcome, *, before_call: Callable[[], None] = lambda: None) -> None:
    """Thread "tracer" is inside an FX trace; thread "caller" makes a call that it has compiled before."""
    gate = CompileGate(workers=2, backend="aot_eager") if gated else None
    drafter = _compiled(gate, Drafter(8, outcome), "caller")
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
                with _step(gate):
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
    drafters = [_compiled(gate, Drafter(w, outcome), f"drafter-{i}") for i, w in enumerate(widths)]

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

    compiled = _compiled(gate, body, "compiler")

    def other() -> None:
        def act() -> None:
            inside.wait(WAIT)
            with _step(gate):
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


def random_lengths(gated: bool, device: str, seed: int) -> Outcome:
    """Three drafters step, forward and backward, through lengths that come at random; one repeats a warm length."""
    outcome = Outcome()
    gate = CompileGate(workers=3, backend="aot_eager", on_miss="park") if gated else None
    widths, lengths = (8, 12, 16), [4, 6, 8, 10, 12]
    modules = [Drafter(w, outcome).to(device) for w in widths]
    drafters = [_compiled(gate, m, f"drafter-{i}") for i, m in enumerate(modules)]
    steady_until = threading.Event()
    left = [2]

    def train(index: int, length: int) -> None:
        x = torch.randn(2, length, widths[index], device=device)
        with _step(gate):
            out = drafters[index](x)
            out.square().mean().backward()
            expected = modules[index].compute(x)
        outcome.wrong += int(not torch.allclose(out, expected, atol=2e-4))

    def work(index: int) -> None:
        rng = random.Random(seed * 100 + index)

        def loop() -> None:
            if index == 0:
                while not steady_until.is_set():
                    train(0, lengths[0])
                return
            try:
                for _ in range(12):
                    train(index, rng.choice(lengths))
            finally:
                left[0] -= 1
                if left[0] == 0:
                    steady_until.set()

        if gate is None:
            train(index, lengths[0])
            return loop()

        def warm() -> None:
            drafters[index](torch.randn(2, lengths[0], widths[index], device=device)).square().mean().backward()

        with gate.worker(f"drafter-{index}"):
            gate.warm_up(warm)
            loop()

    _run_all(outcome, work, 3)
    return outcome


def cold_start_on_one_gpu(gated: bool, device: str, seed: int) -> Outcome:
    """Three flex drafters on one GPU compile forward and backward at once, cold: deadlock. A thread that traces waits
    for the device's one autograd thread, which waits for the lock that the tracing thread holds."""
    outcome = Outcome()
    gate = CompileGate(workers=3, backend="inductor") if gated else None
    lengths = [256, 384, 512]
    modules = [FlexDrafter(64, outcome).to(device) for _ in range(3)]
    drafters = [gate.compile(m, name=f"drafter-{i}") if gate else torch.compile(m) for i, m in enumerate(modules)]

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    masks = {n: create_block_mask(causal, None, None, n, n, device=device) for n in lengths}

    def train(index: int, length: int) -> None:
        x = torch.randn(1, length, 64, device=device)
        drafters[index](x, masks[length]).square().mean().backward()

    def work(index: int) -> None:
        order = lengths[:]
        random.Random(seed * 100 + index).shuffle(order)
        if gate is None:
            for length in order * 3:
                train(index, length)
            return

        def warm() -> None:
            for length in order:
                train(index, length)

        with gate.worker(f"drafter-{index}"):
            gate.warm_up(warm)
            for length in order * 3:
                with gate.step():
                    train(index, length)

    _run_all(outcome, work, 3)
    torch.cuda.synchronize()
    return outcome


def _run_all(outcome: Outcome, work: Callable[[int], None], count: int) -> None:
    threads = Threads(outcome)
    for index in range(count):
        threads.start(f"drafter-{index}", lambda index=index: work(index))  # type: ignore[misc]
    threads.join()


CASES: dict[str, Case] = {
    "cached call": Case(cached_call, "forced", ("cpu",), "crash"),
    "silent eager": Case(silent_eager, "forced", ("cpu",), "eager"),
    "recompile limit": Case(recompile_limit, "forced", ("cpu",), "eager"),
    "rng rewind": Case(rng_rewind, "forced", ("cpu",), "wrong"),
    "settings undone": Case(settings_undone, "forced", ("cpu",), "wrong"),
    "stuck flag": Case(stuck_flag, "forced", ("cpu",), "crash"),
    "random lengths": Case(random_lengths, "random", ("cpu", "cuda"), "crash"),
    "cold start": Case(cold_start_on_one_gpu, "random", ("cuda",), "hang"),
}


def run_case(name: str, gated: bool, device: str, seed: int) -> Outcome:
    """Run one case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shim_missing_gpu()  # a CUDA build without a GPU would die of another fault than the one that is shown
    return CASES[name].run(gated, device, seed)


def available(devices: Sequence[str]) -> list[str]:
    """Return those of `devices` that this machine has."""
    return [d for d in devices if d == "cpu" or (d == "cuda" and torch.cuda.is_available())]
