"""What heads that look at the token before a slot need of the supervised rows: that token, and the rows' weights.

Legend: b sequences, S row length, N anchors, M blocks of a chunk, K block size, R supervised rows (of a chunk: r).
"""

from __future__ import annotations

from torch import Tensor

from dflash.objective import Rows, Weighting


def predecessors(tokens_bS: Tensor, anchors_bN: Tensor, rows: Rows) -> Tensor:
    """Return the tokens (R,) at a + i - 1 for slot i of the block at anchor a, int64.

    The true ones (teacher forcing). A slot that decoding accepts had every earlier slot of its block accepted, so there
    it saw the same token.
    """
    block_R = rows.index_R // rows.block_size
    row_R = block_R // anchors_bN.shape[1]
    return tokens_bS[row_R, anchors_bN.flatten()[block_R] + rows.slot_R - 1]


def chunk_weights(entropy_r: Tensor, rows: Rows, chunk: tuple[int, int, int], weighting: Weighting) -> Tensor:
    """Return m * w (r,) of one chunk's rows, as the objective weighs them, from their cross-entropy."""
    first, end, num_blocks = chunk
    places = (rows.block_R[first:end], rows.slot_R[first:end])
    entropy_MK = entropy_r.new_zeros(num_blocks, rows.block_size).index_put(places, entropy_r)
    valid_MK = entropy_MK.new_zeros(entropy_MK.shape).index_put(places, entropy_r.new_ones(()))
    return weighting.slot_weights(entropy_MK, valid_MK.bool())[places]
