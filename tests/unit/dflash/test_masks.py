"""The mask predicate against plain loops, and flex's tiles against the dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.masks import FLEX_TILE, MaskLayout, dense_mask, flex_mask

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 3},
    {"window": 6, "causal": True},
]


def _by_the_sentence(anchors: list[int], layout: MaskLayout) -> list[list[bool]]:
    """The predicate in words: positions, blocks and slots, no index arithmetic shared with the code."""
    keys = [("context", p, -1, -1) for p in range(layout.context_len)]
    block_slots = [
        ("block", anchor + slot, number, slot)
        for number, anchor in enumerate(anchors)
        for slot in range(layout.block_size)
    ]
    keys += block_slots
    table = []
    for _, position, number, slot in block_slots:
        row = []
        for kind, key_position, key_number, key_slot in keys:
            if kind == "context":
                sees = key_position < anchors[number]
            else:
                sees = key_number == number and (not layout.causal or key_slot <= slot)
            if layout.window is not None:
                sees = sees and abs(position - key_position) < layout.window
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


def test_the_anchors_own_feature_is_not_seen() -> None:
    """At decode the target has not run on the anchor yet: strictly before (SpecForge#470)."""
    mask = dense_mask(torch.tensor([[5]]), MaskLayout(context_len=8, block_size=4))
    assert mask[0, 0, :, :8].tolist() == [[True] * 5 + [False] * 3] * 4


def test_a_window_counts_from_the_slot_and_includes_itself() -> None:
    """W keys end at the slot's own position: slot i of anchor a sees context from a + i - (W - 1)."""
    mask = dense_mask(torch.tensor([[6]]), MaskLayout(context_len=8, block_size=4, window=4, causal=True))
    assert [row.nonzero()[:, 0].tolist() for row in mask[0, 0]] == [
        [3, 4, 5, 8],
        [4, 5, 8, 9],
        [5, 8, 9, 10],
        [8, 9, 10, 11],
    ]


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


@pytest.mark.parametrize("kind", [{}, {"causal": True}, {"window": 50}, {"window": 200, "causal": True}])
@pytest.mark.parametrize(("context_len", "num_anchors", "block_size", "num_empty"), SHAPES)
def test_flex_tiles_and_pairs_agree_with_the_dense_mask(
    context_len: int, num_anchors: int, block_size: int, num_empty: int, kind: dict[str, Any]
) -> None:
    anchors = torch.stack([_random_places(context_len, num_anchors, num_empty, seed) for seed in (0, 1)])
    _compare(anchors, MaskLayout(context_len, block_size, **kind))


@pytest.mark.parametrize("causal", [False, True])
def test_flex_tiles_are_right_wherever_the_edge_of_a_window_falls(causal: bool) -> None:
    """One row of tiles moves over the context in steps of 12, past every edge of a tile and of the window."""
    layout = MaskLayout(context_len=600, block_size=16, window=400, causal=causal)
    for first in range(2, 590, 12):
        _compare(torch.arange(first, first + 8)[None], layout)


def _compare(anchors: Tensor, layout: MaskLayout) -> None:
    """Compare each sample's tiles and pairs with the dense mask."""
    dense = dense_mask(anchors, layout)
    flex = flex_mask(anchors, layout)
    num_queries, num_keys = dense.shape[2:]
    assert flex.seq_lengths == (num_queries, num_keys)
    pairs = flex.mask_mod(
        torch.arange(len(anchors))[:, None, None],
        torch.tensor(0),
        torch.arange(num_queries)[None, :, None],
        torch.arange(num_keys)[None, None, :],
    )
    assert torch.equal(pairs, dense[:, 0])
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
        if layout.window is None and not layout.causal:  # the tiles are exact where there is no window and no causality
            assert torch.equal(partial | full, some)
            assert torch.equal(full, every & whole)


def test_queries_of_padding_do_not_leave_the_anchor_table() -> None:
    """Flex evaluates the mask for the whole last tile (SpecForge#501, #511)."""
    flex = flex_mask(torch.tensor([[3, 9, 20]]), MaskLayout(context_len=30, block_size=16))
    padded_query = torch.arange(48, 128)
    assert int(padded_query.max()) // 16 > 2  # without the clamp this indexes past three anchors
    table = flex.mask_mod(torch.tensor(0), torch.tensor(0), padded_query[:, None], torch.arange(78)[None, :])
    assert table.shape == (80, 78)


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
