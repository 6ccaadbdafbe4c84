from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config
from pipeline.files import atomic_write_json
from pipeline.metrics import MetricsLog
from pipeline.pace import summed
from pipeline.report import shown, write_report
from pipeline.runs import Run, open_run

ROOT = Path(__file__).resolve().parents[3]
CONFIG = load_config(ROOT / "configs" / "quickstart.yaml")
_VOID = {"meta", "line", "circle", "polyline", "link", "img", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced and keeps tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(run: Run) -> Page:
    return Page(write_report(run, run.report_path).read_text())


def _finished_run(folder: Path) -> Run:
    run = open_run(CONFIG, folder, {"platform": "a <b>bold</b> machine"})
    log = MetricsLog(run.metrics_path)
    for step in range(1, 1001):
        loss = math.nan if step == 3 else 8 - step / 200
        log.append({"step": step, "loss": loss, "accepted_length": 1 + step / 3000, "tokens_per_second": 900})
    gates = [
        {"name": "tau in domain", "value": 1.2512345, "limit": 1.15, "verdict": "pass", "detail": "8 prompts"},
        {"name": "<script>alert(1)</script>", "value": None, "limit": [1, 2], "verdict": "fail", "detail": "a & b"},
    ]
    atomic_write_json(run.verify_path, {"verdict": "fail", "gates": gates})
    entry = {"name": "train", "state": "failed", "seconds": 75.2, "finished": None, "error": "x < y"}
    atomic_write_json(run.stages_path, {"stages": [entry]})
    return run


def test_the_page_shows_verdict_gates_stages_configuration_and_environment(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    text = _page(run).text
    assert "Verdict: fail" in text
    for part in ("tau in domain", "1.251", "1.15", "8 prompts", "a & b", "1 min 15 s", "x < y", "block_size: 4"):
        assert part in text
    assert run.id in text


def test_nothing_that_a_run_wrote_becomes_markup(tmp_path: Path) -> None:
    page = _page(_finished_run(tmp_path))
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "a <b>bold</b> machine" in page.text


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = _page(_finished_run(tmp_path))
    assert not {"link", "img", "iframe", "script"} & set(page.tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in page.attributes}


def test_curves_are_drawn_with_bounded_points_and_without_what_is_not_finite(tmp_path: Path) -> None:
    page = _page(_finished_run(tmp_path))
    lines = [value for name, value in page.attributes if name == "points"]
    assert len(lines) == 3
    for line in lines:
        assert line is not None
        points = [tuple(map(float, pair.split(","))) for pair in line.split()]
        assert 300 < len(points) <= 400
        assert all(70 <= x <= 850 and 12 <= y <= 190 for x, y in points)
    assert "nan" not in " ".join(str(line) for line in lines)


def test_a_falling_loss_falls_on_the_page(tmp_path: Path) -> None:
    run = open_run(CONFIG, tmp_path, {})
    log = MetricsLog(run.metrics_path)
    log.append({"step": 1, "loss": 4.0})
    log.append({"step": 2, "loss": 2.0})
    line = next(str(value) for name, value in _page(run).attributes if name == "points")
    assert line == "70.0,12.0 850.0,190.0"  # SVG counts y downwards


def test_tau_and_its_proxies_share_a_chart_that_begins_before_the_first_step(tmp_path: Path) -> None:
    run = open_run(CONFIG, tmp_path, {})
    log = MetricsLog(run.metrics_path)
    tau = {"chained": 2.0, "uniform": 3.0, "marginals": 2.5, "prompts": 8}
    log.append({"step": 1, "tokens_per_second": 900})
    log.append({"step": 50, "tau": tau})
    log.append({"step": 100, "tau": {**tau, "chained": 4.0, "uniform": math.nan}})
    chart = (
        "Tau on held-out text: chained from {} to 4, uniform from {} to 3, marginals from {} to 2.5, steps {} to 100"
    )
    labels = [value for name, value in _page(run).attributes if name == "aria-label"]
    assert labels[0] == chart.format(2, 3, 2.5, 50)

    session = {"from_step": 0, "tau_at_start": dict.fromkeys(tau, 1.0)}
    atomic_write_json(run.manifest_path("train"), {"sessions": [session, {"from_step": 60, "tau_at_start": tau}]})
    page = _page(run)
    assert chart.format(1, 1, 1, 0) in [value for name, value in page.attributes if name == "aria-label"]
    lines = [str(value).split() for name, value in page.attributes if name == "points"]
    assert [len(line) for line in lines] == [3, 2, 3, 1]
    assert lines[0] == ["70.0,190.0", "460.0,130.7", "850.0,12.0"]
    assert all(name in page.text for name in ("chained", "uniform", "marginals"))


def test_the_page_says_how_fast_it_trained_and_who_waited_for_what(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    session = {
        "from_step": 0,
        "training": {
            "steps": 3000,
            "seconds": 120.0,
            "tokens": 1_200_000,
            "anchors": 9000,
            "supervised_slots": 27000,
            "waited": {"drafter-0": {"others": 1.2, "features": 12.0}, "target-0": {"room": 60.0}},
        },
    }
    manifest = {"sessions": [session, {**session, "from_step": 3000}]}
    atomic_write_json(run.manifest_path("train"), {**manifest, "training": summed(manifest["sessions"])})
    text = _page(run).text
    assert "6,000" in text and "2,400,000 in 4 min 00 s of training" in text and "18,000, 54,000" in text
    assert "tokens per second10,000" in text
    assert "drafter-0busy 89.0%, waited 1.0% for the other drafters, 10.0% for features" in text
    assert "target-0busy 50.0%, waited 50.0% for room ahead of the drafters" in text


def test_a_run_that_never_measured_tau_has_no_chart_of_it(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    atomic_write_json(run.manifest_path("train"), {"sessions": [{"from_step": 0, "tau_at_start": None}]})
    assert "Tau on held-out text" not in _page(run).text


@pytest.mark.parametrize("records", [[], [{"step": 1, "loss": 2.0}], [{"step": 1, "loss": math.nan}], [{"event": "x"}]])
def test_a_run_that_has_hardly_begun_gets_a_page_too(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    run = open_run(CONFIG, tmp_path, {})
    for record in records:
        MetricsLog(run.metrics_path).append(record)
    page = _page(run)
    assert "Not verified yet." in page.text
    assert "No stage ran yet." in page.text
    drawn = [value for name, value in page.attributes if name == "points"]
    assert len(drawn) == (records == [{"step": 1, "loss": 2.0}])


def test_a_broken_metrics_file_is_said_on_the_page(tmp_path: Path) -> None:
    run = open_run(CONFIG, tmp_path, {})
    run.metrics_path.write_text("oops\n")
    assert "metrics.jsonl:1: is not a JSON object" in _page(run).text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (0, "0"), (1.23456, "1.235"), (1e-7, "1e-07"), ("x", "x"), ([1, 2], "[1, 2]")],
)
def test_values_are_short(value: Any, text: str) -> None:
    assert shown(value) == text
