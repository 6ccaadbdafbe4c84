"""What a replica gives the loss: the teacher of a slot is the target's state one position before its label."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.compile import CompileGate
from dflash.decode import greedy_decode
from dflash.model import DFlashDraftModel
from pipeline.batches import Collator, MicroBatch, rows_of
from pipeline.rendering import make_sample
from pipeline.replica import Borrowed, Replica, feature_width, warm_batches
from pipeline.target_forward import target_features
from tests.drafters import drafter_config, random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import tiny_config

CPU = torch.device("cpu")
PROMPTS = [[10, 200, 31, 77], [5, 6], [90, 91, 92, 93, 94, 95, 96], [40, 41], [7, 300, 7, 300, 7]]


def _replica(target: Any, samples_per_row: int, **drafter: Any) -> tuple[CompileGate, Replica, MicroBatch, Tensor]:
    """Return a gate, a replica with soft labels, a micro-batch of the target's own answers, and its features."""
    samples = [
        make_sample(f"s{i}", p, greedy_decode(target, p, max_new_tokens=9, eos_ids=())) for i, p in enumerate(PROMPTS)
    ]
    data = {"buckets": [64], "samples_per_row": samples_per_row}
    count = len(rows_of(tiny_config(data=data), samples))
    config = tiny_config(
        data=data, train={"soft_weight": 0.5, "num_anchors": 12, "batch_size": count, "micro_batch": count}
    )
    model: DFlashDraftModel = random_drafter(**drafter)
    gate = CompileGate(workers=1, backend="aot_eager")
    borrowed = Borrowed.of(target, CPU, torch.float32)
    made = Replica("one", config, model.config, model, borrowed, CPU, gate)
    batch = Collator(config, model.config, samples).collate(0, 64, tuple(range(count)))
    features = target_features(target, batch, model.config.target_layer_ids, True)
    assert features.shape[-1] == feature_width(config, model.config)
    return gate, made, batch, features


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("samples_per_row", [1, 3])
def test_on_greedy_text_the_teachers_best_token_is_the_label(samples_per_row: int, tied: bool) -> None:
    """Soft targets of slot i live at position a + i - 1 (anatomy 2.3); one later is another token's teacher."""
    target: Any = tiny_model(tie_word_embeddings=tied)
    _, replica, batch, features = _replica(target, samples_per_row)
    assert (replica.borrowed.head_VD is replica.borrowed.embedding_VD) is tied
    head = target.get_output_embeddings().weight

    def hits(teacher_RD: Tensor) -> float:
        return float(((teacher_RD @ head.T).argmax(-1) == batch.rows.label_R).float().mean())

    assert len(batch.rows.label_R) > 60
    assert hits(replica.teacher(batch, features).state_RD) == 1.0
    assert hits(replica.teacher(batch, features.roll(-1, dims=1)).state_RD) < 0.6
    early_tap = features.roll(replica.drafter.feature_size, dims=-1)  # layer 1 stands where the final state should
    assert hits(replica.teacher(batch, early_tap).state_RD) < 0.6


def _loss(gate: CompileGate, replica: Replica, batch: MicroBatch, features: Tensor) -> float:
    sums: list[Tensor] = []
    with gate.worker("one"):
        gate.warm_up(lambda: sums.append(replica.forward_backward(batch, features)))
    gate.close()
    return float(sums[0][0] / sums[0][1])


def test_a_multiplier_and_a_softcap_of_the_drafter_are_trained() -> None:
    """A key that is read from a file and left out of the loss would be exported as trained."""
    target: Any = tiny_model()
    changes: tuple[dict[str, float], ...] = (
        {},
        {"output_multiplier": 2.0},
        {"final_logit_softcapping": 0.5},
        {"input_embedding_scale": 4.0},
    )
    losses = [_loss(*_replica(target, 1, **change)) for change in changes]
    assert all(abs(loss - losses[0]) > 1e-3 * losses[0] for loss in losses[1:]), losses


@pytest.mark.parametrize("samples_per_row", [1, 3])
def test_no_batch_of_training_has_more_rows_than_the_warm_up(samples_per_row: int) -> None:
    """speculators#979: out of memory part-way through an epoch, since the first batch was not the largest."""
    config = tiny_config(
        data={"buckets": [60], "max_prompt_tokens": 4, "max_answer_tokens": 56, "samples_per_row": samples_per_row},
        train={"num_anchors": 12},
    )
    drafter = drafter_config()
    batch = warm_batches(config, drafter, 60)[0]
    warm = len(batch.rows.index_R)
    assert warm == batch.anchors_bN.numel() * (drafter.block_size - 1)
    assert int(batch.anchors_bN.max()) + drafter.block_size <= 60
    most = 0
    for prompt_len in (1, 4):
        texts = [list(range(10, 10 + 60 // samples_per_row)) for _ in range(6)]
        samples = [make_sample(f"s{i}", ids[:prompt_len], ids[prompt_len:]) for i, ids in enumerate(texts)]
        collator = Collator(config, drafter, samples)
        for epoch in range(20):
            most = max(most, len(collator.collate(epoch, 60, (0, 1)).rows.index_R))
    assert 0.8 * warm < most <= warm
