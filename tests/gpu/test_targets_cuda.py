"""Targets on GPUs of their own: features go from one to the other without the host, in order, and memory stays flat."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dflash.compile import CompileGate
from pipeline import cache
from pipeline.batches import Collator, MicroBatch
from pipeline.gates import memory_flat
from pipeline.metrics import read
from pipeline.runs import Run
from pipeline.target_forward import TargetForward, target_features
from pipeline.topology import OnlineFeatures, out_of_reach
from tests.tiny import tiny_model
from tests.tiny_run import TinyRun, made_up_samples, tiny_config, tiny_drafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one for a target, one for a drafter"),
]

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
LAYERS, BUCKET, ROWS = (1, 3), 64, 4
COUNT = 60


def _batches() -> list[MicroBatch]:
    config = tiny_config(data={"buckets": [BUCKET]}, train={"batch_size": ROWS, "micro_batch": ROWS})
    collator = Collator(config, tiny_drafter(), made_up_samples(COUNT * ROWS))
    return [collator.collate(0, BUCKET, tuple(range(ROWS * i, ROWS * (i + 1)))) for i in range(COUNT)]


def _taken(homes: list[torch.device], batches: list[MicroBatch], device: torch.device) -> Iterator[Tensor]:
    """Yield what a drafter on `device` gets of targets on `homes`, recorded as in a run, while they run ahead."""
    gate = CompileGate(workers=len(homes) + 1)
    copies: list[Any] = [tiny_model().to(home) for home in homes]
    forwards = [TargetForward(one, LAYERS, final_state=False, packed=False) for one in copies]
    online = OnlineFeatures(forwards, gate, 1, shapes=[(ROWS, BUCKET)])
    threads = [
        threading.Thread(target=online.work, args=(t, batches[t :: len(homes)]), daemon=True) for t in range(len(homes))
    ]
    for thread in threads:
        thread.start()
    try:
        with gate.worker("drafter-0"):
            gate.warm_up(lambda: None)
            for _ in batches:
                yield online.take(0, device, torch.float32)[1]
    finally:
        online.stopping.set()
        for thread in threads:
            thread.join(30)
        gate.close()


@pytest.mark.parametrize("homes", [[FIRST], [FIRST, SECOND]], ids=["apart", "one of two apart"])
def test_features_arrive_whole_while_the_targets_run_ahead(homes: list[torch.device]) -> None:
    """The drafter's GPU is kept busy, so that a copy that did not wait for its turn would bring something else."""
    batches, target = _batches(), tiny_model().to(SECOND)
    load = torch.randn(2048, 2048, device=SECOND)
    found = []
    for features in _taken(homes, batches, SECOND):
        for _ in range(5):
            load = (load @ load).clamp(-1, 1)
        found.append(features.clone())
    assert load.isfinite().all()
    for batch, features in zip(batches, found, strict=True):
        expected = target_features(target, batch, LAYERS, False)
        for row, length in enumerate(batch.tokens_bS.count_nonzero(1).tolist()):
            torch.testing.assert_close(features[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4)


def test_features_do_not_come_by_way_of_the_host() -> None:
    if pairs := out_of_reach([FIRST], [SECOND]):
        pytest.skip(f"these GPUs do not reach each other: {pairs}")
    taken = _taken([FIRST], _batches(), SECOND)
    next(taken)  # the warm-up, which compares the recorded forward on the host, is over
    for device in (FIRST, SECOND):
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        assert sum(1 for _ in taken) == COUNT - 1
        torch.cuda.synchronize(SECOND)
    copies = [event.name for event in watched.events() if event.name.startswith("Memcpy")]
    assert sum("PtoP" in name for name in copies) >= COUNT - 1  # a copy is launched when its features are taken
    assert not any("DtoH" in name for name in copies), set(copies)


@pytest.mark.timeout(600)
def test_one_target_or_two_train_to_the_same_bits_and_memory_is_flat_on_every_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = TinyRun.make(tmp_path)
    bench.use(monkeypatch)
    monkeypatch.setattr(cache, "compile_once", lambda config, folder, drafter: {})
    settings = (
        *("data.features=online", "train.precision=bf16", "target.dtype=bfloat16", "compile.backend=inductor"),
        *("train.steps=60", "train.evaluate_every=0", "topology.drafters=[cuda:1]"),
    )
    found = {}
    for targets in ("[cuda:0]", "[cuda:1]", "[cuda:0, cuda:1]"):
        run: Run = bench.go(*settings, f"topology.targets={targets}", stages=("cache", "train"))
        records = read(run.metrics_path)
        assert memory_flat(records, [{"from_step": 0, "to_step": len(records)}]).holds
        assert records[-1]["compiles_after_warmup"] == 0
        found[targets] = [record["loss"] for record in records]
    assert found["[cuda:0]"] == found["[cuda:1]"] == found["[cuda:0, cuda:1]"]
