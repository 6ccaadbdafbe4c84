"""The mask predicate against plain loops, and flex's tiles against the dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.masks import FLEX_TILE, MaskLayout, dense_mask, flex_mask, layer_layout
from tests.drafters import drafter_config

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 3},
    {"window": 6, "causal": True},
    {"window": 3, "window_reading": "anchor"},
    {"window": 3, "window_reading": "anchor", "causal": True},
]


def _by_the_sentence(anchors: list[int], layout: MaskLayout, documents: list[int] | None = None) -> list[list[bool]]:
    """The predicate in words: positions, blocks, slots and documents, no index arithmetic shared with the code."""
    keys = [("context", p, -1, -1) for p in range(layout.context_len)]
    block_slots = [
        ("block", anchor + slot, number, slot)
        for number, anchor in enumerate(anchors)
        for slot in range(layout.block_size)
    ]
    keys += block_slots
    table = []
    for _, position, number, slot in block_slots:
        if slot < layout.first_slot:
            continue
        row = []
        for kind, key_position, key_number, key_slot in keys:
            if kind == "context":
                sees = key_position < anchors[number]
                sees = sees and (documents is None or documents[key_position] == documents[anchors[number]])
            else:
                sees = key_number == number and (not layout.causal or key_slot <= slot)
            if layout.window is not None and layout.window_reading == "slot":
                sees = sees and abs(position - key_position) < layout.window
            elif layout.window is not None and kind == "context":
                sees = sees and key_position >= anchors[number] - layout.window
            row.append(sees)
        table.append(row)
    return table


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_mask_is_what_the_sentence_says(kind: dict[str, Any]) -> None:
    """Window table by position: vllm#40898 and anatomy 1.6, where six projects count differently."""
    anchors = [[2, 5, 7, 12], [0, 3, 4, 0]]
    layout = MaskLayout(context_len=13, block_size=4, **kind)
    mask = dense_mask(torch.tensor(anchors), layout)
    assert mask.shape == (2, 1, 16, 13 + 16)
    for row, places in zip(mask[:, 0].tolist(), anchors, strict=True):
        assert row == _by_the_sentence(places, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_shows_a_block_its_own_document_only(kind: dict[str, Any]) -> None:
    """speculators lets blocks near a document's end reach into the next one (anatomy 2.8)."""
    documents, starts = [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], {0: 0, 1: 3, 2: 8}
    anchors = [1, 3, 6, 9]
    layout = MaskLayout(context_len=12, block_size=4, **kind)
    starts_bN = torch.tensor([[starts[documents[a]] for a in anchors]])
    mask = dense_mask(torch.tensor([anchors]), layout, starts_bN)
    assert mask[0, 0].tolist() == _by_the_sentence(anchors, layout, documents)
    assert not torch.equal(mask, dense_mask(torch.tensor([anchors]), layout)), "without the starts nothing is hidden"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_from_slot_1_on_see_what_they_see_among_all(kind: dict[str, Any], packed: bool) -> None:
    """Slot 0 drafts nothing, but it stays a key of its block."""
    anchors = torch.tensor([[2, 5, 7, 12], [0, 3, 4, 0]])
    starts = anchors // 5 * 5 if packed else None
    whole = dense_mask(anchors, MaskLayout(13, 4, **kind), starts)
    layout = MaskLayout(13, 4, first_slot=1, **kind)
    mask = dense_mask(anchors, layout, starts)
    assert mask.shape == (2, 1, 12, 13 + 16) and layout.query_slots == 3
    assert torch.equal(mask, whole.unflatten(2, (4, 4))[:, :, :, 1:].flatten(2, 3))
    documents = [position // 5 for position in range(13)] if packed else None
    for row, places in zip(mask[:, 0].tolist(), anchors.tolist(), strict=True):
        assert row == _by_the_sentence(places, layout, documents)
    assert mask[0, 0, torch.arange(4) * 3, 13 + torch.arange(4) * 4].all(), "a slot 1 does not see its slot 0"


WINDOW_TABLE: dict[str, tuple[bool, str, list[list[int]]]] = {
    # reader: (causal, window_reading, what each of 4 slots of anchor 6 sees with W = 4; 8.. are the block's slots)
    "z-lab, SpecForge, SGLang, vLLM": (True, "slot", [[3, 4, 5, 8], [4, 5, 8, 9], [5, 8, 9, 10], [8, 9, 10, 11]]),
    "Model-Optimizer, Automodel": (
        False,
        "slot",
        [[3, 4, 5, 8, 9, 10, 11], [4, 5, 8, 9, 10, 11], [5, 8, 9, 10, 11], [8, 9, 10, 11]],
    ),
    "speculators": (
        True,
        "anchor",
        [[2, 3, 4, 5, 8], [2, 3, 4, 5, 8, 9], [2, 3, 4, 5, 8, 9, 10], [2, 3, 4, 5, *range(8, 12)]],
    ),
}


@pytest.mark.parametrize("reader", WINDOW_TABLE)
def test_the_window_table_of_the_projects(reader: str) -> None:
    """Anatomy 1.6 and 6.31 (vllm#40898): what a sliding layer sees by each project's reading, written out by hand.

    Ours is the first: W keys end at the slot's own position, in the context and in the block, and the layer is causal
    unless the config says otherwise.
    """
    causal, reading, seen = WINDOW_TABLE[reader]
    layout = MaskLayout(8, 4, window=4, causal=causal, window_reading=reading)
    mask = dense_mask(torch.tensor([[6]]), layout)[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in mask] == seen


def test_a_layers_layout_follows_the_config() -> None:
    sliding = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7}
    mixed = drafter_config(**sliding, is_causal=None)
    assert [layer_layout(mixed, i, 9) for i in (0, 1)] == [MaskLayout(9, 4, 7, True), MaskLayout(9, 4, None, False)]
    both = drafter_config(**sliding, is_causal=True, window_reading="anchor")
    assert layer_layout(both, 0, 9) == MaskLayout(9, 4, 7, True, "anchor")
    assert layer_layout(both, 1, 9).causal


def test_the_anchors_own_feature_is_not_seen() -> None:
    """At decode the target has not run on the anchor yet: strictly before (SpecForge#470)."""
    mask = dense_mask(torch.tensor([[5]]), MaskLayout(context_len=8, block_size=4))
    assert mask[0, 0, :, :8].tolist() == [[True] * 5 + [False] * 3] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_place_sees_no_context_and_no_row_is_empty(kind: dict[str, Any]) -> None:
    """A dense softmax over an empty row is NaN (Automodel#2826)."""
    layout = MaskLayout(context_len=10, block_size=4, **kind)
    mask = dense_mask(torch.tensor([[3, 6, 0, 0]]), layout)[0, 0]
    assert not mask[8:, :10].any()
    assert mask.any(-1).all()
    assert mask[torch.arange(16), 10 + torch.arange(16)].all()


def _tiles(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each 128 x 128 tile of a (Q, S + Q) mask whether any and whether all of its real pairs are allowed."""
    rows, columns = -(-dense.shape[0] // FLEX_TILE), -(-dense.shape[1] // FLEX_TILE)
    cut = [
        [dense[r * FLEX_TILE : (r + 1) * FLEX_TILE, c * FLEX_TILE : (c + 1) * FLEX_TILE] for c in range(columns)]
        for r in range(rows)
    ]
    return torch.tensor([[bool(t.any()) for t in row] for row in cut]), torch.tensor(
        [[bool(t.all()) for t in row] for row in cut]
    )


def _listed(counts: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """Return which tiles a (rows,) count and (rows, columns) index list names."""
    table = torch.zeros(len(counts), num_columns, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        table[row, indices[row, :count].long()] = True
    return table


def _random_places(context_len: int, num_anchors: int, num_empty: int, seed: int) -> Tensor:
    """Return sorted anchors followed by empty places, which hold 0 and so are not in order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(context_len - 1, generator=generator)[: num_anchors - num_empty].sort().values
    return torch.cat((drawn, torch.zeros(num_empty, dtype=torch.long)))


SHAPES = [
    (512, 32, 16, 0),  # everything a multiple of 128
    (300, 13, 16, 3),  # Q = 208: the second row of tiles is partly padding
    (700, 40, 10, 5),  # blocks straddle tiles
    (129, 7, 10, 0),  # one row of tiles, S just past a tile
    (100, 30, 8, 29),  # S within one tile, one real block
    (640, 50, 4, 20),
    (600, 13, 16, 0),  # the partly filled row of tiles has far anchors only, so a whole tile of context before them
]


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"causal": True},
        {"window": 50},
        {"window": 200, "causal": True},
        {"window": 150, "window_reading": "anchor"},
    ],
)
@pytest.mark.parametrize(("context_len", "num_anchors", "block_size", "num_empty"), SHAPES)
def test_flex_tiles_and_pairs_agree_with_the_dense_mask(
    context_len: int, num_anchors: int, block_size: int, num_empty: int, kind: dict[str, Any], first_slot: int
) -> None:
    """From slot 1 on a block has 15, 9, 7 or 3 queries: a row of tiles begins anywhere in a block."""
    layout = MaskLayout(context_len, block_size, first_slot=first_slot, **kind)
    anchors = torch.stack([_random_places(context_len, num_anchors, num_empty, seed) for seed in (0, 1)])
    _compare(anchors, layout)
    borders = torch.arange(0, context_len, 90)  # documents of 90 tokens
    starts = borders[torch.searchsorted(borders, anchors, right=True) - 1]
    _compare(anchors, layout, starts)


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("reading", ["slot", "anchor"])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_tiles_are_right_wherever_the_edge_of_a_window_falls(causal: bool, reading: str, first_slot: int) -> None:
    """One row of tiles moves over the context in steps of 12, past every edge of a tile and of the window."""
    layout = MaskLayout(600, 16, window=400, causal=causal, window_reading=reading, first_slot=first_slot)
    for first in range(2, 590, 12):
        _compare(torch.arange(first, first + 8)[None], layout)


