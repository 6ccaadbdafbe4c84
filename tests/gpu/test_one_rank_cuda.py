"""A process group of one, on one GPU: NCCL is made, joined after the warm-up and called beside recorded steps, and the
training is that of one thread. What only several ranks show is in test_processes_cuda.py, which needs two GPUs."""

from __future__ import annotations

import json
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
