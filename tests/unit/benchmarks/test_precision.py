"""The comparison of precisions: arms see the same steps, a changed start is told apart, bad input is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import precision
from benchmarks.precision import Arm, described, faults
from tests.tiny_run import TinyRun

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyRun.make(tmp_path_factory.mktemp("precision")).folder


def test_arms_train_on_the_same_steps_from_the_same_start_unless_it_is_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyRun(folder, folder / "runs")
    tiny.use(monkeypatch)
    tiny.go("data.features=online", "topology.drafters=[cpu]", stages=["cache"])
    record = folder / "record.json"
    arms = ["--arms", "fp32,fp32,fp32~,bf16", "--steps", "6", "--max-new-tokens", "6", "--json", str(record)]
    assert precision.main(["latest", *arms]) == 0
    written = json.loads(record.read_text())
    first, again, changed, rounded = written["arms"]
    assert first["loss"] == again["loss"] and first["tau"] == again["tau"]
    assert len(first["loss"]) == 6 and sum(first["loss"][3:]) < sum(first["loss"][:3])  # its second epoch, its first
    assert changed["changed"] == precision.CHANGED and first["changed"] == 0
    assert changed["loss"] != first["loss"] == pytest.approx(changed["loss"], rel=1e-2)
    assert rounded["loss"] != first["loss"] == pytest.approx(rounded["loss"], rel=2e-2)
    assert set(first["tau"]) == set(written["tau_tokens"]) == {"held_out", "out_of_domain"}
    assert all(tau >= 1 for tau in first["tau"].values())
    assert written["faults"] == [] and "(+0.00%)" in capsys.readouterr().out

    assert precision.main(["latest", "--arms", "fp32,int3", "--steps", "1"]) == 2
    assert "--arms: 'int3' is no precision" in capsys.readouterr().err


def test_a_cached_run_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyRun(folder, folder / "others")
    tiny.use(monkeypatch)
    run = tiny.run("topology.drafters=[cpu]")
    run.folder.mkdir(parents=True)
    run.config_path.write_text(tiny.config_path.read_text())
    assert precision.main([str(run.folder)]) == 2
    assert "its features are cached in one precision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-run",), "no-such-run: no such run"),
        (("x", "--steps", "0"), "--steps: 0 is not at least 1"),
        (("x", "--json", "no/such/folder.json"), "--json: no/such/folder.json is in no folder"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert precision.main(arguments) == 2
    assert said in capsys.readouterr().err


ARM = Arm("bf16", "bf16", 0.0, 20.0, (4.0, 2.0), (1.0, 1.5), {"held_out": 1.5}, 0)


def test_the_table_says_how_far_an_arm_is_from_the_first() -> None:
    other = replace(ARM, name="fp8", loss=(4.0, 2.06), tau={"held_out": 1.47})
    line = described([ARM, other]).splitlines()[-1]
    assert "3.0300 (+1.00%)" in line and "1.4700 (-2.00%)" in line


def test_a_compile_or_a_loss_that_is_not_finite_is_a_fault() -> None:
    assert faults([ARM]) == []
    assert faults([replace(ARM, compiles_after_warmup=2)]) == ["bf16: 2 compiles after the warm-up"]
    assert faults([replace(ARM, loss=(1.0, float("nan")))]) == ["bf16: a loss is not finite"]
