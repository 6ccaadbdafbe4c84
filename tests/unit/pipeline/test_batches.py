"""Order, anchors and shapes. That losses of a resumed run are the same bits is in tests/scenarios/test_resume.py."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dflash.anchors import build_blocks, draw_anchors, sample_seed
from pipeline.batches import BatchPlan, Collator, MicroBatch, StepBatch, rows_of
from pipeline.errors import ConfigError
from tests.tiny import MASK_ID
from tests.tiny_run import made_up_samples, tiny_config, tiny_drafter

LENGTHS = [10, 30, 12, 31, 8, 9, 32, 33, 64, 11, 7]
BUCKETS = (16, 32, 64)


def _plan(batch_size: int = 3, seed: int = 0) -> BatchPlan:
    return BatchPlan(LENGTHS, BUCKETS, batch_size, seed)


def _collator(**train: int) -> Collator:
    return Collator(tiny_config(train=train), tiny_drafter(), made_up_samples(20))


def _seen(batch: MicroBatch) -> list[tuple[int, ...]]:
    """Return (row, block's anchor, place in the block, label) of each supervised slot, sorted."""
    blocks = batch.rows.index_R // 4
    rows = blocks // batch.anchors_bN.shape[1]
    anchors = batch.anchors_bN.flatten()[blocks]
    return sorted(zip(*(t.tolist() for t in (rows, anchors, batch.rows.slot_R, batch.rows.label_R)), strict=True))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 100])
def test_every_sample_comes_once_an_epoch_and_a_batch_is_of_one_bucket(batch_size: int) -> None:
    plan = _plan(batch_size)
    for epoch in range(3):
        batches = plan.epoch(epoch)
        assert len(batches) == plan.steps_per_epoch
        assert Counter(i for b in batches for i in b.indices) == Counter(range(len(LENGTHS)))
        for batch in batches:
            assert 0 < len(batch.indices) <= batch_size
            for index in batch.indices:
                assert min(bucket for bucket in BUCKETS if LENGTHS[index] <= bucket) == batch.bucket


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    assert [_plan().epoch(e) for e in range(3)] == [_plan().epoch(e) for e in range(3)]
    plan = _plan()
    later = plan.epoch(2)
    plan.epoch(0)  # asking for another epoch first changes nothing
    assert plan.epoch(2) == later
    assert [b.indices for b in plan.epoch(0)] != [b.indices for b in plan.epoch(1)]
    assert _plan(seed=1).epoch(0) != plan.epoch(0)


@pytest.mark.parametrize("stop", range(11))
def test_ten_steps_are_the_same_as_some_steps_a_stop_and_the_rest(stop: int) -> None:
    """verl#7401, accelerate#2016, TorchSpec PR 43: an epoch was skipped at its border, or another order replayed."""
    samples = made_up_samples(10)

    def steps(first: int, end: int) -> list[tuple[StepBatch, list[list[tuple[int, ...]]]]]:
        # Everything is made anew, as a new process does.
        config = tiny_config(train={"batch_size": 4, "micro_batch": 2, "num_anchors": 3})
        plan = BatchPlan([len(s.input_ids) for s in samples], (64,), 4, config.seed)
        assert plan.steps_per_epoch == 3  # so the stops at 3, 6 and 9 are at an epoch's border
        collator = Collator(config, tiny_drafter(), samples)
        return [
            (batch, [_seen(m) for m in collator.micro_batches(batch)])
            for batch in (plan.step(i) for i in range(first, end))
        ]

    whole = steps(0, 10)
    assert steps(0, stop) + steps(stop, 10) == whole
    epochs = [batch.epoch for batch, _ in whole]
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    # Anchors are drawn anew in each epoch.
    assert {str(seen) for _, seen in whole[:3]}.isdisjoint({str(seen) for _, seen in whole[3:6]})


def test_a_sample_longer_than_the_largest_bucket_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchPlan([10, 65], BUCKETS, 2, 0)
    assert str(caught.value) == (
        "data.buckets: a sample has 65 tokens, the largest bucket 64. Add a bucket or lower the length limits."
    )


@pytest.mark.parametrize("indices", [(0, 1, 2), (4,), ()])
def test_shapes_are_constant_and_missing_samples_are_harmless(indices: tuple[int, ...]) -> None:
    collator = _collator(batch_size=3, micro_batch=3, num_anchors=6)
    batch = collator.collate(0, 64, indices)
    assert batch.tokens_bS.shape == (3, 64)
    assert batch.noise_bQ.shape == batch.positions_bQ.shape == (3, 6 * 4)
    assert batch.anchors_bN.shape == (3, 6)
    missing = slice(len(indices), 3)
    assert (batch.tokens_bS[missing] == 0).all()
    assert (batch.noise_bQ[missing] == MASK_ID).all()
    assert (batch.anchors_bN[missing] == 0).all()
    assert {row for row, *_ in _seen(batch)} == set(range(len(indices)))
    assert batch.num_tokens == sum(len(s.input_ids) for s in made_up_samples(20) if s.id in _names(indices))


