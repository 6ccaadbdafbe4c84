"""Which samples a step trains on, and how they become tensors. Nothing here depends on workers, so resuming or changing
their number changes neither the order nor the anchors.

A row is one sample, or several packed ones (packing.py); an index of a batch names a row.

Legend: b rows of a micro-batch, S bucket length, N anchors, K block size, Q = N * K, C feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.anchors import choose_anchors, eligible_anchors, sample_words
from dflash.config import DrafterConfig
from dflash.objective import Rows, make_rows, send
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.packing import pack_rows
from pipeline.rendering import Sample


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step, all of one bucket; fewer than batch_size at a bucket's end."""

    epoch: int
    bucket: int
    indices: tuple[int, ...]


class BatchPlan:
    """The order of rows over all steps: shuffled within each bucket, then the batches among each other, by
    (seed, epoch). Every row is seen once an epoch. `lengths` are the rows' tokens."""

    def __init__(self, lengths: Sequence[int], buckets: Sequence[int], batch_size: int, seed: int) -> None:
        self._batch_size, self._seed = batch_size, seed
        self._members: dict[int, list[int]] = {bucket: [] for bucket in buckets}
        for index, length in enumerate(lengths):
            fitting = [bucket for bucket in buckets if length <= bucket]
            if not fitting:
                raise ConfigError(
                    f"a sample has {length} tokens, the largest bucket {max(buckets)}",
                    where="data.buckets",
                    fix="Add a bucket or lower the length limits.",
                )
            self._members[fitting[0]].append(index)
        self._last_epoch: tuple[int, list[StepBatch]] = (-1, [])
        self.steps_per_epoch = sum(-(-len(m) // batch_size) for m in self._members.values())

    def epoch(self, epoch: int) -> list[StepBatch]:
        """Return the batches of one epoch in order."""
        rng = np.random.default_rng([self._seed, epoch])
        batches = []
        for bucket, members in self._members.items():
            order = rng.permutation(members).tolist()
            for start in range(0, len(order), self._batch_size):
                batches.append(StepBatch(epoch, bucket, tuple(order[start : start + self._batch_size])))
        return [batches[i] for i in rng.permutation(len(batches))]

    def step(self, step: int) -> StepBatch:
        """Return the batch of optimizer step `step` (from 0)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        known, batches = self._last_epoch
        if known != epoch:
            batches = self.epoch(epoch)
            self._last_epoch = (epoch, batches)  # one assignment: workers may come at once
        return batches[place]


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one worker, before features and embeddings.

    tokens_bS and noise_bQ int64; positions_bS and positions_bQ int64, counted from the document's first token;
    anchors_bN int64, places in the row; starts_bN int64, where the anchor's document starts, or None when no row holds
    two; rows name the supervised slots. indices are the batch's rows; missing ones leave empty rows, so shapes stay
    constant. samples holds for each row (index of the sample, its first place) of what is packed in it.
    """

    bucket: int
    indices: tuple[int, ...]
    samples: tuple[tuple[tuple[int, int], ...], ...]
    tokens_bS: Tensor
    positions_bS: Tensor
    noise_bQ: Tensor
    anchors_bN: Tensor
    starts_bN: Tensor | None
    positions_bQ: Tensor
    rows: Rows
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on `device`."""
        moved: dict[str, Any] = {name: send(tensor, device) for name, tensor in self._own_tensors().items()}
        return replace(self, **moved, rows=self.rows.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that lies on a device, by name."""
        return {**self._own_tensors(), **self.rows.tensors()}

    def _own_tensors(self) -> dict[str, Tensor]:
        names = ("tokens_bS", "positions_bS", "noise_bQ", "anchors_bN", "starts_bN", "positions_bQ")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


def rows_of(config: RunConfig, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Return the samples of each row, as data.samples_per_row asks for."""
    return pack_rows([len(s.input_ids) for s in samples], config.data.buckets[-1], config.data.samples_per_row)


def plan_of(config: RunConfig, samples: Sequence[Sample]) -> BatchPlan:
    """Return the order in which a run trains on its samples."""
    lengths = [sum(len(samples[i].input_ids) for i in row) for row in rows_of(config, samples)]
    return BatchPlan(lengths, config.data.buckets, config.train.batch_size, config.seed)


@dataclass(frozen=True)
class _Text:
    """What every epoch needs of a sample: ids int64, supervised bool, eligible anchors, its part of the seed."""

    ids: np.ndarray
    supervised: np.ndarray
    eligible: np.ndarray
    words: list[int]

    @classmethod
    def of(cls, sample: Sample) -> _Text:
        supervised = np.array(sample.loss_mask, dtype=bool)
        ids = np.array(sample.input_ids, dtype=np.int64)
        return cls(ids, supervised, eligible_anchors(supervised), sample_words(sample.id))


class Collator:
    """Makes micro-batches of constant shape (micro_batch, bucket) from samples."""

    def __init__(self, config: RunConfig, drafter: DrafterConfig, samples: Sequence[Sample]) -> None:
        self._train, self._seed, self._drafter = config.train, config.seed, drafter
        self._head_rows, self._row_levels = config.head_rows, config.row_levels
        self._rows = rows_of(config, samples)
        self._places = config.train.num_anchors * config.data.samples_per_row
        self._packed = config.data.samples_per_row > 1
        self._texts = [_Text.of(sample) for sample in samples]

    def micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        """Return the batch cut into all micro-batches of a step; the last ones may be partly or wholly empty."""
        size = self._train.micro_batch
        starts = range(0, self._train.batch_size, size)
        return [self.collate(batch.epoch, batch.bucket, batch.indices[start : start + size]) for start in starts]

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Return the tokens of some rows, without padding."""
        return sum(len(self._texts[i].ids) for row in indices for i in self._rows[row])

    def collate(self, epoch: int, bucket: int, indices: tuple[int, ...]) -> MicroBatch:
        """Return one micro-batch of rows; `indices` may be shorter than micro_batch.

        The blocks are those of `dflash.build_blocks` for each sample, moved to its place: a block ends with its sample,
        so nothing can reach over a border.
        """
        size, places, K = self._train.micro_batch, self._places, self._drafter.block_size
        tokens, supervised = np.zeros((size, bucket), dtype=np.int64), np.zeros((size, bucket), dtype=bool)
        positions = np.tile(np.arange(bucket), (size, 1))
        anchors, starts, ends = np.zeros((3, size, places), dtype=np.int64)  # an empty place ends where it begins
        samples: list[tuple[tuple[int, int], ...]] = []
        for row, index in enumerate(indices):
            first = place = 0
            held: list[tuple[int, int]] = []
            for sample in self._rows[index]:
                text = self._texts[sample]
                drawn = self._drawn(epoch, text)
                own, end = slice(first, first + len(text.ids)), first + len(text.ids)
                tokens[row, own], supervised[row, own] = text.ids, text.supervised
                if first:
                    positions[row, first:] = np.arange(bucket - first)  # padding after the last one counts on
                # Empty places all stand at the row's end: among the others they would widen the tiles of the mask.
                taken = slice(place, place + len(drawn))
                anchors[row, taken], starts[row, taken], ends[row, taken] = drawn + first, first, end
                held.append((sample, first))
                first, place = end, place + len(drawn)
            samples.append(tuple(held))
        wanted = anchors[:, :, None] + np.arange(K)
        inside = wanted < ends[:, :, None]
        wanted = np.where(inside, wanted, 0).reshape(size, -1)
        labels = np.take_along_axis(tokens, wanted, 1).reshape(inside.shape) * inside
        valid = np.take_along_axis(supervised, wanted, 1).reshape(inside.shape) & inside
        valid[:, :, 0] = False
        noise = np.full(inside.shape, self._drafter.mask_token_id, dtype=np.int64)
        noise[:, :, 0] = np.where(ends > 0, np.take_along_axis(tokens, anchors, 1), self._drafter.mask_token_id)
        slots = (anchors - starts)[:, :, None] + np.arange(K)
        known = torch.from_numpy(labels).view(-1, K), torch.from_numpy(valid).view(-1, K)
        rows = make_rows(*known, self._head_rows, self._row_levels)
        return MicroBatch(
            bucket=bucket,
            indices=indices,
            samples=tuple(samples),
            tokens_bS=torch.from_numpy(tokens),
            positions_bS=torch.from_numpy(positions),
            noise_bQ=torch.from_numpy(noise).view(size, places * K),
            anchors_bN=torch.from_numpy(anchors),
            starts_bN=torch.from_numpy(starts) if self._packed else None,
            positions_bQ=torch.from_numpy(slots).view(size, places * K),
            rows=rows,
            num_tokens=self.num_tokens(indices),
        )

    def _drawn(self, epoch: int, text: _Text) -> np.ndarray:
        """Return a sample's anchors of an epoch, as `dflash.draw_anchors` draws them by `dflash.sample_seed`."""
        rng = np.random.default_rng([self._seed, epoch, *text.words])
        return choose_anchors(text.eligible, self._train.num_anchors, rng)
