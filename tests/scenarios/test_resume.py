"""A training that is stopped and goes on is the same training, bit for bit; one that cannot be the same is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline import train as train_module
from pipeline.checkpoints import latest_checkpoint, load_checkpoint
from pipeline.errors import ConfigError, DataError, Interrupted
from pipeline.metrics import read
from pipeline.runs import Run
from tests.scenarios.conftest import MakeBench
from tests.tiny_run import TinyRun, saved_tensors, write_prompts

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ("cache", "train")
ONE_DRAFTER = "topology.drafters=[cpu]"

# The real command in a process of its own; its steps are drawn out so that a signal falls between two of them.
_SLOW_STEPS = """
import sys, time
from pipeline.__main__ import main
from pipeline.replica import Replica

whole = Replica.forward_backward
def drawn_out(self, *arguments):
    time.sleep(0.1)
    return whole(self, *arguments)
Replica.forward_backward = drawn_out
sys.exit(main(sys.argv[1:]))
"""


def _losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read(run.metrics_path)]


def _stop_by(bench: TinyRun, run: Run, number: signal.Signals, after_step: int) -> tuple[int, str, str]:
    """Train in a process, send it a signal once a step is logged, and return exit code, stdout and stderr."""
    command = [sys.executable, "-c", _SLOW_STEPS, "train", "--config", str(bench.config_path), "name=stopped"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **bench.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if len(read(run.metrics_path)) >= after_step:
                process.send_signal(number)
                break
            time.sleep(0.02)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def _stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next trainings be asked to stop in their step `step`, without a signal."""

    class Asked(train_module.StopRequest):
        trainer: train_module.Trainer

        @property
        def requested(self) -> bool:
            return self.trainer.step >= step

        @requested.setter
        def requested(self, value: bool) -> None:
            pass

    original = train_module.Trainer.fit

    def fit(self: train_module.Trainer, stop: Asked) -> None:
        stop.trainer = self
        original(self, stop)

    monkeypatch.setattr(train_module, "StopRequest", Asked)
    monkeypatch.setattr(train_module.Trainer, "fit", fit)


def _assert_interrupted(run: Run) -> None:
    states = {e["name"]: e["state"] for e in json.loads(run.stages_path.read_text())["stages"]}
    assert states["train"] == "interrupted"
    assert not run.manifest_path("train").exists()
    assert not run.drafter_dir.exists()


@pytest.mark.slow
def test_a_run_stopped_twice_ends_with_the_bits_of_one_never_stopped(bench: TinyRun) -> None:
    """verl#7401, accelerate PR 4071, TorchSpec PR 43. The second stop is a signal to a process that resumed the run;
    test_interrupts.py has what other signals do."""
    whole = bench.go("name=whole", stages=TRAINED)
    run = bench.run("name=stopped")
    with pytest.MonkeyPatch.context() as patch:
        _stop_after(2, patch)
        with pytest.raises(Interrupted, match="stopped after step 2 of 12, saved"):
            bench.go("name=stopped", stages=TRAINED)
    _assert_interrupted(run)

    code, out, err = _stop_by(bench, run, signal.SIGTERM, after_step=5)
    assert code == 5, err
    assert "train: resuming from step-000002" in err and "cache: skipped" in out
    path = latest_checkpoint(run.checkpoints_dir, print)
    assert path is not None
    stopped_at = load_checkpoint(path).step
    assert 5 <= stopped_at < 12
    last = err.strip().splitlines()[-1]
    assert last == f"{run.id}: stopped after step {stopped_at} of 12, saved. invoke train again resumes there."
    _assert_interrupted(run)

    bench.go("name=stopped", stages=TRAINED)
    assert _losses(run) == _losses(whole)
    stopped, expected = saved_tensors(run), saved_tensors(whole)
    assert stopped.keys() == expected.keys()
    assert all(torch.equal(stopped[name], expected[name]) for name in expected)
    one, other = ((r.drafter_dir / "model.safetensors").read_bytes() for r in (run, whole))
    assert one == other
    manifest, unbroken = (json.loads(r.manifest_path("train").read_text()) for r in (run, whole))
    sessions = manifest["sessions"]
    assert [s["from_step"] for s in sessions] == [0, 2, stopped_at]
    assert sessions[-1]["to_step"] == 12
    counts = ("steps", "tokens", "anchors", "supervised_slots")
    assert [manifest["training"][name] for name in counts] == [unbroken["training"][name] for name in counts]
    assert manifest["training"]["steps"] == 12 and manifest["training"]["seconds"] > 0