def _names(indices: tuple[int, ...]) -> set[str]:
    return {f"sample-{i}" for i in indices}


def test_tokens_positions_and_labels_stand_where_the_sample_has_them() -> None:
    sample = made_up_samples(20)[3]
    batch = _collator(batch_size=1, micro_batch=1, num_anchors=4).collate(0, 32, (3,))
    tokens = batch.tokens_bS[0].tolist()
    assert tokens == sample.input_ids + [0] * (32 - len(sample.input_ids))
    assert len(_seen(batch)) >= 4
    for _, anchor, slot, label in _seen(batch):
        assert slot > 0
        assert sample.loss_mask[anchor]
        assert label == sample.input_ids[anchor + slot]
    for place, anchor in enumerate(batch.anchors_bN[0].tolist()):
        block = slice(4 * place, 4 * place + 4)
        assert batch.positions_bQ[0, block].tolist() == [anchor, anchor + 1, anchor + 2, anchor + 3]
        assert batch.noise_bQ[0, block].tolist() == [sample.input_ids[anchor], MASK_ID, MASK_ID, MASK_ID]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
@pytest.mark.parametrize("indices", [tuple(range(8)), (9, 3, 17), (5,)])
def test_micro_batches_of_any_size_hold_exactly_the_steps_samples_and_their_slots(
    micro_batch: int, indices: tuple[int, ...]
) -> None:
    def slots(size: int) -> tuple[list[int], Counter[tuple[int, ...]]]:
        parts = _collator(batch_size=8, micro_batch=size, num_anchors=5).micro_batches(StepBatch(2, 64, indices))
        assert len(parts) == 8 // size
        assert all(part.tokens_bS.shape[0] == size for part in parts)
        found = Counter((part.indices[row], *rest) for part in parts for row, *rest in _seen(part))
        return [i for part in parts for i in part.indices], found

    assert slots(micro_batch) == slots(8)
    assert slots(micro_batch)[0] == list(indices)


def test_a_sample_has_the_same_anchors_beside_whichever_others_it_stands() -> None:
    collator = _collator(batch_size=3, micro_batch=3, num_anchors=4)
    alone, last = collator.collate(1, 64, (7,)), collator.collate(1, 32, (2, 11, 7))
    assert torch.equal(alone.anchors_bN[0], last.anchors_bN[2])
    assert not torch.equal(alone.anchors_bN[0], collator.collate(2, 64, (7,)).anchors_bN[0])


@pytest.mark.parametrize("per_row", [1, 3])
def test_a_row_holds_the_blocks_that_the_library_builds_for_each_sample(per_row: int) -> None:
    """The collator makes all rows at once; `draw_anchors` and `build_blocks` say what each sample's must be."""
    samples, drafter, places = made_up_samples(20), tiny_drafter(), 8
    config = tiny_config(data={"samples_per_row": per_row}, train={"num_anchors": places})
    collator, count = Collator(config, drafter, samples), len(rows_of(config, samples))
    found = 0
    for epoch, indices in enumerate([(0,), (count - 1, 1), (2, 0)]):
        batch = collator.collate(epoch, 64, indices)
        K, seen = drafter.block_size, dict[tuple[int, int], tuple[list[int], list[tuple[int, int]]]]()
        for row in range(len(indices)):
            for place, anchor in enumerate(batch.anchors_bN[row].tolist()):
                first = row * batch.noise_bQ.shape[1] + place * K
                at = (batch.rows.index_R >= first) & (batch.rows.index_R < first + K)
                if at.any():
                    noise = batch.noise_bQ[row, place * K : (place + 1) * K].tolist()
                    slots = batch.rows.slot_R[at].tolist()
                    seen[row, anchor] = (noise, list(zip(slots, batch.rows.label_R[at].tolist(), strict=True)))
        for row, held in enumerate(batch.samples):
            for sample, first in held:
                ids, mask = np.array(samples[sample].input_ids), np.array(samples[sample].loss_mask)
                drawn = draw_anchors(mask, places, sample_seed(config.seed, epoch, samples[sample].id))
                blocks = build_blocks(
                    ids, mask, drawn, num_anchors=places, block_size=K, mask_token_id=drafter.mask_token_id
                )
                for number, anchor in enumerate(drawn.tolist()):
                    slots = np.flatnonzero(blocks.valid_NK[number]).tolist()
                    labels = blocks.labels_NK[number][slots].tolist()
                    expected = (blocks.noise_NK[number].tolist(), list(zip(slots, labels, strict=True)))
                    assert seen.pop((row, first + anchor)) == expected
                    found += 1
        assert not seen
    assert found > 20
