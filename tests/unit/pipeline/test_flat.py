"""Tensors in one: each whole and aligned, in its owner's part, and the parts of equal size."""

from __future__ import annotations

import pytest
import torch

from pipeline.flat import ALIGNED, Flat

SHAPES = [(7, 5), (3,), (64, 9), (1,), ()]


@pytest.mark.parametrize(("owners", "parts", "multiple"), [([0] * 5, 1, 3), ([0, 1, 1, 0, 1], 2, 1), ([3] * 5, 4, 2)])
def test_views_lie_apart_in_their_owners_parts(owners: list[int], parts: int, multiple: int) -> None:
    tensors = [torch.full(shape, 1.0 + i) for i, shape in enumerate(SHAPES)]
    flat = Flat.like(tensors, torch.bfloat16, owners=owners, parts=parts, multiple=multiple)
    assert flat.whole.dtype == torch.bfloat16 and not flat.whole.any()
    size, rest = divmod(flat.whole.numel(), parts)
    assert rest == 0 and size % (ALIGNED * multiple) == 0
    for tensor, view, owner in zip(tensors, flat.views, owners, strict=True):
        assert view.shape == tensor.shape and view.storage_offset() % ALIGNED == 0
        assert owner * size <= view.storage_offset() and view.storage_offset() + view.numel() <= (owner + 1) * size
        view.copy_(tensor)
    assert all(torch.equal(view.float(), tensor) for view, tensor in zip(flat.views, tensors, strict=True))
    assert flat.whole.float().sum() == sum(tensor.sum() for tensor in tensors)
