"""Processes instead of threads are the same training: losses, order of samples, checkpoint; also after a stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints import latest_checkpoint
from tests.rank_tools import free_port, in_ranks, trained
from tests.tiny_run import TinyRun, logged_losses, saved_tensors

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ("cache", "train")
STEPS = "train.steps=6"
DEADLINE_SECONDS = 400


def _same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _processes(num: int) -> tuple[str, ...]:
    return (STEPS, f"topology.drafters={['cpu'] * num}", "topology.workers=processes")


def _of_steps(results: list[dict[str, Any]], num: int) -> list[set[tuple[int, tuple[int, ...]]]]:
    """Return the samples of each step, over all ranks: four micro-batches, some of each rank."""
    each = 4 // num
    assert [len(found["seen"]) for found in results] == [6 * each] * num
    return [{s for found in results for s in found["seen"][i * each : (i + 1) * each]} for i in range(6)]


@pytest.mark.slow
def test_one_two_and_four_processes_train_as_threads_do_over_the_same_samples(bench: TinyRun) -> None:
    """Bit for bit as many threads; and as any other number within the rounding of other sums."""
    torch.set_num_threads(1)
    steps, losses = [], []
    for num in (1, 2, 4):
        threads = bench.go(STEPS, f"topology.drafters={['cpu'] * num}", stages=TRAINED)
        bench.go(*_processes(num), stages=("cache",))
        results = in_ranks(num, trained, bench, _processes(num), None)
        assert all(isinstance(found, dict) for found in results), results
        run = bench.run(*_processes(num))
        assert logged_losses(run) == logged_losses(threads)
        assert _same_bits(saved_tensors(run), saved_tensors(threads))
        exported = [(r.drafter_dir / "model.safetensors").read_bytes() for r in (run, threads)]
        assert exported[0] == exported[1]
        steps.append(_of_steps(results, num))
        losses.append(logged_losses(run))
        assert [found["bars"] for found in results] == [1] + [0] * (num - 1)  # else they write over each other
        manifest = results[0]["manifest"]
        assert [line.split(" of ")[0] for line in manifest["workers"]] == [f"drafter-{i} on cpu" for i in range(num)]
        assert manifest["replicas_equal"] is True and manifest["compiles_after_warmup"] == 0
        assert manifest["sessions"][0]["gate"]["compiles"] == 2 * num  # of all ranks
        assert len(manifest["training"]["waited_share"]) == num
    assert steps[1] == steps[0] == steps[2]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_stop_asked_of_one_rank_stops_all_and_twice_as_many_go_on_from_there(bench: TinyRun, shard: str) -> None:
    """As torchrun does when a host came or went: every rank is started again, and their number may be another."""
    torch.set_num_threads(1)
    settings = (*_processes(2), f"topology.shard_optimizer={shard}")
    whole = bench.go(STEPS, "topology.drafters=[cpu, cpu]", stages=TRAINED)
    bench.go(*settings, stages=("cache",))
    stopped = in_ranks(2, trained, bench, settings, 3)
    run = bench.run(*settings)
    expected = f"{run.id}: stopped after step 4 of 6, saved. invoke train again resumes there."
    assert [found["interrupted"] for found in stopped] == [expected] * 2  # asked in step 3, agreed in the next
    path = latest_checkpoint(run.checkpoints_dir, print)
    assert path is not None and path.name == "step-000004"
    assert logged_losses(run) == logged_losses(whole)[:4]
    before = saved_tensors(run)
    assert before.keys() == saved_tensors(whole).keys()
    further = in_ranks(4, trained, bench, settings, None, per_host=2)
    assert all(isinstance(found, dict) for found in further), further
    assert {name: t.shape for name, t in saved_tensors(run).items()} == {n: t.shape for n, t in before.items()}
    assert logged_losses(run) == pytest.approx(logged_losses(whole), rel=1e-5)
    sessions = further[0]["manifest"]["sessions"]
    assert [(s["from_step"], s["to_step"]) for s in sessions] == [(0, 4), (4, 6)]
    assert [len(s["gate"]["functions"]) for s in sessions] == [2, 4]


@pytest.mark.slow
def test_train_starts_its_ranks_with_a_target_each_and_ends_with_the_bits_of_threads(bench: TinyRun) -> None:
    online = ("data.features=online", STEPS)
    threads = bench.go(*online, stages=TRAINED)
    run = bench.go(*online, "topology.workers=processes", "topology.targets=[cpu, cpu]", stages=TRAINED)
    assert logged_losses(run) == logged_losses(threads)
    assert _same_bits(saved_tensors(run), saved_tensors(threads))
    manifest = json.loads(run.manifest_path("train").read_text())
    assert [line.split(" of ")[0] for line in manifest["targets"]] == ["target-0 on cpu", "target-1 on cpu"]
    assert manifest["training"]["waited_share"].keys() == {"drafter-0", "drafter-1", "target-0", "target-1"}


# As `python -m pipeline`. In the third step of the first attempt one host's rank is killed, and the other host's hangs,
# as in a collective of NCCL: nobody but its torchrun ends it, when the first host's rank waits to begin again.
_DIES_ONCE = """
import os, signal, sys, time
from pathlib import Path
from pipeline import ranks, train
from pipeline.__main__ import _leave, main

