"""CompileGate: compile once, in order, with nobody else running; afterwards a compile is an error.

Why: torch keeps one process-wide flag while it traces, and a compiled call in any other thread reads it and raises
(pytorch#126024); on CUDA two drafters whose backwards compile at once deadlock. Warm disk caches only hide this. The
gate makes it impossible by structure: a trace or compile, forward or backward, happens only in a worker that holds the
gate exclusively, while every other worker is outside its step.

    gate = CompileGate(workers=2)
    body = gate.compile(drafter, name="drafter-0")          # one code object for each drafter
    # in the worker's own thread:
    with gate.worker("drafter-0"):
        gate.warm_up(lambda: step_for_every_declared_shape())   # forward and backward; returns when all are warm
        for batch in batches:                               # may wait for other workers here ...
            with gate.step():                               # ... but never in here
                body(batch).backward()

Rule for users: inside `step()` never wait for another worker (a queue, a barrier); outside it, do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch._dynamo.exc import BackendCompilerFailed

from dflash.compile.counters import CompileEvent, FunctionCounters, counting_backend, thread_name
from dflash.compile.settings import configure_thread, shim_missing_gpu

P = ParamSpec("P")
R = TypeVar("R")
_MISS = "Detected recompile when torch.compile stance is 'fail_on_recompile'"


class GateError(RuntimeError):
    """The gate was used against its rule; a fault of the program, not of the run's input."""


class CompileMiss(RuntimeError):
    """A sealed function met something it was not warmed for. Carries its name, the shapes, and torch's reason."""

    def __init__(self, function: str, shapes: str, reason: str) -> None:
        self.function, self.shapes, self.reason = function, shapes, reason
        super().__init__(function)

    def __str__(self) -> str:
        return (
            f"{self.function} would compile after the warm-up for {self.shapes}: {self.reason}. "
            "Declare the shape, or set compile.on_miss: park."
        )


class GateAborted(RuntimeError):
    """Another worker failed, so this one stopped waiting for it."""


