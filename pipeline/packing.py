"""Several short samples in one row, so that a step multiplies tokens instead of padding.

Which samples share a row follows from their lengths alone and is the same in every epoch: samples of one row cannot
see each other, so company changes nothing but speed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], capacity: int, most: int) -> list[tuple[int, ...]]:
    """Return rows of sample indices: at most `most` samples and `capacity` tokens in each, every sample once.

    Best fit, longest first: a sample goes where it leaves the least room. With most = 1, row i is sample i.
    """
    if most == 1:
        return [(index,) for index in range(len(lengths))]
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending; full rows are not in it
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(free, (lengths[index], -1))
        if place < len(free):
            left, row = free.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if len(rows[row]) < most:
            insort(free, (left - lengths[index], row))
    return [tuple(row) for row in rows]
