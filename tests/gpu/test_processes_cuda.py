"""Processes with a GPU each: NCCL brings what threads add up, memory is flat over saves, and a killed rank is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import cache
from pipeline.checkpoints import latest_checkpoint
from pipeline.gates import memory_flat, no_compiles_after_warmup, no_eager_bodies, replicas_equal
from pipeline.launch import launch
from pipeline.metrics import read
from pipeline.ranks import RankLost
from pipeline.runs import Run
from tests.tiny_run import TinyRun, logged_losses, saved_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two processes on one"),
]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    *(
        "train.precision=bf16",
        "target.dtype=bfloat16",
        "compile.backend=inductor",
        "topology.drafters=[cuda:0, cuda:1]",
    ),
    *("train.evaluate_every=0", "train.steps=60", "train.checkpoint_every=20"),
)
PROCESSES = "topology.workers=processes"
HOMES = {"cached": "topology.targets=[cuda:0]", "online": "topology.targets=[cuda:0, cuda:1]"}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """Return a bench whose compile cache is empty, and one that all of its runs share."""
    made = TinyRun.make(tmp_path)
    made.use(monkeypatch)
    monkeypatch.setattr(cache, "compile_once", lambda config, folder, drafter: {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "key" / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "key" / "triton"))
    return made


def _trained(bench: TinyRun, *overrides: str) -> Run:
    return bench.go(*SETTINGS, *overrides, stages=("cache", "train"))


def _manifest(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.manifest_path("train").read_text())
    return found


@pytest.mark.parametrize(("features", "shard"), [("cached", "false"), ("online", "false"), ("cached", "true")])
def test_two_processes_end_with_the_bits_of_two_threads_and_hold_the_same_memory_over_saves(
    bench: TinyRun, features: str, shard: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Recorded steps write into the one tensor that is sent. One rank compiles; the other, which has its own GPU under
    the same number, loads all of it, and so do those that start later, whatever they train."""
    given = (f"data.features={features}", HOMES[features])
    processes = (PROCESSES, f"topology.shard_optimizer={shard}")
    run = _trained(bench, *given, *processes)
    assert "is compiling, waiting for it" in capfd.readouterr().err
    manifest, records = _manifest(run), read(run.metrics_path)
    for gate in (no_compiles_after_warmup(manifest), no_eager_bodies(manifest), replicas_equal(manifest)):
        assert gate.holds, gate
    flat = memory_flat(records, manifest["sessions"])
    assert flat.holds, flat
    assert manifest["built"] == manifest["loaded"] > 0 and len(manifest["workers"]) == 2

    threads = _trained(bench, *given)
    assert logged_losses(run) == logged_losses(threads)
    own, others = saved_weights(run), saved_weights(threads)
    assert own.keys() == others.keys() and all(torch.equal(own[name], others[name]) for name in own)

    again = _manifest(_trained(bench, *given, *processes, "train.learning_rate=1.0e-3", "train.steps=6"))
    assert again["built"] == 0 and again["loaded"] > 0


# As `python -m pipeline`, but rank 1 is killed before it gives what rank 0 waits for in a kernel of NCCL's.
_DIES = """
import os, signal, sys
from pipeline.__main__ import _leave, main
from pipeline.processes import RankExchange

whole, calls = RankExchange.total, []
def dying(self, index, sums):
    calls.append(1)
    if len(calls) == 30 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, index, sums)
RankExchange.total = dying
_leave(main(sys.argv[1:]))
"""


def test_a_rank_that_is_killed_while_another_waits_in_a_collective_is_named_and_the_run_goes_on_from_its_checkpoint(
    bench: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = _trained(bench, HOMES["cached"])
    run = bench.go(*SETTINGS, HOMES["cached"], PROCESSES, stages=("cache",))
    script = tmp_path / "pipeline_rank.py"
    script.write_text(_DIES)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with pytest.raises(RankLost, match=r"^rank 1: was killed by SIGKILL"):
        launch(run, command=(sys.executable, str(script)))
    path = latest_checkpoint(run.checkpoints_dir, print)
    assert path is not None and path.name == "step-000020"
    run = _trained(bench, HOMES["cached"], PROCESSES)
    assert [session["from_step"] for session in _manifest(run)["sessions"]] == [0, 20]
    assert logged_losses(run) == logged_losses(threads)
