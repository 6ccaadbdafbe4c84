"""Anchors and blocks. Every expected value of the tiny sequences is written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.anchors import build_blocks, draw_anchors, eligible_anchors, sample_seed

MASK = 99


def _mask(letters: str) -> np.ndarray:
    """Return a loss mask from a picture: "s" is a supervised token, "." is not."""
    return np.array([letter == "s" for letter in letters])


def test_every_value_of_a_tiny_sequence_is_as_written_here() -> None:
    #                 0   1   2   3   4   5   6   7   8
    tokens = np.array([10, 11, 12, 13, 14, 15, 16, 17, 18])
    supervised = _mask("...sss.ss")
    anchors = eligible_anchors(supervised)
    assert anchors.tolist() == [3, 4, 7]
    blocks = build_blocks(tokens, supervised, anchors, num_anchors=4, block_size=4, mask_token_id=MASK)
    assert blocks.anchors_N.tolist() == [3, 4, 7, 0]
    assert blocks.noise_NK.tolist() == [
        [13, MASK, MASK, MASK],
        [14, MASK, MASK, MASK],
        [17, MASK, MASK, MASK],
        [MASK, MASK, MASK, MASK],
    ]
    # The label of slot i is the token at anchor + i: no shift.
    assert blocks.labels_NK[:2].tolist() == [[13, 14, 15, 16], [14, 15, 16, 17]]
    assert blocks.labels_NK[2, :2].tolist() == [17, 18]
    assert blocks.valid_NK.tolist() == [
        [False, True, True, False],  # 6 is a hole in the mask
        [False, True, False, True],  # and does not end the block: 7 is supervised
        [False, True, False, False],  # 9 and 10 are past the end
        [False, False, False, False],  # an empty place
    ]
    assert {array.dtype for array in (blocks.anchors_N, blocks.noise_NK, blocks.labels_NK)} == {np.dtype(np.int64)}


def test_the_last_anchor_is_the_last_supervised_token_that_a_supervised_one_follows() -> None:
    assert eligible_anchors(_mask("..ssss")).tolist() == [2, 3, 4]
    assert eligible_anchors(_mask("..ssss..")).tolist() == [2, 3, 4]
    assert eligible_anchors(_mask("s")).tolist() == []
    assert eligible_anchors(_mask("s.s.s")).tolist() == []


def test_the_last_token_is_trained_as_often_as_a_token_in_the_middle() -> None:
    """Trainers that start no block in the last B positions see EOS once a block or never (anatomy 2.2)."""
    length, block_size = 40, 8
    tokens, supervised = np.arange(length), np.ones(length, dtype=bool)
    anchors = eligible_anchors(supervised)
    blocks = build_blocks(
        tokens, supervised, anchors, num_anchors=len(anchors), block_size=block_size, mask_token_id=MASK
    )
    times_trained = np.bincount(blocks.labels_NK[blocks.valid_NK], minlength=length)
    assert times_trained[length - 1] == times_trained[20] == block_size - 1


def test_a_draw_depends_on_seed_epoch_and_sample_id_only() -> None:
    supervised = np.ones(300, dtype=bool)

    def draw(seed: int = 1, epoch: int = 0, sample_id: str = "a/17") -> list[int]:
        return draw_anchors(supervised, 20, sample_seed(seed, epoch, sample_id)).tolist()

    first = draw()
    draw(sample_id="another in between")
    assert draw() == first
    others = [draw(seed=2), draw(epoch=1), draw(sample_id="a/18")]
    assert all(other != first for other in others)


def test_a_draw_is_the_same_on_every_machine() -> None:
    """Resume on another host must continue the same data stream; the values are pinned."""
    drawn = draw_anchors(np.ones(100, dtype=bool), 5, sample_seed(7, 3, "row 12"))
    assert drawn.tolist() == [13, 50, 51, 71, 94]


def test_anchors_are_ascending_and_without_replacement() -> None:
    """A random order destroys the block sparsity of the mask (speculators#823)."""
    supervised = np.ones(60, dtype=bool)
    for epoch in range(50):
        drawn = draw_anchors(supervised, 30, sample_seed(0, epoch, "x"))
        assert len(drawn) == 30
        assert (np.diff(drawn) > 0).all()


def test_every_eligible_position_is_drawn_about_equally_often() -> None:
    supervised = _mask("." * 5 + "s" * 21)
    counts = np.zeros(26)
    for epoch in range(600):
        counts[draw_anchors(supervised, 5, sample_seed(0, epoch, "x"))] += 1
    assert counts[:5].sum() == 0 and counts[25] == 0
    # 150 expected, standard deviation 10.6
    assert counts[5:25].min() > 100 and counts[5:25].max() < 200


def test_all_eligible_positions_are_taken_when_places_suffice() -> None:
    """One project draws one anchor less than there are, so a sample with one anchor trains on none (anatomy 2.2)."""
    supervised = _mask("..ss")
    assert draw_anchors(supervised, 8, sample_seed(0, 0, "x")).tolist() == [2]
    assert draw_anchors(_mask("...."), 8, sample_seed(0, 0, "x")).tolist() == []


def test_a_sample_without_anchors_gives_empty_places_only() -> None:
    """Shapes stay constant and no rank waits for another (Automodel#2468)."""
    empty = np.array([], dtype=np.int64)
    blocks = build_blocks(np.arange(5), _mask("....."), empty, num_anchors=3, block_size=4, mask_token_id=MASK)
    assert blocks.valid_NK.shape == (3, 4) and not blocks.valid_NK.any()
    assert (blocks.noise_NK == MASK).all() and (blocks.anchors_N == 0).all()


def test_more_anchors_than_places_are_refused() -> None:
    tokens, supervised = np.arange(9), np.ones(9, dtype=bool)
    build_blocks(tokens, supervised, np.array([1, 2, 3]), num_anchors=3, block_size=4, mask_token_id=MASK)
    with pytest.raises(ValueError, match="3 anchors do not fit in 2 places"):
        build_blocks(tokens, supervised, np.array([1, 2, 3]), num_anchors=2, block_size=4, mask_token_id=MASK)
