"""Blocks over a known text, small enough for dense formulas in float64: for tests of heads that look back."""

from __future__ import annotations

import torch

from dflash.heads.rows import predecessors
from dflash.objective import Rows, make_rows

SEQUENCES, ANCHORS, SLOTS, VOCAB, WIDTH = 2, 3, 4, 40, 16


class Problem:
    """Blocks over a known text: states (b*N, K, D), the head, tokens, anchors and the supervised rows."""

    def __init__(self, chunk_rows: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(SEQUENCES * ANCHORS, SLOTS + 1, WIDTH, generator=generator, dtype=torch.float64)
        self.head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64) * 0.5
        self.tokens = torch.randint(0, VOCAB, (SEQUENCES, 12), generator=generator)
        self.anchors = torch.tensor([[2, 4, 8], [1, 5, 6]])
        places = self.anchors.flatten()[:, None] + torch.arange(SLOTS + 1)
        labels = self.tokens.repeat_interleave(ANCHORS, 0).gather(1, places.clamp(max=11))
        valid = places < 12
        valid[:, 0] = False
        self.rows: Rows = make_rows(labels, valid, chunk_rows)
        self.hidden = self.states.flatten(0, 1)[self.rows.index_R]
        self.before = predecessors(self.tokens, self.anchors, self.rows)
