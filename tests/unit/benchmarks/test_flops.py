"""The count of a step's operations against torch's own counter, and against the reference case by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import REFERENCE, Case, StepFlops, allowed_pairs, expected_pairs, optimizer_bytes, step_flops
from dflash.acceptance import layer_masks
from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss, make_rows
from tests.drafters import drafter_config

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES, CONTEXT, ANCHORS = 2, 24, 5


def counted(config: DrafterConfig, attention: str) -> tuple[int, int]:
    """Return what torch counts for one forward and backward of a float32 drafter, and the supervised rows."""
    torch.manual_seed(0)
    model = DFlashDraftModel(config)
    anchors = torch.randint(1, CONTEXT, (SEQUENCES, ANCHORS)).sort(dim=1).values
    K, D = config.block_size, config.hidden_size
    valid = torch.ones(SEQUENCES * ANCHORS, K, dtype=torch.bool)
    valid[:, 0] = valid[-1, 2:] = False
    rows = make_rows(torch.ones_like(valid, dtype=torch.long), valid, 12)
    features = torch.randn(SEQUENCES, CONTEXT, config.feature_size)
    embeddings, head = torch.randn(SEQUENCES, ANCHORS * K, D), torch.randn(config.vocab_size, D)
    positions = (anchors[:, :, None] + torch.arange(K)).flatten(1)
    masks = layer_masks(model, anchors, CONTEXT, attention)
    with FlopCounterMode(display=False) as counter:
        states = model(features, embeddings, positions, masks, attention)
        loss = head_loss(states.flatten(0, 1)[rows.index_R], head, rows, Weighting(gamma=2.0))
        loss.numerator.backward()
    return counter.get_total_flops(), int(valid.sum())


def formula(config: DrafterConfig, num_rows: int, pairs: float) -> StepFlops:
    shape = {"sequences": SEQUENCES, "context_len": CONTEXT, "num_anchors": ANCHORS}
    return step_flops(config, **shape, num_rows=num_rows, pairs=pairs)


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_hidden_layers": 1, "target_layer_ids": (0, 1, 2)}, {"num_key_value_heads": 4, "head_dim": 24}],
)
def test_eager_attention_does_exactly_what_the_formula_says_with_all_pairs(changes: dict[str, object]) -> None:
    config = drafter_config(**changes)
    measured, num_rows = counted(config, "eager")
    queries = ANCHORS * config.block_size
    every_pair = SEQUENCES * queries * (CONTEXT + queries)  # a dense product makes those that the mask forbids, too
    assert measured == formula(config, num_rows, every_pair).total


def test_all_but_attention_is_the_same_through_sdpa_whose_cpu_kernel_torch_does_not_count() -> None:
    config = drafter_config()
    measured, num_rows = counted(config, "sdpa")
    assert measured == formula(config, num_rows, 0).total


def test_the_allowed_pairs_are_those_of_the_mask() -> None:
    config = drafter_config()
    anchors = torch.tensor([[0, 3, 9, 9, 20], [1, 2, 3, 22, 23]])
    model = DFlashDraftModel(config)
    mask = layer_masks(model, anchors, CONTEXT, "eager")[0]
    assert allowed_pairs(anchors, config.block_size) == int(mask.sum())
    drawn = torch.stack([torch.randperm(4096)[:512] for _ in range(16)])
    assert allowed_pairs(drawn, 16) == pytest.approx(expected_pairs(16, 4096, 512, 16), rel=0.02)


def reference() -> StepFlops:
    case = REFERENCE
    shape = (case.sequences, case.context_len, case.num_anchors)
    num_rows = case.num_anchors * (case.block_size - 1)
    pairs = expected_pairs(*shape, case.block_size)
    names = dict(zip(("sequences", "context_len", "num_anchors"), shape, strict=True))
    return step_flops(case.drafter(), **names, num_rows=num_rows, pairs=pairs)


def test_the_reference_step_is_71_5_teraflop_and_72_5_as_it_is_quoted() -> None:
    """anatomy 2.7 has the forward's parts: layers 15.8, attention 1.0, fc and context 0.8 TFLOP."""
    found = reference()
    assert found.layers / 3e12 == pytest.approx(15.805, abs=5e-4)
    assert found.attention / 3e12 == pytest.approx(1.0415, abs=5e-5)
    assert (found.fc / 2 + found.context / 3) / 1e12 == pytest.approx(0.7731, abs=5e-5)
    assert found.head / 2e12 == pytest.approx(10.196 * 15 / 16, abs=5e-4)
    assert found.total / 1e12 == pytest.approx(71.46, abs=5e-3)
    assert found.quoted / 1e12 == pytest.approx(72.50, abs=5e-3)


def test_what_is_quoted_counts_fcs_input_and_the_scores_once_more() -> None:
    parts = StepFlops(layers=1.0, context=2.0, fc=4.0, attention=6.0, head=8.0)
    assert parts.total == 21.0
    assert parts.quoted == 21.0 + 2.0 + 1.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}, "sliding_attention"),
        ({"is_causal": True}, "causal: True"),
        ({"conv_kernel_size": 2, "selector_rank": 8}, "head"),
        ({"markov_rank": 8}, "head"),
    ],
)
def test_a_drafter_with_other_products_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(DFlashError, match=named):
        formula(drafter_config(**changes), 1, 1)
    assert formula(drafter_config(), 1, 1).total > 0


def test_the_optimizer_moves_weights_and_moments_both_ways_and_reads_the_gradient_twice() -> None:
    assert optimizer_bytes(10, rounded_copy=False) == 360
    assert optimizer_bytes(10, rounded_copy=True) == 340


def test_a_case_describes_a_drafter_of_its_target() -> None:
    drafter = Case("one", "smollm2", 1, 64, 4, 8, num_layers=3).drafter()
    assert (drafter.hidden_size, drafter.num_hidden_layers, drafter.block_size) == (576, 3, 8)
    assert drafter.target_layer_ids == (1, 8, 14, 20, 27) and drafter.mask_token_id == 49151
