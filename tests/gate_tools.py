"""What the tests of the compile gate share: a small module, a gate without Inductor, threads that must end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash.compile import CompileGate

DEADLINE = 60.0
FLAG_IS_GLOBAL = hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
"""True up to torch 2.13; from 2.14 the flag is thread-local (pytorch#168999)."""


class Small(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


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
