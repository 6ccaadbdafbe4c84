"""CUDA graphs of a step and of the target's forward, on a real GPU: the plain step's numbers, and nothing allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash.compile import CompileGate
from pipeline.batches import Collator
from pipeline.config import ROW_LEVELS
from pipeline.replica import Borrowed, Replica
from pipeline.target_forward import TargetForward, target_features
from tests.drafters import random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_replays_equal_plain_steps_and_allocate_nothing(precision: str) -> None:
    target: Any = tiny_model().cuda()
    config = tiny_config(
        data={"buckets": [64], "features": "online"},
        train={"micro_batch": 4, "batch_size": 8, "num_anchors": 6, "precision": precision},
        drafter={"attention": "flex"},
        compile={"backend": "inductor"},
        topology={"targets": ["cuda:0"], "drafters": ["cuda:0"]},
    )
    drafter = random_drafter()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    gate = CompileGate(workers=1)
    replica = Replica("one", config, drafter.config, drafter, Borrowed.of(target, CUDA, dtype), CUDA, gate)
    collator = Collator(config, drafter.config, made_up_samples(40))
    batches = [collator.collate(0, 64, tuple(range(4 * i, 4 * i + 4))).to(CUDA) for i in range(8)]
    taps = drafter.config.target_layer_ids
    features = [target_features(target, batch, taps, False).to(dtype) for batch in batches]
    with gate.worker("one"):
        gate.warm_up(replica.warm_up)
        assert len(replica.recordings) == 2 * ROW_LEVELS
        for numbers in ((0,), (1, 2), (3, 4, 5)):
            found = []
            for run in (replica.forward_backward, replica._run):
                with gate.step():
                    sums = [run(batches[i], features[i]) for i in numbers]
                found.append((torch.stack(sums), [g.clone() for g in replica.optimizer.gradients]))
                replica.optimizer.forget()
            (first, gradients), (expected, exact) = found
            torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
            for one, other in zip(gradients, exact, strict=True):
                assert float((one - other).abs().max()) <= 2e-2 * float(other.abs().max()) + 1e-6
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        reserved = torch.cuda.memory_reserved()
        with gate.step():
            for batch, given in zip(batches, features, strict=True):
                replica.forward_backward(batch, given)
        torch.cuda.synchronize()
        # The sums that are handed out are all that a replay allocates.
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= len(batches)
        assert torch.cuda.memory_reserved() == reserved
    gate.close()


@pytest.mark.parametrize("packed", [False, True])
def test_the_targets_graph_gives_its_features_and_waits_for_nothing(packed: bool) -> None:
    target: Any = tiny_model().cuda()
    config = tiny_config(
        data={"buckets": [64], "samples_per_row": 3 if packed else 1}, train={"micro_batch": 4, "batch_size": 4}
    )
    drafter = random_drafter().config
    samples = made_up_samples(40)
    collator = Collator(config, drafter, samples)
    forward = TargetForward(target, drafter.target_layer_ids, final_state=True, packed=packed)
    gate = CompileGate(workers=1)
    with gate.worker("target"):
        gate.warm_up(lambda: forward.record([(4, 64)], gate).clear())
    gate.close()
    for start in (0, 1):
        batch = collator.collate(0, 64, tuple(range(start, start + 4)))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = target_features(target, batch, drafter.target_layer_ids, True)
        for row, held in enumerate(batch.samples):
            length = sum(len(samples[i].input_ids) for i, _ in held)
            torch.testing.assert_close(found[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4)
