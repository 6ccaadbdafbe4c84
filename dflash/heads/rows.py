"""What heads that look at the token before a slot need of the loss's rows: that token.

Legend: b sequences, S row length, N anchors, K block size, R rows.
"""

from __future__ import annotations

from torch import Tensor

from dflash.objective import Rows


def predecessors(tokens_bS: Tensor, anchors_bN: Tensor, rows: Rows) -> Tensor:
    """Return the tokens (R,) at a + i - 1 for slot i of the block at anchor a, int64.

    The true ones (teacher forcing). A slot that decoding accepts had every earlier slot of its block accepted, so there
    it saw the same token. A row that weighs nothing may stand past the text's end, and gets any token.
    """
    block_R = rows.index_R // rows.block_size
    row_R = block_R // anchors_bN.shape[1]
    before_R = anchors_bN.flatten()[block_R] + rows.slot_R - 1
    return tokens_bS[row_R, before_R.clamp(max=tokens_bS.shape[1] - 1)]
