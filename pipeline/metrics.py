"""metrics.jsonl, always written, and what the terminal shows while a stage works."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from pipeline.errors import DataError
from pipeline.files import atomic_write_text


class MetricsLog:
    """One JSON object a line. A line is handed to the system whole before `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def truncate_after(self, step: int) -> int:
        """Drop everything from the first record whose "step" is past `step`, and a torn last line; return records left.

        Called on resume, so that the steps that are trained again are not in the file twice.
        """
        if not self.path.exists():
            return 0
        kept: list[dict[str, Any]] = []
        for record in read(self.path):
            if record.get("step", step) > step:
                break
            kept.append(record)
        atomic_write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        return len(kept)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; no file is no records. A torn last line, left by a kill, is left out.

    Raises DataError, with file and line, for any other line that is not a JSON object.
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
        except ValueError:
            raise DataError("is not a JSON object", where=f"{path.name}:{number}", fix="Remove the line.") from None
        records.append(record)
    return records


class Progress:
    """Training's line: step, tokens/s, loss, estimated accepted length, time left.

    A live bar on a terminal; elsewhere a plain line every `every_seconds`, and always for the last step.
    Use as a context manager and call `update` after each step. The time left is that of the steps since the first,
    which waits for the warm-up.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        description: str = "train",
        every_seconds: float = 10.0,
        console: Console | None = None,
    ) -> None:
        self._total, self._description = total, description
        self._every, self._console = every_seconds, console or Console(stderr=True)
        self._first: tuple[int, float] | None = None
        self._last_line = time.monotonic()
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(description, total=total, completed=start, status="")

    def __enter__(self) -> Progress:
        self._last_line = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, *, loss: float, tokens_per_second: float, accepted: float | None = None) -> None:
        """Show the state after optimizer step `step` (from 1). `accepted` is tokens per target call, estimated."""
        parts = [f"loss {loss:.3f}"]
        if accepted is not None:
            parts.append(f"accepted {accepted:.2f}")
        parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if self._bar:
            self._bar.update(self._task, completed=step, status="  ".join(parts))
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        if step >= self._total or now - self._last_line >= self._every:
            self._last_line = now
            left = self._seconds_left(step, now - self._first[1], step - self._first[0])
            line = f"{self._description}: step {step}/{self._total}  {'  '.join(parts)}  {duration(left)} left"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _seconds_left(self, step: int, seconds: float, steps: int) -> float:
        """Return how long the rest takes if it is like the last `steps`, which took `seconds`; NaN if that is none."""
        rest = self._total - step
        if rest <= 0:
            return 0.0
        return seconds / steps * rest if steps > 0 else math.nan


class Bar:
    """A counter with a total; `advance` when a piece is done."""

    def __init__(self, description: str, total: int, every_seconds: float, console: Console) -> None:
        self._description, self._total, self._every, self._console = description, total, every_seconds, console
        self._done = 0
        self._last_line = time.monotonic()
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=console)
            self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> Bar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        self._done += count
        if self._bar:
            self._bar.advance(self._task, count)
            return
        now = time.monotonic()
        if self._done >= self._total or now - self._last_line >= self._every:
            self._last_line = now
            line = f"{self._description}: {self._done}/{self._total}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_bar(description: str, total: int, *, every_seconds: float = 10.0, console: Console | None = None) -> Bar:
    """Return a context manager: a bar on a terminal, a plain line every `every_seconds` elsewhere."""
    return Bar(description, total, every_seconds, console or Console(stderr=True))


def duration(seconds: float) -> str:
    """Return 75 as "1 min 15 s"; a number that is not finite as "?"."""
    if not math.isfinite(seconds):
        return "?"
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
