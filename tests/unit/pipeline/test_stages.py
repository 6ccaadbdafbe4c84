from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError, DataError, Interrupted, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.runs import Run, open_run
from pipeline.stages import STAGES, run_stages

ROOT = Path(__file__).resolve().parents[3]
CONFIG = load_config(ROOT / "configs" / "quickstart.yaml")


class Bench:
    """A run whose stages only note that they ran; `raises` makes one of them end with an error."""

    def __init__(self, folder: Path) -> None:
        self.run: Run = open_run(CONFIG, folder, {})
        self.ran: list[str] = []
        self.lines: list[str] = []
        self.raises: dict[str, BaseException] = {}

    def go(
        self, only: str | None = None, start_from: str | None = None, force: bool = False, source_hash: str = "aaaa"
    ) -> list[str]:
        """Return the stages that ran."""
        self.ran, self.lines = [], []
        run_stages(
            self.run,
            {name: self._function(name) for name in STAGES},
            only=only,
            start_from=start_from,
            force=force,
            source_hash=source_hash,
            log=self.lines.append,
        )
        return self.ran

    def _function(self, name: str) -> Callable[[Run], dict[str, Any]]:
        def stage(run: Run) -> dict[str, Any]:
            self.ran.append(name)
            if name == "verify":  # as the real one: the gates are written before the verdict is raised
                verdict = "fail" if isinstance(self.raises.get(name), VerificationFailed) else "pass"
                atomic_write_json(run.verify_path, {"verdict": verdict, "gates": []})
            if name in self.raises:
                raise self.raises[name]
            return {"verdict": "pass", "gates": []} if name == "verify" else {"made_by": name}

        return stage

    def manifest(self, name: str) -> dict[str, Any]:
        return json.loads(self.run.manifest_path(name).read_text())

    def states(self) -> list[str]:
        return [entry["state"] for entry in self.book()]

    def book(self) -> list[dict[str, Any]]:
        return json.loads(self.run.stages_path.read_text())["stages"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_all_stages_run_in_order_and_publish_their_manifests(bench: Bench) -> None:
    assert bench.go() == ["cache", "train", "verify"]
    assert bench.manifest("cache")["made_by"] == "cache"
    for name in STAGES:
        manifest = bench.manifest(name)
        assert manifest["source"] == "aaaa"
        assert manifest["finished"].endswith("UTC")
        assert manifest["seconds"] >= 0
    assert bench.states() == ["done", "done", "done"]


def test_finished_stages_are_skipped_with_the_time_they_finished(bench: Bench) -> None:
    bench.go()
    assert bench.go() == []
    finished = bench.manifest("train")["finished"]
    assert f"train: skipped, finished {finished}" in bench.lines
    assert bench.states() == ["skipped"] * 3
    assert bench.book()[1]["finished"] == finished


def test_a_skip_says_so_when_the_source_has_changed_since(bench: Bench) -> None:
    bench.go()
    assert bench.go(source_hash="bbbb") == []
    assert all("by other source (aaaa, now bbbb); --force runs it again" in line for line in bench.lines)


def test_a_run_goes_on_after_the_stage_that_failed(bench: Bench) -> None:
    bench.raises["train"] = DataError("no tokens", where="train.jsonl:3", fix="Mend the line.")
    with pytest.raises(DataError):
        bench.go()
    assert bench.states() == ["done", "failed", "pending"]
    assert bench.book()[1]["error"] == "train.jsonl:3: no tokens. Mend the line."
    bench.raises.clear()
    assert bench.go() == ["train", "verify"]


def test_an_unexpected_error_is_noted_with_its_type_in_one_line(bench: Bench) -> None:
    bench.raises["cache"] = RuntimeError("two\nlines")
    with pytest.raises(RuntimeError):
        bench.go()
    assert bench.book()[0]["error"] == "RuntimeError: two lines"


@pytest.mark.parametrize("error", [Interrupted("stopped at step 3"), KeyboardInterrupt()])
def test_an_interrupted_stage_is_told_from_a_failed_one(bench: Bench, error: BaseException) -> None:
    bench.raises["train"] = error
    with pytest.raises(type(error)):
        bench.go()
    assert bench.states() == ["done", "interrupted", "pending"]


def test_a_failed_verification_keeps_its_gates_and_runs_again(bench: Bench) -> None:
    bench.raises["verify"] = VerificationFailed("tau 1.0 is under 1.15")
    with pytest.raises(VerificationFailed):
        bench.go()
    assert bench.manifest("verify") == {"verdict": "fail", "gates": []}
    assert bench.states() == ["done", "done", "failed"]
    bench.raises.clear()
    assert bench.go() == ["verify"]
    assert bench.go() == []


def test_a_manifest_with_the_verdict_fail_never_counts_as_finished(bench: Bench) -> None:
    bench.go()
    atomic_write_json(bench.run.verify_path, bench.manifest("verify") | {"verdict": "fail"})
    assert bench.go() == ["verify"]


def test_a_stage_that_returns_the_verdict_fail_does_not_pass(bench: Bench) -> None:
    functions: dict[str, Callable[[Run], dict[str, Any]]] = {name: lambda run: {} for name in STAGES}
    functions["verify"] = lambda run: {"verdict": "fail", "gates": []}
    with pytest.raises(VerificationFailed):
        run_stages(bench.run, functions, only=None, start_from=None, force=False, source_hash="a", log=print)
    assert bench.states()[2] == "failed"


def test_one_stage_alone_runs_when_the_one_before_it_is_finished(bench: Bench) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.go(only="train")
    assert "train needs the stage cache, and cache.json is not there" in str(caught.value)
    assert bench.go(only="cache") == ["cache"]
    assert bench.go(only="train") == ["train"]
    assert bench.states() == ["done", "done", "pending"]


def test_starting_from_a_stage_runs_it_and_the_later_ones_from_nothing(bench: Bench) -> None:
    bench.go()
    (bench.run.checkpoints_dir / "step-000300").mkdir(parents=True)
    bench.run.metrics_path.write_text("{}\n")
    assert bench.go(start_from="verify") == ["verify"]
    assert bench.run.checkpoints_dir.exists()
    assert bench.go(start_from="train") == ["train", "verify"]
    assert not bench.run.checkpoints_dir.exists()
    assert not bench.run.metrics_path.exists()
    assert "train: starts over; removed checkpoints, metrics.jsonl" in bench.lines


def test_an_interrupted_restart_does_not_fall_back_to_the_old_results(bench: Bench) -> None:
    bench.go()
    bench.run.checkpoints_dir.mkdir()
    bench.raises["cache"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.go(start_from="cache")
    assert not bench.run.checkpoints_dir.exists()
    bench.raises.clear()
    assert bench.go() == ["cache", "train", "verify"]


def test_running_a_stage_again_takes_back_the_later_manifests(bench: Bench) -> None:
    bench.go()
    assert bench.go(only="train", force=True) == ["train"]
    assert not bench.run.verify_path.exists()
    assert bench.states() == ["done", "done", "pending"]
    bench.run.manifest_path("cache").unlink()
    assert bench.go() == ["cache", "train", "verify"]


def test_force_runs_everything_again(bench: Bench) -> None:
    bench.go()
    assert bench.go(force=True) == ["cache", "train", "verify"]


def test_a_damaged_manifest_is_mentioned_and_its_stage_runs_again(bench: Bench) -> None:
    bench.go()
    bench.run.manifest_path("train").write_text('{"finished": "2026')
    assert bench.go() == ["train", "verify"]
    assert "train: train.json cannot be read, so the stage runs again" in bench.lines


def test_stage_and_from_exclude_each_other(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="exclude"):
        bench.go(only="train", start_from="train")
    with pytest.raises(ConfigError, match="no stage 'trian'"):
        bench.go(only="trian")


def test_the_book_says_running_while_a_stage_runs(bench: Bench) -> None:
    seen: list[list[str]] = []
    functions: dict[str, Callable[[Run], dict[str, Any]]] = {name: lambda run: {} for name in STAGES}

    def look(run: Run) -> dict[str, Any]:
        seen.append(bench.states())
        return {}

    functions["train"] = look
    run_stages(bench.run, functions, only=None, start_from=None, force=False, source_hash="a", log=print)
    assert seen == [["done", "running", "pending"]]
