"""A whole step on a real GPU, in bf16 through flex: packed rows, soft labels and each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.compile import CompileGate
from pipeline.batches import Collator, rows_of
from pipeline.cache import CachedData
from pipeline.dense_step import compiled_equals_dense
from pipeline.replica import Borrowed, Replica
from pipeline.target_forward import target_features
from pipeline.targets import TargetFolder
from tests.drafters import drafter_config, random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dflash2": {"conv_kernel_size": 2, "selector_rank": 8},
    "markov": {"markov_rank": 8},
}


CASES = [("plain", 0.0, False), ("plain", 0.0, True), *((head, 0.3, True) for head in HEADS)]


@pytest.mark.parametrize(("head", "soft", "recorded"), CASES)
def test_a_packed_step_equals_the_dense_one_asks_for_nothing_and_keeps_its_memory(
    head: str, soft: float, recorded: bool
) -> None:
    target: Any = tiny_model().cuda()
    samples = made_up_samples(40)
    packed = {"samples_per_row": 3, "buckets": [64], "features": "online"}
    train = {"micro_batch": 4, "batch_size": 4, "num_anchors": 6, "soft_weight": soft, "precision": "bf16"}
    config = tiny_config(
        data=packed,
        train=train,
        drafter={"attention": "flex"},
        compile={"backend": "inductor", "cuda_graphs": recorded},
        topology={"targets": ["cuda:0"], "drafters": ["cuda:0"]},
    )
    drafter = random_drafter(**HEADS[head])
    data = CachedData(
        target=TargetFolder(path=Path("unused"), identity="", name=""),
        drafter=drafter_config(**HEADS[head]),
        samples=samples,
        features=None,
        answers_key="",
        prompts={},
    )
    bf16 = random_drafter(**HEADS[head]).to(torch.bfloat16)
    gate = compiled_equals_dense(config, data, target, bf16, CUDA)
    assert gate.holds, gate

    compile_gate = CompileGate(workers=1)
    borrowed = Borrowed.of(target, CUDA, torch.bfloat16)
    replica = Replica("one", config, drafter.config, drafter, borrowed, CUDA, compile_gate)
    collator = Collator(config, drafter.config, samples)
    count = len(rows_of(config, samples))
    batches = [
        collator.collate(epoch, 64, tuple((4 * epoch + i) % count for i in range(4))).to(CUDA) for epoch in range(12)
    ]
    features = [target_features(target, b, drafter.config.target_layer_ids, bool(soft)).bfloat16() for b in batches]
    held = []
    with compile_gate.worker("one"):
        compile_gate.warm_up(replica.warm_up)
        for number, (batch, given) in enumerate(zip(batches, features, strict=True)):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # libraries set themselves up at first
            try:
                with compile_gate.step():
                    sums = replica.forward_backward(batch, given)
                replica.optimizer.step(1e-3, sums[1])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert sums.isfinite().all()
            held.append(torch.cuda.memory_reserved())
    report = compile_gate.report()
    compile_gate.close()
    assert report["compiles_after_warmup"] == 0
    assert len(set(held)) == 1, held
