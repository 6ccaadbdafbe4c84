"""Packed rows: every sample once, and each block sees, predicts and trains what it does alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.acceptance import layer_masks
from dflash.head import block_embeddings
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss
from dflash.taps import extract_features
from pipeline.batches import Collator, MicroBatch, plan_of, rows_of
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.packing import pack_rows
from pipeline.target_forward import target_features
from tests.drafters import random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import TinyRun, made_up_samples, tiny_config

TAPS = (1, 3)


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_every_sample_is_in_one_row_and_no_row_is_too_full(most: int) -> None:
    lengths = [(7 * i) % 30 + 1 for i in range(50)]
    rows = pack_rows(lengths, 40, most)
    assert Counter(i for row in rows for i in row) == Counter(range(50))
    assert all(len(row) <= most and sum(lengths[i] for i in row) <= 40 for row in rows)
    if most == 1:
        assert rows == [(i,) for i in range(50)]
    else:
        assert len(rows) < 0.6 * 50
    assert rows == pack_rows(lengths, 40, most)


def test_best_fit_leaves_little_room() -> None:
    """20 + 20, 30 + 10, 25 + 15: three full rows where taking samples in their order would need four."""
    assert len(pack_rows([20, 30, 25, 20, 15, 10], 40, 6)) == 3


def _config(samples_per_row: int, micro_batch: int, num_anchors: int = 6) -> RunConfig:
    rows = {"samples_per_row": samples_per_row, "buckets": [64]}
    return tiny_config(
        data=rows, train={"micro_batch": micro_batch, "batch_size": micro_batch, "num_anchors": num_anchors}
    )


class _Bench:
    """A float64 target and drafter, and nine samples in rows of up to `per_row`, as one micro-batch."""

    def __init__(self, per_row: int, **drafter: Any) -> None:
        self.target: Any = tiny_model().double()
        self.drafter = random_drafter(dtype=torch.float64, target_layer_ids=TAPS, **drafter)
        samples = made_up_samples(9)
        count = len(rows_of(_config(per_row, 1), samples))
        self.config = _config(per_row, count)
        collator = Collator(self.config, self.drafter.config, samples)
        self.batch: MicroBatch = collator.collate(0, 64, tuple(range(count)))

    def features(self) -> Tensor:
        return target_features(self.target, self.batch, TAPS, final_state=False)

    def states(self, model: DFlashDraftModel, hide_borders: bool = True) -> Tensor:
        """Return the states (b, Q, D); without `hide_borders` the masks do not know of documents."""
        starts = self.batch.starts_bN if hide_borders else None
        masks = layer_masks(model, self.batch.anchors_bN, 64, "sdpa", starts)
        table = self.target.get_input_embeddings().weight
        embeddings = block_embeddings(self.batch.noise_bQ, table, model.config)
        return model(self.features(), embeddings, self.batch.positions_bQ, masks, "sdpa", self.batch.positions_bS)

    def blocks(self, states_bQD: Tensor) -> dict[tuple[int, int], Tensor]:
        """Return each block's states (B, D) by (sample, anchor counted in the sample)."""
        found = {}
        B = self.drafter.config.block_size
        for index in sorted({int(i) // B for i in self.batch.rows.index_R}):
            row, place = divmod(index, self.batch.anchors_bN.shape[1])
            anchor = int(self.batch.anchors_bN[row, place])
            sample, first = next(held for held in reversed(self.batch.samples[row]) if held[1] <= anchor)
            found[sample, anchor - first] = states_bQD[row, place * B : (place + 1) * B]
        return found

    def gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_RD = self.states(self.drafter).flatten(0, 1)[self.batch.rows.index_R]
        head = self.target.get_output_embeddings().weight
        sums = head_loss(hidden_RD, head, self.batch.rows, Weighting("dpace"))
        sums.numerator.backward()
        return sums.denominator, {n: p.grad for n, p in self.drafter.named_parameters() if p.grad is not None}


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
        "is_causal": None,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_equals_unpacked_block_by_block(layout: str) -> None:
    alone, packed = _Bench(1, **LAYOUTS[layout]), _Bench(4, **LAYOUTS[layout])
    assert alone.batch.starts_bN is None and packed.batch.starts_bN is not None
    assert len(packed.batch.samples) < len(alone.batch.samples) == 9
    with torch.no_grad():
        expected, found = alone.blocks(alone.states(alone.drafter)), packed.blocks(packed.states(packed.drafter))
        leaking = packed.blocks(packed.states(packed.drafter, hide_borders=False))
    assert expected.keys() == found.keys() and len(found) > 40
    for place, states in expected.items():
        torch.testing.assert_close(found[place], states, rtol=1e-10, atol=1e-10)
    assert any((leaking[place] - states).abs().max() > 1e-3 for place, states in expected.items())


def test_packing_changes_neither_the_loss_nor_the_gradient() -> None:
    (one, expected), (other, found) = _Bench(1).gradients(), _Bench(4).gradients()
    torch.testing.assert_close(other, one, rtol=1e-10, atol=0)
    assert expected.keys() == found.keys() and len(found) == 2 * 11 + 3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10 * float(gradient.abs().max()))


def test_the_target_sees_no_earlier_document_of_a_packed_row() -> None:
    bench = _Bench(4)
    samples = made_up_samples(9)
    packed = bench.features()
    wrong = extract_features(bench.target, bench.batch.tokens_bS, TAPS)
    differs = 0
    for row, held in enumerate(bench.batch.samples):
        for sample, first in held:
            ids = samples[sample].input_ids
            own = extract_features(bench.target, torch.tensor([ids]), TAPS)[0]
            torch.testing.assert_close(packed[row, first : first + len(ids)], own, rtol=1e-10, atol=1e-10)
            differs += bool((wrong[row, first : first + len(ids)] - own).abs().max() > 1e-3)
    assert differs == sum(len(held) - 1 for held in bench.batch.samples) > 0


def test_every_token_after_the_first_of_an_answer_is_trained_up_to_the_last_one_of_each_document() -> None:
    """Four of five trainers never start a block near the end, so EOS starves (anatomy 2.2); counted, packed."""
    samples = made_up_samples(9)
    drafter = random_drafter().config
    longest = max(len(s.input_ids) for s in samples)
    rows = len(rows_of(_config(3, 1), samples))
    batch = Collator(_config(3, rows, num_anchors=longest), drafter, samples).collate(0, 64, tuple(range(rows)))
    trained: Counter[tuple[int, int]] = Counter()
    B, N = drafter.block_size, batch.anchors_bN.shape[1]
    for index, slot, label in zip(
        *(t.tolist() for t in (batch.rows.index_R, batch.rows.slot_R, batch.rows.label_R)), strict=True
    ):
        row, place = divmod(index // B, N)
        position = int(batch.anchors_bN[row, place]) + slot
        sample, first = next(held for held in reversed(batch.samples[row]) if held[1] < position)
        assert label == samples[sample].input_ids[position - first]
        trained[sample, position - first] += 1
    for number, sample in enumerate(samples):
        answer = [t for t, supervised in enumerate(sample.loss_mask) if supervised]
        # Position p of an answer is slot i of the block at p - i, for as many i as there are anchors before it.
        expected = {(number, p): min(B - 1, p - answer[0]) for p in answer[1:]}
        assert {key: count for key, count in trained.items() if key[0] == number} == expected


def test_an_epoch_has_every_row_once_and_packing_needs_one_bucket() -> None:
    samples, config = made_up_samples(20), _config(3, 2)
    plan = plan_of(config, samples)
    rows = rows_of(config, samples)
    assert plan.steps_per_epoch == -(-len(rows) // 2)
    assert sorted(i for step in plan.epoch(1) for i in step.indices) == list(range(len(rows)))
    with pytest.raises(Exception, match="samples_per_row 3 packs rows of one length") as caught:
        tiny_config(data={"samples_per_row": 3, "buckets": [64, 128]})
    assert "keep one" in str(caught.value)


@pytest.mark.parametrize("features", ["cached", "online"])
def test_a_packed_run_passes_every_gate(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    bench = TinyRun.make(tmp_path)
    bench.use(monkeypatch)
    packed = ["data.samples_per_row=3", "data.buckets=[128]", f"data.features={features}"]
    run = bench.go(*packed, "train.batch_size=4", "train.micro_batch=1", "train.steps=6")
    assert run.verify_path.is_file()
    with pytest.raises(ConfigError, match="samples_per_row"):
        bench.config("data.samples_per_row=3", "data.buckets=[64, 128]")
