from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import metrics
from pipeline.errors import DataError
from pipeline.metrics import MetricsLog, Progress, duration, progress_bar, read


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


def _filled(path: Path, steps: range) -> MetricsLog:
    log = MetricsLog(path)
    for step in steps:
        log.append({"step": step, "loss": 1 / step})
    return log


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 2.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'  # there before the log is closed
    log.append({"step": 2, "loss": math.nan})
    first, second = read(log.path)
    assert first == {"step": 1, "loss": 2.5}
    assert math.isnan(second["loss"])


def test_resuming_drops_the_steps_that_will_be_trained_again(tmp_path: Path) -> None:
    """bug-reports 46: a resume must not leave steps in the file twice."""
    log = _filled(tmp_path / "metrics.jsonl", range(1, 8))
    assert log.truncate_after(4) == 4
    _filled(log.path, range(5, 7))
    assert _steps(log.path) == [1, 2, 3, 4, 5, 6]


def test_resuming_drops_a_torn_last_line_so_that_the_next_record_is_whole(tmp_path: Path) -> None:
    log = _filled(tmp_path / "metrics.jsonl", range(1, 4))
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert _steps(log.path) == [1, 2, 3]
    log.truncate_after(10)
    log.append({"step": 4})
    assert _steps(log.path) == [1, 2, 3, 4]


def test_a_record_without_a_step_stays_with_those_before_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for record in ({"event": "warm-up"}, {"step": 1}, {"step": 2}, {"event": "late"}):
        log.append(record)
    log.truncate_after(1)
    assert read(log.path) == [{"event": "warm-up"}, {"step": 1}]


def test_a_start_from_step_0_empties_the_file(tmp_path: Path) -> None:
    log = _filled(tmp_path / "metrics.jsonl", range(1, 4))
    assert log.truncate_after(0) == 0
    assert read(log.path) == []
    assert MetricsLog(tmp_path / "new.jsonl").truncate_after(0) == 0


@pytest.mark.parametrize("line", ["not json", "[1]", ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps({'step': 1})}\n{line}\n{json.dumps({'step': 2})}\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == "metrics.jsonl:2: is not a JSON object. Remove the line."


def test_without_a_terminal_progress_is_plain_lines_now_and_then() -> None:
    out = io.StringIO()
    with Progress(300, start=100, every_seconds=3600, console=Console(file=out, width=40)) as progress:
        for step in range(101, 301):
            progress.update(step, loss=2.3456, tokens_per_second=1234.5, accepted=1.234)
    assert out.getvalue() == "train: step 300/300  loss 2.346  accepted 1.23  1,234 tokens/s  0 s left\n"


def test_without_a_terminal_every_line_is_shown_when_the_interval_is_over() -> None:
    out = io.StringIO()
    with Progress(3, every_seconds=0, console=Console(file=out)) as progress:
        for step in (1, 2, 3):
            progress.update(step, loss=1.0, tokens_per_second=10)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [f"train: step {n}/3" for n in (1, 2, 3)]


def test_the_time_left_leaves_out_the_warm_up_that_the_first_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with Progress(150, start=100, every_seconds=0, console=Console(file=out, width=200)) as progress:
        for step, seconds in ((101, 600.0), (111, 610.0), (150, 660.0)):
            now[0] = seconds
            progress.update(step, loss=1.0, tokens_per_second=10)
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == ["? left", "39 s left", "0 s left"]


def test_on_a_terminal_progress_is_a_live_bar() -> None:
    out = io.StringIO()
    with Progress(3, console=Console(file=out, force_terminal=True, width=120)) as progress:
        for step in (1, 2, 3):
            progress.update(step, loss=1.5, tokens_per_second=2000, accepted=1.1)
    shown = out.getvalue()
    assert "3/3" in shown
    assert "loss 1.500  accepted 1.10  2,000 tokens/s" in shown


def test_a_plain_bar_counts_on_a_pipe_and_on_a_terminal() -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    for out, console in ((pipe, Console(file=pipe)), (terminal, Console(file=terminal, force_terminal=True))):
        with progress_bar("answers", 4, console=console) as bar:
            bar.advance(3)
            bar.advance()
        assert "answers" in out.getvalue()
        assert "4/4" in out.getvalue()
    assert pipe.getvalue() == "answers: 4/4\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (75, "1 min 15 s"), (3725, "1 h 02 min"), (math.nan, "?")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
