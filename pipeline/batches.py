"""Which samples a step trains on, and how they become tensors. Nothing here depends on workers, so resuming or changing
their number changes neither the order nor the anchors.

Legend: b sequences of a micro-batch, S bucket length, N anchors, K block size, Q = N * K, C feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dflash.anchors import build_blocks, draw_anchors, sample_seed
from dflash.config import DrafterConfig
from dflash.objective import Rows, make_rows
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.rendering import Sample


@dataclass(frozen=True)
class StepBatch:
    """The samples of one optimizer step, all of one bucket; fewer than batch_size at a bucket's end."""

    epoch: int
    bucket: int
    indices: tuple[int, ...]


class BatchPlan:
    """The order of samples over all steps: shuffled within each bucket, then the batches among each other, by
    (seed, epoch). Every sample is seen once an epoch."""

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

    tokens_bS and noise_bQ int64, anchors_bN int64, positions_bQ int64; rows name the supervised slots.
    indices are the samples, in the rows' order; missing ones leave empty rows, so shapes stay constant.
    """

    bucket: int
    indices: tuple[int, ...]
    tokens_bS: Tensor
    noise_bQ: Tensor
    anchors_bN: Tensor
    positions_bQ: Tensor
    rows: Rows
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on `device`."""
        names = ("tokens_bS", "noise_bQ", "anchors_bN", "positions_bQ")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved, rows=self.rows.to(device))


class Collator:
    """Makes micro-batches of constant shape (micro_batch, bucket) from samples."""

    def __init__(self, config: RunConfig, drafter: DrafterConfig, samples: Sequence[Sample]) -> None:
        self._train, self._seed, self._drafter = config.train, config.seed, drafter
        self._samples = samples
        self._arrays = [(np.array(s.input_ids, dtype=np.int64), np.array(s.loss_mask)) for s in samples]

    def micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        """Return the batch cut into all micro-batches of a step; the last ones may be partly or wholly empty."""
        size = self._train.micro_batch
        starts = range(0, self._train.batch_size, size)
        return [self.collate(batch.epoch, batch.bucket, batch.indices[start : start + size]) for start in starts]

    def collate(self, epoch: int, bucket: int, indices: tuple[int, ...]) -> MicroBatch:
        """Return one micro-batch; `indices` may be shorter than micro_batch."""
        size, N, K = self._train.micro_batch, self._train.num_anchors, self._drafter.block_size
        mask_id = self._drafter.mask_token_id
        tokens = np.zeros((size, bucket), dtype=np.int64)
        anchors, noise = np.zeros((size, N), dtype=np.int64), np.full((size, N, K), mask_id, dtype=np.int64)
        labels, valid = np.zeros((size, N, K), dtype=np.int64), np.zeros((size, N, K), dtype=bool)
        for row, index in enumerate(indices):
            ids, supervised = self._arrays[index]
            tokens[row, : len(ids)] = ids
            drawn = draw_anchors(supervised, N, sample_seed(self._seed, epoch, self._samples[index].id))
            blocks = build_blocks(ids, supervised, drawn, num_anchors=N, block_size=K, mask_token_id=mask_id)
            anchors[row], noise[row], labels[row], valid[row] = (
                blocks.anchors_N,
                blocks.noise_NK,
                blocks.labels_NK,
                blocks.valid_NK,
            )
        positions = anchors[:, :, None] + np.arange(K)
        rows = make_rows(
            torch.from_numpy(labels).view(-1, K), torch.from_numpy(valid).view(-1, K), self._train.head_chunk_rows
        )
        return MicroBatch(
            bucket=bucket,
            indices=indices,
            tokens_bS=torch.from_numpy(tokens),
            noise_bQ=torch.from_numpy(noise).view(size, N * K),
            anchors_bN=torch.from_numpy(anchors),
            positions_bQ=torch.from_numpy(positions).view(size, N * K),
            rows=rows,
            num_tokens=sum(len(self._arrays[i][0]) for i in indices),
        )
