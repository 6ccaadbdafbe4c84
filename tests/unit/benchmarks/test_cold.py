"""Cold starts are counted by what became of them; a table stands for the trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cold
from benchmarks.cold import Counts, sharing, table
from benchmarks.many_runs import SIZES, Laboratory
from pipeline.config import load_config

WELL = {"eager_bodies": 0, "compiles_after_warmup": 0}


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the list that says what each start comes to; it gets used up."""
    given: list[tuple[str, dict[str, Any] | None]] = []
    used: list[Path] = []

    def start(self: Laboratory, overrides: list[str], cache: Path, *flags: str) -> tuple[str, Path]:
        assert cache not in used and not (cache / "compile").exists(), "a start found what another compiled"
        assert (cache / "data").resolve() == (self.folder / "cache" / "data").resolve()
        used.append(cache)
        failed, manifest = given.pop(0)
        assert (flags == ("--no-gate",)) is ("name=cold-none" in " ".join(overrides))
        run = self.folder / "runs" / str(len(used))
        run.mkdir(parents=True)
        if manifest is not None:
            (run / "train.json").write_text(json.dumps(manifest))
        return failed, run

    monkeypatch.setattr(Laboratory, "start", start)
    return given


def test_each_end_is_counted_and_a_bad_one_behind_the_gate_is_a_fault(
    trainings: list[tuple[str, dict[str, Any] | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainings += [("", WELL), ("ended with -11: it said nothing", None), ("", {**WELL, "eager_bodies": 2})]
    trainings += [("no result in 9 s", None), ("", {**WELL, "compiles_after_warmup": 1}), ("no result in 9 s", None)]
    path = tmp_path / "cold.json"
    assert cold.main(["--device", "cpu", "--drafters", "2", "--starts", "3", "--json", str(path)]) == 4
    out, error = capsys.readouterr()
    assert error.splitlines()[-1] == (
        "2 of 3 cold starts behind the gate did not go well: ended with -11: it said nothing"
    )
    gated, bare = (line.split() for line in out.splitlines()[-2:])
    assert gated[:9] == ["behind", "the", "gate", "3", "1", "1", "0", "1", "0"]
    assert bare[:8] == ["without", "it", "3", "0", "0", "2", "0", "1"]
    record = json.loads(path.read_text())
    assert record["counts"][1]["said"] == ["no result in 9 s"] and len(record["counts"][1]["seconds"]) == 3


def test_starts_without_the_gate_are_never_a_fault_and_can_be_run_alone(
    trainings: list[tuple[str, dict[str, Any] | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    trainings += [("ended with 1: Detected", None)] * 2
    assert cold.main(["--device", "cpu", "--drafters", "2", "--starts", "2", "--gate", "off"]) == 0
    assert "behind" not in capsys.readouterr().out and not trainings
    trainings += [("", {**WELL, "eager_bodies": 1})]
    assert cold.main(["--device", "cpu", "--drafters", "2", "--starts", "1", "--gate", "on"]) == 4
    assert "plain Python, or a late compile" in capsys.readouterr().err
    assert table([Counts(True)])[1].split()[-1] == "-"


@pytest.mark.parametrize(
    ("device", "count", "drafters"), [("cpu", 2, 2), ("cuda", 1, 3), ("cuda", 2, 3), ("cuda", 3, 3)]
)
def test_drafters_are_dealt_over_the_gpus_and_make_a_configuration_without_graphs(
    device: str, count: int, drafters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.many_runs.tiny_target", lambda folder, arch, **changes: folder / "target")
    laboratory, found = Laboratory(tmp_path, device, drafters, 1.0), sharing(device, count, drafters)
    if device == "cuda":
        assert found.drafters == ("cuda:0", "cuda:1", "cuda:2", "cuda:0")[:count] * (drafters // count) + (
            ("cuda:0",) if drafters % count else ()
        )
    config = load_config(laboratory.config, [*found.overrides(SIZES[device]), *SIZES[device].cold])
    assert len(config.topology.drafters) == drafters and len(config.topology.targets) == (
        count if device == "cuda" else 1
    )
    assert not config.recorded and config.train.batch_size == drafters * SIZES[device].rows
    taken = config.data.train[0].count
    assert taken is not None and taken >= config.train.batch_size


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        ([], 0, "--gpus: 1 GPUs are needed, 0 of them here."),
        (["--gpus", "4", "--drafters", "4"], 2, "--gpus: 4 GPUs are needed, 2 of them here."),
        (["--drafters", "1"], 1, "--drafters: 1 drafters on 1 of cuda."),
        (["--gpus", "3", "--drafters", "2"], 4, "--drafters: 2 drafters on 3 of cuda."),
        (["--gpus", "-1"], 1, "--gpus: has to be above 0."),
        (["--starts", "0"], 1, "--starts, --limit: has to be above 0."),
        (["--device", "cpu", "--json", "nowhere/out.json"], 0, "--json: nowhere/out.json is in no folder that exists."),
    ],
)
def test_what_cannot_be_run_here_is_one_line_and_exit_2(
    arguments: list[str], gpus: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert cold.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1
