"""The record of a run, of a made-up one: files as the stages write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import run as record
from benchmarks.flops import step_flops
from benchmarks.peaks import Peaks
from dflash.checkpoint import save_drafter
from dflash.taps import extract_features
from env.fingerprint import fingerprint
from pipeline.files import atomic_write_json
from pipeline.metrics import MetricsLog
from pipeline.pace import summed
from pipeline.runs import Run, open_run
from tests.drafters import drafter_config, random_drafter
from tests.tiny import tiny_model, tiny_target
from tests.tiny_run import tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[3]
PEAKS = Peaks(matmul_flops=1e10, copy_bytes=1e10, matmul="made up")
SESSION: dict[str, Any] = {
    "warmup_seconds": 2.5,
    "wall_seconds": 30.0,
    "training": {
        "steps": 6,
        "seconds": 20.0,
        "tokens": 4000,
        "anchors": 300,
        "supervised_slots": 800,
        "waited": {"drafter-0": {"others": 2.0, "features": 4.0}, "target-0": {"room": 1.0}},
    },
}
GATE = {"name": "loss fell", "value": 0.5, "limit": "< 1", "verdict": "pass", "detail": "over 2 records"}
TAU = {"decoded": 1.5, "chained": 1.4, "untrained": 1.1, "tokens": 30, "calls": 20}


def made_run(folder: Path, **head: Any) -> Run:
    """Return a finished run of two sessions with features made online, and its drafter."""
    tiny_target(folder)
    config = tiny_config(target={"source": str(folder / "target-qwen3")}, data={"features": "online"})
    run = open_run(config, folder / "runs", {**fingerprint(ROOT), "git": {"commit": "trained", "dirty": False}})
    log = MetricsLog(run.metrics_path)
    for step, loss in ((1, 6.0), (12, 3.0)):
        log.append({"step": step, "loss": loss})
    drafter = random_drafter(**head)
    save_drafter(run.drafter_dir, drafter_config(**head), dict(drafter.named_parameters()), torch.float32)
    done = {"finished": "2026-11-30 10:00:00 UTC", "source": "aaaa"}
    answers = {"num_samples": 20, "num_tokens": 800}
    atomic_write_json(run.manifest_path("cache"), {"answers": answers, "seconds": 100.0, **done})
    sessions = [{**SESSION, "from_step": 0, "to_step": 6}, {**SESSION, "from_step": 6, "to_step": 12}]
    train = {"steps": 12, "workers": ["drafter-0 on cpu (sdpa)"], "sessions": sessions, "training": summed(sessions)}
    atomic_write_json(run.manifest_path("train"), {**train, "seconds": 30.0, **done})
    verify = {"verdict": "pass", "gates": [GATE], "tau": {"held_out": TAU, "out_of_domain": {**TAU, "decoded": 1.2}}}
    atomic_write_json(run.verify_path, {**verify, "seconds": 50.0, **done})
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made_run(tmp_path_factory.mktemp("run"))


def _records(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(record, "measure_peaks", lambda device: PEAKS)
    monkeypatch.setenv("DFLASH_CACHE", str(folder / "cache"))
    assert record.main([str(run.folder), "--json", str(folder / "out.json")]) == 0
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_the_record_adds_up_what_the_stages_wrote(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _records(run, tmp_path, monkeypatch)
    assert found["seconds"] == {"cache": 100.0, "training": 60.0, "verify": 50.0}
    assert (found["warm_up_seconds"], found["sessions"], found["config"]) == (5.0, 2, "tiny")
    training = found["training"]
    assert (training["steps"], training["tokens"], training["tokens_per_second"]) == (12, 8000, 200.0)
    assert training["waited_share"]["drafter-0"] == {"others": 0.1, "features": 0.2}
    assert (found["loss_first"], found["loss_last"]) == (6.0, 3.0)
    assert found["tau"]["out_of_domain"] == {"decoded": 1.2, "chained": 1.4, "untrained": 1.1}
    assert found["gates"] == [GATE]
    assert found["gpu_minutes"] == 0 and found["peaks"]["matmul_flops"] == 1e10
    assert {"date", "device", "torch", "cpu", "gpus"} <= set(found)
    assert found["command"].startswith(f"python -m benchmarks.run {run.folder} --json ")
    assert found["git"] == {"commit": "trained", "dirty": False}
    out = capsys.readouterr().out
    assert "8,000 tokens, 1,600 slots of 600 anchors, 200 tokens/s" in out
    assert "drafter-0 30.0% (others 10.0%, features 20.0%); target-0 5.0% (room 5.0%)" in out
    assert "tau held_out: decoded 1.5, chained 1.4, untrained 1.1" in out


def test_mfu_is_the_formulas_operations_over_trainings_seconds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _records(run, tmp_path, monkeypatch)
    counted = step_flops(
        drafter_config(),
        sequences=1,
        context_len=8000,
        num_anchors=600,
        num_rows=1600,
        pairs=600 * 4 * (40 / 2 + 4),  # a text has 800 / 20 tokens
    ).total
    assert found["drafter_tflop"] == pytest.approx(counted / 1e12, abs=1e-4)
    assert found["mfu"] == pytest.approx(counted / 40.0 / 1e10, rel=1e-3)
    assert 0 < found["target_share"] == pytest.approx(found["target_tflop"] * 1e12 / 40.0 / 1e10, abs=2e-4)


def test_the_targets_operations_are_those_that_torch_counts() -> None:
    """torch counts all pairs of a causal forward, twice the allowed ones, and the rotation's angles."""
    target: Any = tiny_model()
    target.set_attn_implementation("eager")  # torch's counter passes over the CPU's fused attention
    tokens = torch.randint(10, 300, (2, 24))
    with FlopCounterMode(display=False) as counter:
        extract_features(target, tokens, (1, 3))
    counted = record.target_flops(target.config, 48, 2 * 24)
    angles = 2 * 24 * target.config.head_dim // 2
    assert counter.get_total_flops() == counted + angles
    assert record.target_flops(target.config, 48, 24) < counted
    assert record.target_flops(target.config, 48, 2 * 24, layers=3) == counted * 3 / 4


