"""Who may attend to whom: the one predicate, as a dense mask and as a flex BlockMask.

Query axis: the N blocks of B slots one after another. Key axis: the S context tokens, then the same N*B slots.
Slot i of the block at anchor a stands at position a + i. The queries may leave out slot 0 of each block (first_slot).
Legend: b batch, N anchors, B block size, S context, Q = N*B.

    allow(q, k) = same_block(q, k) [and k's slot <= q's slot, if causal]
                  or (k is context and s <= k < a)        strictly: at decode the anchor has no target features yet
    and, in a sliding layer, position(q) - position(k) < W (and > -W inside the block); read as "anchor"
    (config.WINDOW_READINGS) instead a - k <= W in the context, and no limit inside the block

s is where the anchor's document starts in the row: 0, or later in a packed row. Anchors and s count from the row's
first token; positions of RoPE count from the document's, which changes no difference of two positions of one document.

An empty place has anchor 0 and therefore no context; every slot sees at least itself, so no row is empty (a dense
softmax over an empty row is NaN: Automodel#2826).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.config import DrafterConfig

FLEX_TILE = 128


@dataclass(frozen=True)
class MaskLayout:
    """What one draft layer's mask depends on besides the anchors."""

    context_len: int
    block_size: int
    window: int | None = None
    causal: bool = False
    window_reading: str = "slot"
    first_slot: int = 0
    """1: the queries are slots 1 on of each block only; the keys are all."""

    @property
    def query_slots(self) -> int:
        """Queries of one block."""
        return self.block_size - self.first_slot


def layer_layout(config: DrafterConfig, layer: int, context_len: int) -> MaskLayout:
    """Return the layout of one draft layer."""
    return MaskLayout(
        context_len, config.block_size, config.layer_window(layer), config.layer_causal(layer), config.window_reading
    )


def allowed(anchor: Tensor, start: Tensor | int, query: Tensor, key: Tensor, layout: MaskLayout) -> Tensor:
    """Return the predicate for query and key indices (int tensors that broadcast), each query's own anchor, and the
    first token of the anchor's document."""
    S, B = layout.context_len, layout.block_size
    query_block, query_slot = query // layout.query_slots, query % layout.query_slots + layout.first_slot
    key_slot = (key - S) % B
    in_context = (key < S) & (key < anchor) & (key >= start)
    in_block = (key >= S) & ((key - S) // B == query_block)
    if layout.causal:
        in_block = in_block & (key_slot <= query_slot)
    if layout.window is not None and layout.window_reading == "slot":
        in_context = in_context & (anchor + query_slot - key < layout.window)
        in_block = in_block & ((query_slot - key_slot).abs() < layout.window)
    elif layout.window is not None:
        in_context = in_context & (anchor - key <= layout.window)
    return in_context | in_block


def dense_mask(anchors_bN: Tensor, layout: MaskLayout, starts_bN: Tensor | None = None) -> Tensor:
    """Return the mask as bool (b, 1, Q, S + Q); True attends. The head axis is 1 and broadcasts.

    starts_bN   the first token of each anchor's document in its row (None: all 0)
    """
    num_anchors, slots, device = anchors_bN.shape[1], layout.query_slots, anchors_bN.device
    query = torch.arange(num_anchors * slots, device=device)[:, None]
    key = torch.arange(layout.context_len + num_anchors * layout.block_size, device=device)[None, :]
    anchor_bQ1 = anchors_bN.repeat_interleave(slots, dim=1)[:, :, None]
    start = 0 if starts_bN is None else starts_bN.repeat_interleave(slots, dim=1)[:, :, None]
    return allowed(anchor_bQ1, start, query, key, layout)[:, None]


def flex_mask(anchors_bN: Tensor, layout: MaskLayout, starts_bN: Tensor | None = None) -> BlockMask:
    """Return the mask as a BlockMask of 128 x 128 tiles, from the anchors alone.

    The tiles follow from the smallest and largest anchor (and document start) of 128 queries, so nothing of size
    Q x (S + Q) is made (torch's own builder evaluates every pair: 7 GB at Q = 24,576, speculators#731) and nothing
    needs compiling.
    """
    B, S, slots, tile = layout.block_size, layout.context_len, layout.query_slots, FLEX_TILE
    num_anchors = anchors_bN.shape[1]
    num_queries, num_keys = num_anchors * slots, S + num_anchors * B
    device = anchors_bN.device
    num_rows, num_columns = -(-num_queries // tile), -(-num_keys // tile)
    first_query = torch.arange(num_rows, device=device) * tile
    last_query = (first_query + tile - 1).clamp(max=num_queries - 1)
    first_block, last_block = first_query // slots, last_query // slots
    # Anchors of one row of tiles; padding places hold 0 and are not sorted, so take true minima and maxima.
    per_row = int(-(-tile // slots)) + 1
    member = (first_block[:, None] + torch.arange(per_row, device=device)).clamp(max=num_anchors - 1)
    member = torch.minimum(member, last_block[:, None])
    anchors_brm = anchors_bN[:, member]
    low_br1, high_br1 = anchors_brm.amin(-1)[..., None], anchors_brm.amax(-1)[..., None]
    key_low = torch.arange(num_columns, device=device) * tile
    key_high = (key_low + tile - 1).clamp(max=num_keys - 1)
    some = (key_low < high_br1) & (key_low < S)
    full = (key_high < low_br1) & (key_high < S)
    if starts_bN is not None:
        starts_brm = starts_bN[:, member]
        some = some & (key_high >= starts_brm.amin(-1)[..., None])
        full = full & (key_low >= starts_brm.amax(-1)[..., None])
    if layout.window is not None:
        # How far back the furthest and the nearest slot of an anchor see, by either reading of the window.
        reach, all_reach = (W := layout.window), W - B + 1
        if layout.window_reading == "anchor":
            reach, all_reach = W + 1, W + 1
        some = some & (low_br1 - key_high.clamp(max=S - 1) < reach)
        full = full & (high_br1 - key_low < all_reach)
    block_low, block_high = S + first_block * B, S + (last_block + 1) * B - 1
    some = some | ((key_low <= block_high[:, None]) & (key_high >= block_low[:, None]))
    # A last, partly filled tile must be evaluated pair by pair, or padding would count.
    whole = (torch.arange(num_rows, device=device) + 1) * tile <= num_queries
    full = full & whole[:, None]
    partial = some & ~full
    padded_bN, document_bN = anchors_bN, starts_bN

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # flex pads queries to whole tiles and evaluates the mask there too: clamp, or the look-up leaves the
        # tensor (SpecForge#501).
        block = (q // slots).clamp(max=num_anchors - 1)
        start = 0 if document_bN is None else document_bN[b, block]
        return allowed(padded_bN[b, block], start, q, k, layout)

    def order(tiles: Tensor) -> tuple[Tensor, Tensor]:
        counts = tiles.sum(-1, dtype=torch.int32)[:, None]
        indices = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
        return counts, indices

    partial_count, partial_index = order(partial)
    full_count, full_index = order(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=tile,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )
