"""Which GPUs are targets and which drafters: every way that a step can be cut, by what it would take.

A step's rows are cut into micro-batches of equal shape, which drafters take in turn. Targets make features for them
ahead of use, so in the long run a step takes as long as the busier side. GPUs may be both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.plan.costs import Seconds


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step consists of."""

    pieces: int
    """Micro-batches."""
    drafter: Seconds
    """Forward and backward of one."""
    target: Seconds
    """Features of one; nothing when they are cached."""
    optimizer: Seconds
    """Of all parameters."""
    kept: tuple[float, ...] = ()
    """The share of them that one of 1, 2, ... drafters updates; empty: each updates all."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to place targets and drafters, and what a step takes; seconds."""

    targets: int
    drafters: int
    shared: bool
    """Targets are on GPUs of drafters."""
    drafter_busy: float
    """Of a drafter's GPU, or its process, in a step, with what else runs on it."""
    target_busy: float
    """The same of a target that has its GPU for itself."""
    exchange: float
    python: float
    """Of all threads together, which one process is taken to overlap in nothing: so a run on one GPU was
    (points.py); with several it was not measured."""

    @property
    def gpus(self) -> int:
        return self.drafters + (0 if self.shared else self.targets)

    def step(self, *, one_process: bool) -> float:
        """Return what a step takes: the busier side, or Python where one process runs all threads."""
        return max(self.drafter_busy, self.target_busy, self.python if one_process else 0.0)

    def limit(self, *, one_process: bool) -> str:
        """Return what a step waits for, in words."""
        step = self.step(one_process=one_process)
        if one_process and step == self.python:
            return "Python: one process starts the kernels of all GPUs"
        if self.exchange > 0.5 * step:
            return "adding up gradients over the GPUs"
        if step == self.target_busy:
            return "the target's forward"
        if self.shared and self.targets:
            return "the drafters' products and the target's, on the same GPUs"
        return "the drafters' products"

    def waits(self, *, one_process: bool) -> str:
        """Return which side waits and how long, in words."""
        step = self.step(one_process=one_process)
        sides = [("drafters", self.drafter_busy)]
        if self.targets and not self.shared:
            sides.append(("targets", self.target_busy))
        idle = [f"{name} {1e3 * (step - busy):,.0f} ms" for name, busy in sides if step - busy > 0.005 * step]
        return ", ".join(idle) or "nobody"

    def words(self) -> str:
        """Return the placing as a person would say it."""
        drafters = _count(self.drafters, "drafter")
        if not self.targets:
            return f"{drafters}, features from disk"
        if not self.shared:
            return f"{_count(self.targets, 'target')} + {drafters}"
        if self.targets == self.drafters:
            return f"{_count(self.drafters, 'GPU')} with a target and a drafter" + (
                " each" if self.drafters > 1 else ""
            )
        return f"{drafters}, {self.targets} of their GPUs with a target too"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number > 1 else ''}"


def splits(work: Work, gpus: int, exchange: list[float], *, cached: bool) -> Iterator[Split]:
    """Yield every placing on up to `gpus` GPUs, at most one target and one drafter on each.

    exchange   seconds of adding up gradients over 1, 2, ... drafters
    cached     features are read, and there is no target
    Drafters divide the micro-batches evenly, as pipeline/config.py demands: else some would wait in every step.
    """
    for drafters in (d for d in range(1, gpus + 1) if work.pieces % d == 0):
        if cached:
            yield split_of(work, 0, drafters, exchange[drafters - 1], shared=True)
            continue
        for targets in range(1, drafters + 1):
            yield split_of(work, targets, drafters, exchange[drafters - 1], shared=True)
        for targets in range(1, gpus - drafters + 1):
            yield split_of(work, targets, drafters, exchange[drafters - 1], shared=False)


def split_of(work: Work, targets: int, drafters: int, exchange: float, *, shared: bool) -> Split:
    """Return one placing. On a GPU, or in the process, that has both, times add up."""
    turns = work.pieces // drafters
    fed = -(-work.pieces // targets) if targets else 0
    beside = fed if shared else 0
    update = exchange + work.optimizer.alone * (work.kept[drafters - 1] if work.kept else 1)
    return Split(
        targets=targets,
        drafters=drafters,
        shared=shared,
        drafter_busy=update
        + max(
            turns * work.drafter.gpu + beside * work.target.gpu,
            turns * work.drafter.host + beside * work.target.host,
        ),
        target_busy=0.0 if shared else fed * work.target.alone,
        exchange=exchange,
        python=work.pieces * (work.drafter.host + work.target.host) + drafters * work.optimizer.host,
    )


def best(found: list[Split], *, one_process: bool) -> Split:
    """Return the fastest placing; among equals the one with the fewest GPUs, then the fewest targets."""
    return min(found, key=lambda s: (round(s.step(one_process=one_process), 6), s.gpus, s.targets, s.shared))
