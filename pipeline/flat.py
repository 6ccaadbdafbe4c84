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
    """`whole` holds one owner's tensors after another's, in `parts`. `views` are the tensors there."""

    whole: Tensor
    parts: list[Tensor]
    views: list[Tensor]

    @classmethod
    def like(
        cls, tensors: Sequence[Tensor], dtype: torch.dtype, owners: Sequence[int], num_owners: int, *, multiple: int = 1
    ) -> Flat:
        """Return room of `dtype` for `tensors`, filled with zeros.

        owners     of each tensor, from 0; one that owns none has an empty part
        multiple   each part has a multiple of so many times ALIGNED elements
        """
        ends, places = [0] * num_owners, []
        for tensor, owner in zip(tensors, owners, strict=True):
            places.append((owner, ends[owner]))
            ends[owner] += -(-tensor.numel() // ALIGNED) * ALIGNED
        unit = ALIGNED * multiple
        sizes = [-(-end // unit) * unit for end in ends]
        whole = torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device)
        parts = list(whole.split(sizes))
        views = [
            parts[owner][at : at + tensor.numel()].view(tensor.shape)
            for (owner, at), tensor in zip(places, tensors, strict=True)
        ]
        return cls(whole, parts, views)
