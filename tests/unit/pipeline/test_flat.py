"""Tensors in one: each whole and aligned, in its owner's part, and the parts of equal size."""

from __future__ import annotations

import pytest
import torch

from pipeline.flat import ALIGNED, Flat

SHAPES = [(7, 5), (3,), (64, 9), (1,), ()]


@pytest.mark.parametrize(("owners", "count", "multiple"), [([0] * 5, 1, 3), ([0, 1, 1, 0, 1], 2, 1), ([3] * 5, 4, 2)])
def test_views_lie_apart_in_their_owners_parts(owners: list[int], count: int, multiple: int) -> None:
    tensors = [torch.full(shape, 1.0 + i) for i, shape in enumerate(SHAPES)]
    flat = Flat.like(tensors, torch.bfloat16, owners, count, multiple=multiple)
    assert flat.whole.dtype == torch.bfloat16 and not flat.whole.any()
    assert sum(part.numel() for part in flat.parts) == flat.whole.numel() and len(flat.parts) == count
    needed = [[t.numel() for t, owner in zip(tensors, owners, strict=True) if owner == i] for i in range(count)]
    for part, sizes in zip(flat.parts, needed, strict=True):  # nothing more than each tensor's and the part's rounding
        assert part.numel() % (ALIGNED * multiple) == 0
        most = sum(sizes) + ALIGNED * (len(sizes) + multiple)
        assert sum(sizes) <= part.numel() < most if sizes else part.numel() == 0
    for tensor, view, owner in zip(tensors, flat.views, owners, strict=True):
        first = flat.parts[owner].storage_offset()
        assert view.shape == tensor.shape and view.storage_offset() % ALIGNED == 0
        assert first <= view.storage_offset()
        assert view.storage_offset() + view.numel() <= first + flat.parts[owner].numel()
        view.copy_(tensor)
    assert all(torch.equal(view.float(), tensor) for view, tensor in zip(flat.views, tensors, strict=True))
    assert flat.whole.float().sum() == sum(tensor.sum() for tensor in tensors)
