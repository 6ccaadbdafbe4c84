"""Tensors that lie in one, so that a collective sends them in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 128
"""Elements: each tensor begins at a multiple of 256 bytes or more, as one that was allocated by itself does on GPUs."""


@dataclass(frozen=True)
class Flat:
    """`whole` is cut into parts of equal size; what one owner keeps is in its part. `views` are the tensors there."""

    whole: Tensor
    views: list[Tensor]

    @classmethod
    def like(
        cls, tensors: Sequence[Tensor], dtype: torch.dtype, *, owners: Sequence[int], parts: int, multiple: int = 1
    ) -> Flat:
        """Return room of `dtype` for `tensors`, filled with zeros.

        owners     the part that each tensor lies in
        multiple   a part has a multiple of so many times ALIGNED elements
        """
        ends, places = [0] * parts, []
        for tensor, owner in zip(tensors, owners, strict=True):
            places.append((owner, ends[owner]))
            ends[owner] += -(-tensor.numel() // ALIGNED) * ALIGNED
        unit = ALIGNED * multiple
        size = max(unit, -(-max(ends) // unit) * unit)
        whole = torch.zeros(parts * size, dtype=dtype, device=tensors[0].device)
        starts = [owner * size + at for owner, at in places]
        views = [whole[s : s + t.numel()].view(t.shape) for s, t in zip(starts, tensors, strict=True)]
        return cls(whole, views)