@pytest.mark.parametrize(("features", "stop"), [("cached", 3), ("online", 5)])
def test_a_stop_inside_or_at_the_end_of_an_epoch_changes_no_bit_whatever_makes_the_features(
    bench: TinyRun, features: str, stop: int
) -> None:
    settings = (ONE_DRAFTER, "train.steps=6", f"data.features={features}")
    whole = bench.go(*settings, stages=TRAINED)
    stopped = (*settings, "name=stopped")
    with pytest.MonkeyPatch.context() as patch:
        _stop_after(stop, patch)
        with pytest.raises(Interrupted, match=f"stopped after step {stop} of 6, saved"):
            bench.go(*stopped, stages=TRAINED)
    run = bench.run(*stopped)
    assert [step for step, _ in _losses(run)] == list(range(1, stop + 1))
    bench.go(*stopped, stages=TRAINED)
    assert _losses(run) == _losses(whole)
    tensors, expected = saved_tensors(run), saved_tensors(whole)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_steps_logged_after_the_last_checkpoint_are_trained_again_and_logged_once(bench: TinyRun) -> None:
    """A kill: the metrics are further than the checkpoint, and there is no manifest."""
    settings = (ONE_DRAFTER, "train.steps=6", "train.checkpoint_every=3")
    run = bench.go(*settings, stages=TRAINED)
    before = _losses(run)
    for path in (run.checkpoints_dir / "step-000006", run.drafter_dir):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    run.manifest_path("train").unlink()
    bench.go(*settings, stages=("train",))
    assert _losses(run) == before


def test_a_target_that_changed_since_the_cache_stage_is_named(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    bench.use(monkeypatch)
    bench.go(ONE_DRAFTER, "train.steps=2", stages=("cache",))
    generation = bench.target / "generation_config.json"
    generation.write_text(generation.read_text().replace("{", '{"max_length": 21,', 1))
    with pytest.raises(DataError) as caught:
        bench.go(ONE_DRAFTER, "train.steps=2", stages=("train",))
    assert str(caught.value) == (
        f"{bench.target}: the target's files changed since the cache stage. "
        "Rebuild it: invoke train --from-stage cache."
    )


def test_a_resume_over_other_answers_is_refused_and_names_the_key(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    bench.use(monkeypatch)
    run = bench.go(ONE_DRAFTER, "train.steps=2", stages=TRAINED)
    write_prompts(bench.folder / "train.jsonl", (f"Speak of {i}." for i in range(40)))
    run.manifest_path("train").unlink()  # as if it had been stopped
    bench.go(ONE_DRAFTER, "train.steps=2", stages=("cache",), force=True)
    with pytest.raises(ConfigError) as caught:
        bench.go(ONE_DRAFTER, "train.steps=2", stages=("train",))
    message = str(caught.value)
    assert message.startswith('answers was "answers-')
    assert 'when step-000002 was saved, the config gives "answers-' in message
    assert message.endswith("Use a new run name or the old value.")


def test_damaged_features_are_named_before_training_begins(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    bench.use(monkeypatch)
    run = bench.go(ONE_DRAFTER, "train.steps=2", stages=("cache",))
    folder = Path(json.loads(run.manifest_path("cache").read_text())["features"]["folder"])
    shard = folder / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors: is missing or damaged"):
        bench.go(ONE_DRAFTER, "train.steps=2", stages=("train",))


def test_a_run_goes_on_where_the_cache_is_mounted_at_another_place(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a container calls /cache is .cache for the host."""
    bench = make_bench()
    bench.use(monkeypatch)
    bench.go(ONE_DRAFTER, "train.steps=2", stages=("cache",))
    (bench.folder / "cache").rename(bench.folder / "mounted")
    with pytest.raises(DataError, match="is gone or incomplete"):
        bench.go(ONE_DRAFTER, "train.steps=2", stages=("train",))
    monkeypatch.setenv("DFLASH_CACHE", str(bench.folder / "mounted"))
    run = bench.go(ONE_DRAFTER, "train.steps=2", stages=("train",))
    assert run.manifest_path("train").is_file()
