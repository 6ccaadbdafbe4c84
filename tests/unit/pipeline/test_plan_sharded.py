"""What a plan says of an optimizer that is divided among drafters: memory, exchange, and when to do it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash.model import DFlashDraftModel
from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.plan import costs
from pipeline.plan.command import workload
from pipeline.plan.costs import Micro
from pipeline.plan.gpus import gpu_of
from pipeline.plan.memory import drafter_memory
from pipeline.plan.report import make_plan
from pipeline.plan.shapes import drafter_of
from pipeline.plan.split import split_of
from tests.unit.pipeline.test_plan import BASE, H200, PAPER, PRESET, QWEN, WORK


def test_a_sharded_optimizer_is_planned_and_proposed_where_only_it_fits() -> None:
    base = [*BASE, "train.batch_size=8", "train.micro_batch=1", "data.features=cached"]
    small, whole = gpu_of("h200,memory=22"), load_config(PRESET, base)
    with pytest.raises(ConfigError) as caught:
        make_plan(whole, QWEN, small, 8, workload(whole))
    proposed = "topology.workers: processes and topology.shard_optimizer: true"
    assert caught.value.where == "train.micro_batch" and proposed in str(caught.value)
    sharded_ = "topology.workers=processes", "topology.shard_optimizer=true"
    sharded = load_config(PRESET, [*base, *sharded_])
    plan = make_plan(sharded, QWEN, small, 8, workload(sharded))
    assert plan.placings[0].drafters == 8 and all(split.drafters > 1 for split in plan.placings)
    P = plan.drafter_parameters
    assert plan.drafter_memory["float32 weights, gradients, moments"] == pytest.approx((4 + 12 / 8) * P, rel=0.02)
    with pytest.raises(ConfigError) as caught:
        make_plan(sharded, QWEN, small, 1, workload(sharded))  # among one there is nothing to divide
    assert proposed not in str(caught.value)
    alone = load_config(PRESET, [*base, "train.batch_size=1", *sharded_])  # one micro-batch, for one drafter
    with pytest.raises(ConfigError, match=r"needs 2\d GiB, h200 has 21"):
        make_plan(alone, QWEN, small, 8, workload(alone))


def test_a_sharded_optimizer_sends_less_and_updates_its_own_part() -> None:
    drafter = drafter_of(load_config(PRESET, PAPER), QWEN)
    P, share = costs.drafter_parameters(drafter), costs.kept_share(drafter, 4)
    both = [costs.exchange_seconds(drafter, H200, 4, sharded=sharded) for sharded in (False, True)]
    assert both == pytest.approx([8 * P * 3 / 4 / H200.link, 6 * P * 3 / 4 / H200.link], rel=0.02)
    whole, part = (split_of(replace(WORK, kept=kept), 0, 4, 0.0, shared=True) for kept in ((), (1, 0.5, 0.4, share)))
    saved = whole.drafter_busy - part.drafter_busy
    assert saved == pytest.approx((1 - share) * WORK.optimizer.alone) and saved > 0


def test_a_parameter_that_is_larger_than_an_even_share_is_kept_by_one() -> None:
    """fc of five taps, D x 5 D: among many ranks it decides what the fullest one keeps."""
    drafter = drafter_of(load_config(PRESET, [*PAPER, "drafter.num_layers=1"]), QWEN)
    fc = 5 * 4096 * 4096
    P = sum(p.numel() for p in DFlashDraftModel(drafter).parameters())
    assert costs.kept_share(drafter, 1) == 1
    assert costs.kept_share(drafter, 64) == fc / P > 1 / 8
    micro = Micro(rows=1, length=3072, anchors=512, block=16)
    held = drafter_memory(drafter, QWEN, micro, head_rows=2048, keepers=64)["float32 weights, gradients, moments"]
    assert held == pytest.approx((4 + 12 * fc / P) * costs.drafter_parameters(drafter))
