"""The laboratory itself: it shows a fault without the gate, none with it, and ends when a case hangs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.fx._symbolic_trace

from dflash.compile import lab
from dflash.compile.lab import CaseResult, main, run_once

FLAG_IS_GLOBAL = hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("cached call", "crashed"),
        ("silent eager", "eager"),
        ("stuck flag", "crashed"),
        ("rng rewind", "wrong"),
        ("settings undone", "wrong"),
    ],
)
def test_a_forced_case_goes_wrong_without_the_gate_and_is_clean_behind_it(name: str, fault: str) -> None:
    without, behind = (CaseResult(name, "forced", "cpu", gate) for gate in (False, True))
    with ThreadPoolExecutor() as pool:  # both processes at once: most of their time is the import of torch
        tuple(pool.map(lambda result: run_once(name, result.gate, "cpu", 0, 180.0, result), (without, behind)))
    assert behind.clean(), behind
    if fault == "wrong" or FLAG_IS_GLOBAL:
        assert getattr(without, fault) == 1 and not without.clean(), without


@pytest.mark.slow
def test_a_case_past_its_deadline_counts_as_a_hang_and_leaves_the_stacks() -> None:
    result = CaseResult("cached call", "forced", "cpu", True)
    run_once("cached call", True, "cpu", 0, 0.2, result)  # importing torch alone takes longer
    assert result.hung == 1 and not result.clean()
    assert any("most recent call first" in line for line in result.details)


@pytest.mark.slow
def test_the_json_has_one_object_a_case_with_every_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "race.json"
    assert main(["--case", "recompile limit", "--device", "cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] == torch.__version__
    keys = {"name", "schedule", "device", "gate", "runs", "crashed", "hung", "eager", "wrong"}
    assert [case["gate"] for case in found["cases"]] == [False, True]
    assert all(keys <= case.keys() for case in found["cases"])
    assert found["cases"][0]["eager"] == 1 and found["cases"][1]["eager"] == 0
    assert "1 of 1 cases are clean" in capsys.readouterr().out


def test_an_unknown_case_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "nothing"]) == 2
    assert "Cases: cached call" in capsys.readouterr().err


def test_what_the_time_does_not_reach_is_not_called_clean() -> None:
    results = lab.run_laboratory(["cached call"], ["cpu"], minutes=0.0, say=lambda line: None)
    assert [result.runs for result in results] == [0, 0]
    assert not any(result.clean() for result in results)