class CompileGate:
    """One per process. `workers` threads each call `warm_up` once; the last one seals the gate.

    on_miss   "raise": a compile after the seal raises CompileMiss at its source. "park": the worker that missed waits
              until all others are outside their steps, compiles alone until the end of its own step, and is counted.
    log       called with a line when a worker has waited for `patience_seconds`, naming whom it waits for.
    """

    def __init__(
        self,
        *,
        workers: int,
        on_miss: str = "raise",
        backend: str = "inductor",
        log: Callable[[str], None] | None = None,
        patience_seconds: float = 30.0,
    ) -> None:
        if on_miss not in ("raise", "park"):
            raise ValueError(f"on_miss is {on_miss!r}; use raise or park")
        self.on_miss, self.backend = on_miss, backend
        self._expected, self._log, self._patience = workers, log or (lambda line: None), patience_seconds
        self._changed = threading.Condition(threading.Lock())
        self._running: set[str] = set()
        self._waiting: list[str] = []
        self._exclusive: str | None = None
        self._members: set[str] = set()
        self._warm: set[str] = set()
        self._sealed = False
        self._failure: tuple[str, BaseException] | None = None
        self._local = threading.local()
        self._functions: dict[str, FunctionCounters] = {}
        self._seconds = {"compiling": 0.0, "parked": 0.0}
        self.shimmed = shim_missing_gpu()
        configure_thread()

    # -- functions ---------------------------------------------------------------------------------------------------

    def compile(self, function: Callable[P, R], *, name: str) -> GatedFunction[P, R]:
        """Return `function` compiled (fullgraph) with a code object and counters of its own.

        Raises ValueError if the name is taken: counts are kept by name.
        """
        if name in self._functions:
            raise ValueError(f"a function named {name!r} is already behind this gate")
        counters = FunctionCounters(name)
        self._functions[name] = counters
        return GatedFunction(self, function, counters)

    def _note(self, counters: FunctionCounters, direction: str) -> None:
        """Record a compile that is about to start; refuse it unless some worker holds the gate exclusively.

        Not "this worker": a CUDA backward compiles on autograd's thread for the device.
        """
        allowed = self._exclusive is not None
        if allowed or not self._sealed:
            counters.events.append(CompileEvent(counters.name, direction, thread_name(), self._sealed))
        if not allowed and self._sealed:
            counters.misses += 1
            raise CompileMiss(
                counters.name, "a graph that was never warmed", f"its {direction} was not part of the warm-up"
            )
        if not allowed:
            raise GateError(f"{counters.name} compiles outside warm_up(); only there are the other workers parked")

    # -- workers -----------------------------------------------------------------------------------------------------

    @contextmanager
    def worker(self, name: str) -> Iterator[None]:
        """Register the current thread as a worker for the time of the block.

        An exception in it ends all waiting workers with GateAborted, so that none hangs.
        """
        with self._changed:
            if name in self._members:
                raise GateError(f"a worker named {name!r} is already registered")
            self._members.add(name)
        self._local.name, self._local.depth = name, 0
        configure_thread()
        try:
            yield
        except BaseException as error:
            self._fail(name, error)
            raise
        finally:
            with self._changed:
                self._members.discard(name)
                self._changed.notify_all()
            self._local.name = None

    def _fail(self, name: str, error: BaseException) -> None:
        with self._changed:
            if self._failure is None and not isinstance(error, GateAborted):
                self._failure = (name, error)
            self._changed.notify_all()

    def _me(self) -> str:
        name = getattr(self._local, "name", None)
        if name is None:
            raise GateError("this thread is not a worker of the gate; wrap it in gate.worker(name)")
        return name

    def step(self) -> AbstractContextManager[None]:
        """The part of a step that may call gated functions and run backward. Starts only while nobody compiles."""
        return _Step(self)

    def _enter_step(self) -> None:
        me = self._me()
        if self._local.depth:
            raise GateError(f"{me} entered step() twice")
        with self._changed:
            if self._exclusive is not None or self._waiting:
                self._wait(lambda: self._exclusive is None and not self._waiting, "a compile")
            self._running.add(me)
        self._local.depth = 1

    def _leave_step(self) -> None:
        me = self._local.name
        self._local.depth = 0
        with self._changed:
            self._running.discard(me)
            if self._exclusive == me:
                self._release()
                self._changed.notify_all()
            elif self._waiting:
                self._changed.notify_all()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run `function` (every declared shape, forward and backward) with all other workers parked; return when the
        expected number of workers are warm and the gate is sealed."""
        me = self._me()
        if self._sealed:
            raise GateError(f"{me} came to warm up after the gate was sealed")
        self._acquire()
        self._local.depth = 1
        try:
            function()
        finally:
            self._local.depth = 0
            with self._changed:
                self._release()
        with self._changed:
            self._warm.add(me)
            if len(self._warm) == self._expected:
                self._seal()
            self._changed.notify_all()
            self._wait(lambda: self._sealed, "the other workers' warm-up")

    # -- exclusion ---------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """Wait until no other worker runs, then hold the gate. A worker that waits here inside its step is stopped at a
        call and counts as parked, so two that miss at once take turns."""
        me = self._me()
        with self._changed:
            self._waiting.append(me)
            self._changed.notify_all()  # one that waits for this worker's step need not wait for it any more
            self._wait(
                lambda: self._exclusive is None and self._waiting[0] == me and not (self._running - set(self._waiting)),
                "the other workers' steps",
            )
            self._waiting.remove(me)
            self._exclusive = me
            self._local.since = time.perf_counter()
            if self._sealed:
                torch.compiler.set_stance("default")

    def _release(self) -> None:
        """Give the gate back; the caller holds the lock."""
        self._exclusive = None
        self._seconds["compiling"] += time.perf_counter() - self._local.since
        if self._sealed:
            self._seal()

    def _seal(self) -> None:
        self._sealed = True
        torch.compiler.set_stance("fail_on_recompile")

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held, until `ready`; say so when it takes long. Raises GateAborted if a worker failed."""
        me, start = self._me(), time.perf_counter()
        while not ready():
            if self._failure is not None:
                if me in self._waiting:
                    self._waiting.remove(me)
                name, error = self._failure
                raise GateAborted(
                    f"{name} failed ({type(error).__name__}: {error}), so {me} stopped waiting for {what}"
                )
            if not self._changed.wait(timeout=self._patience):
                busy = (
                    self._exclusive
                    or ", ".join(sorted(self._running - set(self._waiting)))
                    or ", ".join(self._waiting)
                    or "nobody yet"
                )
                self._log(f"{me} has waited {time.perf_counter() - start:.0f} s for {what}; busy: {busy}")
        self._seconds["parked"] += time.perf_counter() - start

    def close(self) -> None:
        """Lift the seal (torch's stance is process-wide). Call when no worker is left."""
        with self._changed:
            if self._members:
                raise GateError(f"workers {sorted(self._members)} are still registered")
            self._sealed = False
        torch.compiler.set_stance("default")

    @property
    def sealed(self) -> bool:
        return self._sealed

    def report(self) -> dict[str, Any]:
        """Return counts of every function and the seconds spent compiling and parked, as JSON-able values."""
        functions = [counters.report() for counters in self._functions.values()]
        after = sum(f["forward_compiles_after_warmup"] + f["backward_compiles_after_warmup"] for f in functions)
        return {
            "functions": functions,
            "compiles": sum(f["forward_compiles"] + f["backward_compiles"] for f in functions),
            "compiles_after_warmup": after,
            "eager_bodies": sum(f["eager_bodies"] for f in functions),
            "misses": sum(f["misses"] for f in functions),
            "seconds_compiling": round(self._seconds["compiling"], 3),
            "seconds_parked": round(self._seconds["parked"], 3),
            "missing_gpu_shim": self.shimmed,
        }


