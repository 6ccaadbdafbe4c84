"""Anchors and the blocks that start at them, on the host: what is drawn, what a slot sees and what it must predict.

Legend of shape suffixes: N anchors, K block size (slots), T tokens of one sequence.
Source: arXiv 2602.06036, section 4.2; the range of positions follows SpecForge, so that the tail and EOS are trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


def sample_seed(seed: int, epoch: int, sample_id: str) -> np.random.Generator:
    """Return the generator of one sample in one epoch: batch, worker and resume do not change the draw."""
    return np.random.default_rng([seed, epoch, *sample_words(sample_id)])


def sample_words(sample_id: str) -> list[int]:
    """Return what an id brings to its generator's seed: four numbers."""
    digest = hashlib.sha256(sample_id.encode()).digest()
    return np.frombuffer(digest[:16], dtype=np.uint32).tolist()


def eligible_anchors(loss_mask_T: np.ndarray) -> np.ndarray:
    """Return the positions of one document that may start a block: supervised, and the next token supervised.

    The last one has a single token after it: short tail blocks are kept, or the EOS region would never be trained.
    """
    return np.flatnonzero(loss_mask_T[:-1] & loss_mask_T[1:])


def draw_anchors(loss_mask_T: np.ndarray, num_anchors: int, rng: np.random.Generator) -> np.ndarray:
    """Return at most `num_anchors` anchors, without replacement and ascending (int64).

    Sorted because contiguous blocks make the attention mask block-sparse; it changes speed, not results.
    """
    return choose_anchors(eligible_anchors(loss_mask_T), num_anchors, rng)


def choose_anchors(positions: np.ndarray, num_anchors: int, rng: np.random.Generator) -> np.ndarray:
    """`draw_anchors` from the eligible positions."""
    if len(positions) > num_anchors:
        positions = rng.choice(positions, size=num_anchors, replace=False, shuffle=False)
    return np.sort(positions)


@dataclass(frozen=True)
class Blocks:
    """The blocks of one sequence, padded to N places.

    anchors_N    int64; an empty place holds 0, so its block has no context and harms nothing
    noise_NK     int64 token ids of the drafter's input: the anchor, then the mask token
    labels_NK    int64; the label of slot i is the token at anchor + i
    valid_NK     bool; slots that are supervised (never slot 0, never an empty place)
    """

    anchors_N: np.ndarray
    noise_NK: np.ndarray
    labels_NK: np.ndarray
    valid_NK: np.ndarray


def build_blocks(
    tokens_T: np.ndarray,
    loss_mask_T: np.ndarray,
    anchors: np.ndarray,
    *,
    num_anchors: int,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Return the blocks of one document that start at `anchors`, in `num_anchors` places.

    Raises ValueError when there are more anchors than places: dropping some silently would change the loss.
    """
    if len(anchors) > num_anchors:
        raise ValueError(f"{len(anchors)} anchors do not fit in {num_anchors} places")
    length = len(tokens_T)
    anchors_N = np.zeros(num_anchors, dtype=np.int64)
    anchors_N[: len(anchors)] = anchors
    kept_N = np.arange(num_anchors) < len(anchors)
    positions_NK = anchors_N[:, None] + np.arange(block_size)
    inside_NK = positions_NK < length
    clipped_NK = np.minimum(positions_NK, length - 1)
    labels_NK = np.where(inside_NK, tokens_T[clipped_NK], 0).astype(np.int64)
    valid_NK = inside_NK & loss_mask_T[clipped_NK] & kept_N[:, None]
    valid_NK[:, 0] = False
    noise_NK = np.full((num_anchors, block_size), mask_token_id, dtype=np.int64)
    noise_NK[:, 0] = np.where(kept_N, tokens_T[anchors_N], mask_token_id)
    return Blocks(anchors_N, noise_NK, labels_NK, valid_NK)