def test_a_drafter_that_is_not_counted_has_no_mfu_and_the_record_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _records(made_run(tmp_path, markov_rank=8), tmp_path, monkeypatch)
    assert found["mfu"] is None and "head of its own" in found["not_counted"]
    assert "MFU not counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("features", "drafters", "targets", "gpus"),
    [
        ("online", ("cuda:0",), ("cuda:0",), {"cache": 1, "train": 1, "verify": 1}),
        ("online", ("cuda:1", "cuda:2", "cuda:2"), ("cuda:0",), {"cache": 1, "train": 3, "verify": 1}),
        ("cached", ("cuda:1", "cuda:2"), ("cuda:0",), {"cache": 1, "train": 2, "verify": 1}),
        ("cached", ("cpu", "cpu"), ("cpu",), {"cache": 0, "train": 0, "verify": 0}),
    ],
)
def test_a_stages_gpus_are_counted_once_each(
    features: str, drafters: tuple[str, ...], targets: tuple[str, ...], gpus: dict[str, int]
) -> None:
    topology = SimpleNamespace(drafters=drafters, targets=targets)
    config: Any = SimpleNamespace(data=SimpleNamespace(features=features), topology=topology)
    assert record.gpus_of(config, 1) == gpus
    assert record.gpus_of(config, 3) == {**gpus, "train": 3 * gpus["train"]}, "the topology is each host's"


def test_the_hosts_of_a_training_are_the_mean_over_its_seconds() -> None:
    assert record.hosts_of([{"wall_seconds": 30.0, "hosts": 4}, {"wall_seconds": 10.0, "hosts": 2}]) == 3.5
    assert record.hosts_of([{"wall_seconds": 30.0}]) == 1 and record.hosts_of([]) == 1


def _unfinish(run: Run) -> None:
    atomic_write_json(run.verify_path, {"verdict": "fail", "gates": []})


def _uncount(run: Run) -> None:
    path = run.manifest_path("train")
    manifest = json.loads(path.read_text())
    atomic_write_json(path, {**manifest, "training": summed(manifest["sessions"][1:])})


@pytest.mark.parametrize(
    ("change", "said"), [(_unfinish, "has not finished verify"), (_uncount, "counted 6 of 12 steps")]
)
def test_a_run_that_is_not_finished_or_not_counted_is_one_line_and_exit_2(
    change: Callable[[Run], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(tmp_path)
    change(run)
    capsys.readouterr()
    assert record.main([str(run.folder)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_another_machine_or_place_is_one_line_and_exit_2(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["nowhere"]) == 2
    assert record.main([str(run.folder), "--json", "nowhere/out.json"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no such run" in first and second.startswith("--json: nowhere/out.json is in no folder")
    config = run.config.model_copy(
        update={"topology": run.config.topology.model_copy(update={"drafters": ("cuda:99",)})}
    )
    with pytest.raises(record.ConfigError, match="torch sees no cuda:99 here"):
        record.device_of(replace(run, config=config))
