"""The number of targets beside the drafters changes nothing but who waits: the same losses, weights and resume."""

from __future__ import annotations

import json
import shutil
import threading
from typing import Any

import pytest
import torch

from pipeline import train as train_module
from pipeline.batches import MicroBatch
from pipeline.cache import load_cached
from pipeline.checkpoints import latest_checkpoint, load_checkpoint
from pipeline.errors import ConfigError
from pipeline.metrics import read
from pipeline.runs import Run
from pipeline.target_forward import TargetForward
from tests.tiny_run import TinyRun

SETTINGS = ("data.features=online", "train.steps=6", "train.checkpoint_every=6", "train.evaluate_every=0")


class _Stop:
    """As pipeline.interrupts.StopRequest, asked when the trainer reaches `step`."""

    def __init__(self, trainer: train_module.Trainer, step: int) -> None:
        self._trainer, self._step = trainer, step

    @property
    def requested(self) -> bool:
        return self._trainer.step >= self._step


def _with_targets(run: Run, targets: int, name: str) -> Run:
    """Return a copy of a run whose cache stage is done, for `targets` copies on this CPU: as many GPUs would each have
    one, and the configuration refuses to name one twice."""
    folder = run.folder.parent / name
    if not folder.exists():
        shutil.copytree(run.folder, folder)
    topology = run.config.topology.model_copy(update={"targets": ("cpu",) * targets})
    return Run(folder, run.config.model_copy(update={"topology": topology}))


def _train(run: Run, until: int = 6) -> dict[str, Any]:
    trainer = train_module.Trainer(run, load_cached(run))
    trainer.fit(_Stop(trainer, until))  # type: ignore[arg-type]
    return trainer.manifest()


def _result(run: Run) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    path = latest_checkpoint(run.checkpoints_dir, print)
    assert path is not None
    curve = [(record["step"], record["loss"]) for record in read(run.metrics_path)]
    return curve, load_checkpoint(path).tensors["weights"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_any_number_of_targets_gives_the_same_bits_also_when_it_changes_on_the_way(bench: TinyRun) -> None:
    prepared = bench.go(*SETTINGS, stages=("cache",))
    one = _with_targets(prepared, 1, "one")
    manifest = _train(one)
    assert manifest["targets"] == ["target-0 on cpu"]
    curve, weights = _result(one)
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]

    _train(_with_targets(prepared, 2, "changing"), until=2)
    resumed = _with_targets(prepared, 3, "changing")  # they do not divide the four micro-batches of a step
    assert _result(resumed)[0] == curve[:2]
    manifest = _train(resumed)
    assert manifest["targets"] == [f"target-{t} on cpu" for t in range(3)]
    assert {"target-0", "target-1", "target-2"} < manifest["training"]["waited_share"].keys()
    assert [session["from_step"] for session in manifest["sessions"]] == [0, 2]
    found, tensors = _result(resumed)
    assert found == curve
    assert tensors.keys() == weights.keys() and all(torch.equal(tensors[name], weights[name]) for name in weights)


@pytest.mark.timeout(120)
def test_a_target_that_fails_ends_the_run_with_its_own_error(bench: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = bench.go(*SETTINGS, stages=("cache",))
    whole = TargetForward.__call__
    calls: list[str] = []

    def failing(self: TargetForward, batch: MicroBatch) -> torch.Tensor:
        calls.append(threading.current_thread().name)
        if calls.count("target-1") == 3:
            raise RuntimeError("the second target is out of memory")
        return whole(self, batch)

    monkeypatch.setattr(TargetForward, "__call__", failing)
    with pytest.raises(RuntimeError, match=r"^the second target is out of memory$"):
        _train(_with_targets(prepared, 3, "failing"))
    assert not any(thread.name.startswith(("target-", "drafter-")) for thread in threading.enumerate())


def test_a_drafter_whose_gpu_is_gone_since_the_cache_stage_is_one_line(bench: TinyRun) -> None:
    """And a target's only where it makes features beside the training."""
    prepared = bench.go("train.steps=2", stages=("cache",))
    settings = json.loads(prepared.config.model_dump_json())
    for field, features in (("drafters", "cached"), ("targets", "online")):
        changed = settings | {"topology": {**settings["topology"], field: ["cuda:9"]}}
        changed["data"] = {**settings["data"], "features": features}
        run = Run(prepared.folder, type(prepared.config).model_validate_json(json.dumps(changed)))
        with pytest.raises(ConfigError, match=rf"^topology\.{field}: cuda:9 does not exist, this machine has "):
            train_module.train(run)
