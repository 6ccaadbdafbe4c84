"""A process group of one, on one GPU: NCCL is made, joined after the warm-up and called beside recorded steps, and the
training is that of one thread. What only several ranks show is in test_processes_cuda.py, which needs two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline import cache
from pipeline.gates import memory_flat, no_compiles_after_warmup, no_eager_bodies
from pipeline.metrics import read
from tests.tiny_run import TinyRun, logged_losses, saved_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SETTINGS = (
    *("train.precision=bf16", "target.dtype=bfloat16", "compile.backend=inductor"),
    *("topology.targets=[cuda:0]", "topology.drafters=[cuda:0]", "data.features=cached"),
    *("train.evaluate_every=0", "train.steps=60", "train.checkpoint_every=20"),
)


def test_one_rank_over_nccl_ends_with_the_bits_of_one_thread_and_holds_the_same_memory_over_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cached features and a whole optimizer. With features online and a sharded one it was not so: NOTES.md."""
    bench = TinyRun.make(tmp_path)
    bench.use(monkeypatch)
    monkeypatch.setattr(cache, "compile_once", lambda config, folder, drafter: {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "key" / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "key" / "triton"))
    run = bench.go(*SETTINGS, "topology.workers=processes", stages=("cache", "train"))

    manifest = json.loads(run.manifest_path("train").read_text())
    gates = (no_compiles_after_warmup(manifest), no_eager_bodies(manifest))
    for gate in (*gates, memory_flat(read(run.metrics_path), manifest["sessions"])):
        assert gate.holds, gate
    assert manifest["built"] > 0

    thread = bench.go(*SETTINGS, stages=("cache", "train"))
    assert logged_losses(run) == logged_losses(thread)
    own, other = saved_weights(run), saved_weights(thread)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