died = Path(os.environ["DIED"])
hung = died.with_name("hung")
first, dies, hangs = not died.exists(), os.environ["DIES"] == "yes", False
print("restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], file=sys.stderr, flush=True)
after, watch = train.Trainer._after_step, ranks.Ranks.watch

def ending(self, step, *rest):
    global hangs
    if not first or step < 3:
        return after(self, step, *rest)
    hangs = True
    if dies:
        while not hung.exists():
            time.sleep(0.05)
        time.sleep(1)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    hung.touch()
    time.sleep(1000)

def blind(self, stop):
    if hangs:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    else:
        watch(self, stop)

train.Trainer._after_step, ranks.Ranks.watch = ending, blind
_leave(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchruns_of_two_hosts_start_ranks_again_and_they_go_on_from_the_last_checkpoint(
    bench: TinyRun, tmp_path: Path
) -> None:
    """By the command of env/launch/README.md, after `train --stage cache`. Only one torchrun counts the restart."""
    whole = bench.go(STEPS, "topology.drafters=[cpu, cpu]", stages=TRAINED)
    run = bench.go(*_processes(1), "train.checkpoint_every=2", stages=("cache",))
    script = tmp_path / "pipeline_rank.py"
    script.write_text(_DIES_ONCE)
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--local-addr=localhost"]
    command = [sys.executable, *torchrun, str(script), "rank", str(run.folder)]
    environ = {**os.environ, **bench.environment, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DIED": str(tmp_path / "died")}
    logs = [tmp_path / "lives.log", tmp_path / "dies.log"]
    hosts = [
        subprocess.Popen(command, cwd=ROOT, env={**environ, "DIES": dies}, stderr=log.open("w"), stdout=log.open("a"))
        for log, dies in zip(logs, ("no", "yes"), strict=True)
    ]
    try:
        codes = [host.wait(timeout=DEADLINE_SECONDS) for host in hosts]
    finally:
        for host in hosts:
            host.terminate()  # a torchrun that is killed leaves its ranks
            host.wait(timeout=60)
    lives, dies = (log.read_text() for log in logs)
    assert codes == [0, 0], lives + dies
    assert lives.count("restarts 0") == 2 and "restarts 1" not in lives
    assert dies.count("restarts 0") == 1 and dies.count("restarts 1") == 1
    assert (lives + dies).count("train: resuming from step-000002") == 1
    assert logged_losses(run) == logged_losses(whole)
    assert _same_bits(saved_tensors(run), saved_tensors(whole))
    manifest = json.loads(run.manifest_path("train").read_text())
    assert manifest["finished"] and manifest["steps"] == 6 and len(manifest["sessions"]) == 2
