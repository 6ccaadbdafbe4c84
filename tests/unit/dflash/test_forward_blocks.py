"""Training's forward, which leaves out what no loss reads, against the plain one in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash.acceptance import layer_masks
from dflash.masks import MaskLayout, dense_mask
from tests.drafters import random_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

F64 = torch.float64
ROWS, ANCHORS, CONTEXT = 2, 7, 40
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, "is_causal": True}


@dataclass(frozen=True)
class Case:
    """A drafter's settings, and whether its rows are packed with documents."""

    drafter: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


CASES = {
    "plain": Case(),
    "packed": Case(packed=True),
    "sliding and causal": Case(MIXED),
    "sliding last, packed": Case(
        {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6, "is_causal": None}, packed=True
    ),
    "window by the anchor": Case({**MIXED, "window_reading": "anchor"}),
    "one layer": Case({"num_hidden_layers": 1}),
    "three layers": Case({"num_hidden_layers": 3}),
    "biases": Case({"attention_bias": True}),
    "two slots": Case({"block_size": 2}),
    "convolution": Case({"conv_kernel_size": 2, "selector_rank": 8}, packed=True),
}
APART = [name for name, case in CASES.items() if "conv_kernel_size" not in case.drafter]


class Blocks:
    """A drafter and the blocks of two rows, the last place of each empty (anchor 0)."""

    def __init__(self, case: Case) -> None:
        self.drafter = random_drafter(dtype=F64, **case.drafter)
        config, generator = self.drafter.config, torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=F64)

        self.features = drawn(ROWS, CONTEXT, config.feature_size)
        self.anchor_states = drawn(ROWS, ANCHORS, config.hidden_size)
        self.mask_state = drawn(config.hidden_size)
        places = [torch.randperm(CONTEXT - 1, generator=generator)[: ANCHORS - 1].sort().values for _ in range(ROWS)]
        self.anchors = torch.stack([torch.cat((place, torch.zeros(1, dtype=torch.long))) for place in places])
        self.starts = self.anchors // 15 * 15 if case.packed else None  # documents of 15 tokens
        block_start = self.anchors - (0 if self.starts is None else self.starts)
        self.positions = (block_start[:, :, None] + torch.arange(config.block_size)).flatten(1)
        self.context_positions = torch.arange(CONTEXT)[None] % (15 if case.packed else CONTEXT)

    def masks(self, *, apart: bool, shift: int = 0) -> list[Any]:
        return layer_masks(self.drafter, self.anchors + shift, CONTEXT, "sdpa", self.starts, apart=apart)

    def whole(self) -> Tensor:
        """Return the states (b, N, B, D) of `forward`, slot by slot."""
        slots = self.mask_state.expand(ROWS, ANCHORS, self.drafter.config.block_size - 1, -1)
        embeddings = torch.cat((self.anchor_states[:, :, None], slots), dim=2).flatten(1, 2)
        states = self.drafter(
            self.features, embeddings, self.positions, self.masks(apart=False), "sdpa", self.context_positions
        )
        return states.unflatten(1, (ANCHORS, -1))

    def short(self, masks: list[Any] | None = None) -> Tensor:
        """Return the same of `forward_blocks`."""
        masks = masks or self.masks(apart=self.drafter.drafts_slots_apart)
        states = self.drafter.forward_blocks(
            self.features, self.anchor_states, self.mask_state, self.positions, masks, "sdpa", self.context_positions
        )
        return states.unflatten(1, (ANCHORS, -1))

    def gradients(self, states: Tensor, first_slot: int = 1) -> dict[str, Tensor]:
        """Return the gradient of every parameter of a loss that reads the slots from first_slot on."""
        weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
        weight[:, :, :first_slot] = 0
        named = {n: p for n, p in self.drafter.named_parameters() if not n.startswith("candidate_selector.")}
        return dict(
            zip(
                named,
                torch.autograd.grad((states * weight).sum(), list(named.values()), retain_graph=True),
                strict=True,
            )
        )


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("name", CASES)
def test_states_and_every_gradient_are_those_of_the_plain_forward(name: str) -> None:
    blocks = Blocks(CASES[name])
    states, expected = blocks.short(), blocks.whole()
    torch.testing.assert_close(states[:, :, 1:], expected[:, :, 1:], rtol=0, atol=1e-11)
    gradients = blocks.gradients(expected)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    assert _largest(blocks.gradients(states), gradients) < 1e-10
    # The comparison is no formality: slot 0's state does count where a loss reads it, and so does a mask one off.
    assert _largest(blocks.gradients(expected, first_slot=0), gradients) > 1e-3
    moved = blocks.short(blocks.masks(apart=blocks.drafter.drafts_slots_apart, shift=1))
    assert (moved - expected)[:, :, 1:].abs().max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_slot_0_is_zero_where_it_is_left_out_and_a_state_where_a_convolution_needs_it(name: str) -> None:
    blocks = Blocks(CASES[name])
    assert blocks.drafter.drafts_slots_apart is (name in APART)
    first = blocks.short()[:, :, 0]
    if name in APART:
        assert (first == 0).all()
    else:
        torch.testing.assert_close(first, blocks.whole()[:, :, 0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_masks_of_the_other_kind_are_refused(name: str) -> None:
    """The queries of the last layer are fewer, so no mask of the plain forward fits them, and the other way round."""
    blocks = Blocks(CASES[name])
    with pytest.raises(RuntimeError, match="size"):
        blocks.short(blocks.masks(apart=name not in APART))


def test_only_the_last_layers_mask_begins_at_slot_1() -> None:
    drafter = random_drafter(num_hidden_layers=3)
    anchors = torch.tensor([[4, 7]])
    whole, apart = (layer_masks(drafter, anchors, 10, "eager", apart=apart) for apart in (False, True))
    assert apart[0] is apart[1] and torch.equal(apart[0], whole[0])
    assert torch.equal(apart[2], dense_mask(anchors, MaskLayout(10, 4, first_slot=1)))


def _rows_seen(blocks: Blocks, run: str) -> list[dict[str, int]]:
    """Return how many block rows each product of each layer works on in `run`; key and value projections also see the
    context, apart from them."""
    seen = [Counter[str]() for _ in blocks.drafter.layers]
    hooks = []
    for layer, counts in zip(blocks.drafter.layers, seen, strict=True):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):

                def count(module: nn.Module, given: tuple[Tensor], name: str = name, counts: Any = counts) -> None:
                    counts[name.split(".")[1]] += given[0].shape[:-1].numel()

                hooks.append(module.register_forward_pre_hook(count))
    getattr(blocks, run)()
    for hook in hooks:
        hook.remove()
    for counts in seen:
        for name in ("k_proj", "v_proj"):
            counts[name] -= ROWS * CONTEXT
    return [dict(counts) for counts in seen]


ALL, DRAFTED = ROWS * ANCHORS * 4, ROWS * ANCHORS * 3
MLP = ("o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_first_layer_projects_the_mask_slot_once_and_the_last_feeds_no_slot_0(num_layers: int) -> None:
    """The point of it: b * N + 1 rows are projected where there would be b * N * B, and slot 0 ends at the keys."""
    blocks = Blocks(Case({"num_hidden_layers": num_layers}))
    plain = _rows_seen(blocks, "whole")
    assert all(rows == ALL for layer in plain for rows in layer.values())
    short = _rows_seen(blocks, "short")
    assert {short[0][name] for name in ("q_proj", "k_proj", "v_proj")} == {ROWS * ANCHORS + 1}
    assert all(layer[name] == ALL for layer in short[:-1] for name in MLP)
    assert {short[-1][name] for name in MLP} == {DRAFTED}
    assert all(layer[name] == ALL for layer in short[1:] for name in ("k_proj", "v_proj"))
    if num_layers > 1:
        assert short[-1]["q_proj"] == DRAFTED
    assert all(layer["q_proj"] == ALL for layer in short[1:-1])


def test_a_convolution_takes_the_plain_way() -> None:
    blocks = Blocks(CASES["convolution"])
    assert _rows_seen(blocks, "short") == _rows_seen(blocks, "whole")
