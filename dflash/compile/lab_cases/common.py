"""What the cases share: what was seen, a small drafter, threads that book what they raise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash.compile.gate import CompileGate


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


def run_all(outcome: Outcome, work: Callable[[int], None], count: int) -> None:
    threads = Threads(outcome)
    for index in range(count):
        threads.start(f"drafter-{index}", lambda index=index: work(index))  # type: ignore[misc]
    threads.join()


def compiled_by(gate: CompileGate | None, function: Any, name: str) -> Any:
    if gate is not None:
        return gate.compile(function, name=name)
    return torch.compile(function, backend="aot_eager")


def step_of(gate: CompileGate | None) -> AbstractContextManager[None]:
    return gate.step() if gate is not None else nullcontext()