class _Step:
    """`with gate.step():` as a class, since it is entered at every step: a generator would cost twice as much."""

    __slots__ = ("_gate",)

    def __init__(self, gate: CompileGate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate._enter_step()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._gate._leave_step()


class GatedFunction(Generic[P, R]):
    """A compiled function that may only run inside `gate.step()` or `gate.warm_up()`."""

    def __init__(self, gate: CompileGate, function: Callable[P, R], counters: FunctionCounters) -> None:
        self._gate, self._counters = gate, counters

        def body(*args: P.args, **kwargs: P.kwargs) -> R:
            # Constant True while torch traces, so the branch costs nothing when compiled and counts when it is not.
            if not torch.compiler.is_dynamo_compiling():
                counters.eager_bodies += 1
            return function(*args, **kwargs)

        # torch keeps entries, and the limit on them, by code object: sharing one would let drafters evict each other.
        body.__code__ = body.__code__.replace(co_name=f"body_of_{counters.name}")
        counters.code = body.__code__
        backend = counting_backend(gate.backend, lambda direction: gate._note(counters, direction))
        self._compiled = torch.compile(body, backend=backend, fullgraph=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not getattr(self._gate._local, "depth", 0):
            raise GateError(f"{self._counters.name} was called outside gate.step()")
        try:
            return self._compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, GateError | CompileMiss):
                raise error.inner_exception from None  # ours, raised in the backend and wrapped by torch
            raise
        except RuntimeError as error:
            if _MISS not in str(error):
                raise
            self._counters.misses += 1
            if self._gate.on_miss == "raise":
                raise CompileMiss(self._counters.name, describe(args, kwargs), _reason(str(error))) from None
        self._gate._acquire()
        return self._compiled(*args, **kwargs)


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the shapes, dtypes and devices of a call's tensors, for a message."""
    found: list[str] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}")
        elif isinstance(value, (list, tuple)):
            found.append(f"({describe(tuple(value), {})})")
        else:
            found.append(type(value).__name__)
    return ", ".join(found)


def _reason(message: str) -> str:
    """Return the guard failures that torch names, or its first line."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip().startswith("- ")]
    return "; ".join(lines) if lines else "it was never called this way"