def _compare(anchors: Tensor, layout: MaskLayout, starts: Tensor | None = None) -> None:
    """Compare each sample's tiles and pairs with the dense mask."""
    dense = dense_mask(anchors, layout, starts)
    flex = flex_mask(anchors, layout, starts)
    num_queries, num_keys = dense.shape[2:]
    assert flex.seq_lengths == (num_queries, num_keys)
    padded = -(-num_queries // FLEX_TILE) * FLEX_TILE  # flex asks there too, and may not leave the anchors
    pairs = flex.mask_mod(
        torch.arange(len(anchors))[:, None, None],
        torch.tensor(0),
        torch.arange(padded)[None, :, None],
        torch.arange(num_keys)[None, None, :],
    )
    assert torch.equal(pairs[:, :num_queries], dense[:, 0])
    assert flex.full_kv_num_blocks is not None and flex.full_kv_indices is not None
    for sample in range(len(anchors)):
        some, every = _tiles(dense[sample, 0])
        columns = some.shape[1]
        partial = _listed(flex.kv_num_blocks[sample, 0], flex.kv_indices[sample, 0], columns)
        full = _listed(flex.full_kv_num_blocks[sample, 0], flex.full_kv_indices[sample, 0], columns)
        assert not (partial & full).any()
        assert not (some & ~(partial | full)).any(), "an allowed pair lies in a tile that flex skips"
        assert not (full & ~every).any(), "a tile that flex does not check holds a forbidden pair"
        whole = torch.arange(1, len(some) + 1)[:, None] * FLEX_TILE <= num_queries
        assert not (full & ~whole).any(), "queries of padding would be computed without the mask"
        if layout.window is None and not layout.causal and starts is None:  # the tiles are exact there
            assert torch.equal(partial | full, some)
            assert torch.equal(full, every & whole)


def test_sorted_anchors_leave_more_tiles_out_than_shuffled_ones() -> None:
    """Random order cost 3.7 h against 2.1 h for the same run (speculators#823); counted here in tiles."""
    layout = MaskLayout(context_len=2048, block_size=16)
    ordered = _random_places(2048, 128, 0, seed=3)
    shuffled = ordered[torch.randperm(128, generator=torch.Generator().manual_seed(4))]

    def evaluated(anchors: Tensor) -> int:
        return int(flex_mask(anchors[None], layout).kv_num_blocks.sum())

    # Two per row of tiles is the least: the edge of the context and the block itself.
    assert evaluated(ordered) <= 16 * 5
    assert evaluated(shuffled) > 2 * evaluated(ordered)


def test_building_the_flex_mask_makes_nothing_of_the_size_of_all_pairs() -> None:
    """torch's own builder evaluates every pair: 7 GB at Q = 24,576 (speculators#731). Here it would be 0.7 GB."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    anchors, layout = _random_places(4096, 1536, 0, seed=0)[None], MaskLayout(context_len=4096, block_size=16)
    with Watch():
        flex_mask(anchors, layout)
    num_queries = 1536 * 16
    assert 0 < largest < num_queries * (4096 + num_queries) / 1000
