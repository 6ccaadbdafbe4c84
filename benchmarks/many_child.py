"""One run of benchmarks/many.py, in a process of its own: the stages cache and train of a configuration.

    python -m benchmarks.many_child [--no-gate] CONFIG [section.field=value ...]

As `python -m pipeline train`, but for what takes time and says nothing of training: answers are random tokens, the
cache stage leaves compiling to the training's own warm-up, and the environment is not compared with the lock.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.compile import CompileGate
from dflash.compile.counters import CompileEvent, FunctionCounters, thread_name
from pipeline import cache, commands
from pipeline import train as training
from pipeline.tiny_target import SPECIAL


class NoGate(CompileGate):
    """As if there were no gate: threads compile while others run, and what compiles late is counted, not refused."""

    def _note(self, counters: FunctionCounters, direction: str) -> None:
        counters.events.append(CompileEvent(counters.name, direction, thread_name(), self._sealed))

    def _enter_step(self) -> None:
        self._local.depth = 1

    def _leave_step(self) -> None:
        self._local.depth = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        self._local.depth = 1
        function()
        self._local.depth = 0
        with self._changed:
            self._warm.add(self._me())
            self._sealed = len(self._warm) == self._expected


def random_answers(
    target: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **how: Any
) -> list[list[int]]:
    """Return an answer of random tokens for each prompt, half to all of max_new_tokens long, without specials and the
    last token of the vocabulary, which is the mask."""
    rng, vocabulary = random.Random(len(prompts)), target.config.vocab_size
    lengths = [rng.randint(max_new_tokens // 2, max_new_tokens) for _ in prompts]
    return [[rng.randrange(len(SPECIAL), vocabulary - 1) for _ in range(length)] for length in lengths]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_child")
    parser.add_argument("--no-gate", action="store_true")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    cache.generate_answers = random_answers  # type: ignore[assignment]
    cache.compile_once = lambda config, folder, drafter: {}
    if options.no_gate:
        training.CompileGate = NoGate  # type: ignore[misc]
    stages = commands._real_stages()
    for stage in ("cache", "train"):
        commands.train(options.config, options.overrides, only=stage, checks=lambda root: [], functions=stages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
