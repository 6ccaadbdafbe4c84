"""A process group of one, on one GPU: NCCL is made, joined after the warm-up and called beside recorded steps, and the
training is that of one thread. What only several ranks show is in test_processes_cuda.py, which needs two GPUs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import cache
from pipeline.gates import memory_flat, no_compiles_after_warmup, no_eager_bodies
from pipeline.metrics import read
from pipeline.runs import Run
from tests.tiny_run import TinyRun, logged_losses, saved_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SETTINGS = (
    *("train.precision=bf16", "target.dtype=bfloat16", "compile.backend=inductor"),
    *("topology.targets=[cuda:0]", "topology.drafters=[cuda:0]"),
    *("train.evaluate_every=0", "train.steps=60", "train.checkpoint_every=20"),
)


@pytest.mark.parametrize(
    "how",
    [("data.features=cached",), ("data.features=online", "topology.shard_optimizer=true")],
    ids=["cached", "online, sharded"],
)
def test_one_rank_over_nccl_is_one_thread_bit_for_bit_which_loads_what_the_rank_built_or_builds_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    """Built anew, the kernels once were others: they were chosen by what was fastest that time."""
    bench = TinyRun.make(tmp_path)
    bench.use(monkeypatch)
    monkeypatch.setattr(cache, "compile_once", lambda config, folder, drafter: {})
    shared = "topology.shard_optimizer=false"

    def trained(key: str, *overrides: str) -> tuple[Run, dict[str, Any]]:
        torch.compiler.reset()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / key / "inductor"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / key / "triton"))
        run = bench.go(*SETTINGS, *how, *overrides, stages=("cache", "train"))
        return run, json.loads(run.manifest_path("train").read_text())

    rank, manifest = trained("one", "topology.workers=processes")
    gates = (no_compiles_after_warmup(manifest), no_eager_bodies(manifest))
    for gate in (*gates, memory_flat(read(rank.metrics_path), manifest["sessions"])):
        assert gate.holds, gate
    assert manifest["built"] > 0 and manifest["loaded"] == 0

    thread, own = trained("one", shared)
    assert own["built"] == 0 and own["loaded"] == manifest["built"]
    anew, built = trained("another", shared, "name=anew")
    assert built["built"] == manifest["built"]
    expected = saved_weights(rank)
    for other in (thread, anew):
        assert logged_losses(other) == logged_losses(rank)
        found = saved_weights(other)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_a_rank_loads_all_that_the_cache_stage_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: str
) -> None:
    """It sees its own GPU only, by the number that the stage compiled for, wherever its weights lie."""
    bench = TinyRun.make(tmp_path)
    bench.use(monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "key" / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "key" / "triton"))
    how = ("data.features=online", "topology.workers=processes", f"topology.shard_optimizer={sharded}")
    run = bench.go(*SETTINGS, *how, "train.steps=4", stages=("cache", "train"))
    built = json.loads(run.manifest_path("cache").read_text())["compile"]
    trained = json.loads(run.manifest_path("train").read_text())
    assert built["built"] == 3 and built["graphs"] == 3
    assert (trained["built"], trained["loaded"]) == (0, 3)
    assert trained["workers"] == [f"drafter-0 on cuda:0 of {socket.gethostname()} (flex)"]
