"""How fast a run trains: a clock of training's own time, and the tokens, seconds and waits of its sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

COUNTED = ("steps", "seconds", "tokens", "anchors", "supervised_slots")
"""What a session counts, beside who waited."""


class TrainingClock:
    """Call it for the seconds of training so far: it stands still before `start` and while `stopped`.

    Warm-up, evaluations and checkpoints are not training's time, and who waits for their end does not wait in it. One
    thread starts and stops it; any may read it.
    """

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # seconds until the last start, and when that was

    def __call__(self) -> float:
        before, since = self._state
        return before if since is None else before + time.perf_counter() - since

    def start(self) -> None:
        """Let it run on."""
        self._state = (self(), time.perf_counter())

    def stop(self) -> None:
        """Let it stand still."""
        self._state = (self(), None)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it stand still during the block."""
        self.stop()
        try:
            yield
        finally:
            self.start()


class Pace:
    """What one process trains on, and how long it takes; `clock` is the TrainingClock of it."""

    def __init__(self, block_size: int) -> None:
        self.clock = TrainingClock()
        self._block_size = block_size
        self._tokens = self._tokens_told = 0
        self._seconds_told = 0.0
        self._sums: Tensor | None = None

    def add(self, tokens: int, sums: Tensor) -> None:
        """Count a step: its tokens without padding, and its loss sums (dflash.objective.LossSums.vector). These stay on
        their device: nothing waits for it."""
        self._tokens += tokens
        self._sums = sums.double() if self._sums is None else self._sums.add_(sums)  # float32 holds 2**24 slots exactly

    def tokens_per_second(self) -> float:
        """Return the rate since the last call."""
        now = self.clock()
        rate = (self._tokens - self._tokens_told) / (now - self._seconds_told)
        self._tokens_told, self._seconds_told = self._tokens, now
        return rate

    def record(self, steps: int, waited: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return what `summed` adds up over sessions. anchors are blocks with a supervised slot; `waited` has seconds
        by thread and by what it waited for."""
        K = self._block_size
        sums = [0.0] * (4 + 4 * K) if self._sums is None else self._sums.tolist()
        return {
            "steps": steps,
            "seconds": round(self.clock(), 4),
            "tokens": self._tokens,
            "anchors": round(sums[3]),
            "supervised_slots": round(sum(sums[4 + K : 4 + 2 * K])),
            "waited": {name: {why: round(s, 4) for why, s in reasons.items()} for name, reasons in waited.items()},
        }


def summed(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all sessions of a training did together: COUNTED, tokens_per_second, and waited_share, which says of
    each thread what share of the seconds it waited for what.

    Threads of one name are one over all sessions. A session without "training" (of a checkpoint from before it was
    counted) is in none of the sums; "steps" says how many steps they are about.
    """
    parts = [session["training"] for session in sessions if "training" in session]
    counts: dict[str, Any] = {name: sum(part[name] for part in parts) for name in COUNTED}
    waited: dict[str, dict[str, float]] = {}
    for part in parts:
        for thread, reasons in part["waited"].items():
            mine = waited.setdefault(thread, {})
            for reason, seconds in reasons.items():
                mine[reason] = mine.get(reason, 0.0) + seconds
    seconds = counts["seconds"]
    return {
        **counts,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(counts["tokens"] / seconds, 1) if seconds else 0.0,
        "waited_share": {
            thread: {reason: round(value / seconds, 4) if seconds else 0.0 for reason, value in reasons.items()}
            for thread, reasons in waited.items()
        },
    }
