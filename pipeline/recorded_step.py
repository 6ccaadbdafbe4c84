"""One replica's forward and backward as CUDA graphs, one for each shape that its micro-batches come in."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from dflash.compile.gate import GateError
from pipeline.batches import MicroBatch
from pipeline.optim import MasterAdamW
from pipeline.recorded import Recordings


@dataclass(frozen=True)
class _Inputs:
    """Where a graph reads its micro-batch and its features; the features of a bucket are shared by its graphs."""

    batch: MicroBatch
    features_bSX: Tensor


class RecordedStep:
    """`run(batch, features)`, which adds a micro-batch's gradients to `optimizer`'s and returns loss sums, recorded.

    Each shape is recorded twice: the first micro-batch of a step is written over the gradients of the one before.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[MicroBatch, Tensor], Tensor],
        optimizer: MasterAdamW,
        recordings: Recordings[Tensor],
    ) -> None:
        self._name, self._run, self._optimizer, self._recordings = name, run, optimizer, recordings
        self._inputs: dict[Hashable, _Inputs] = {}
        self.replays = 0

    def __bool__(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._inputs)

    def record(self, batch: MicroBatch, features_bSX: Tensor) -> None:
        """Record a shape that has run before. The two become the graphs' own: they are overwritten by every step."""
        shape = _shape(batch)
        self._inputs[shape] = _Inputs(batch, features_bSX)
        for first in (True, False):
            self._optimizer.overwriting = first
            self._recordings.record((shape, first), lambda: self._run(batch, features_bSX))
        self._optimizer.forget()

    def __call__(self, batch: MicroBatch, features_bSX: Tensor) -> Tensor:
        """Return the loss sums of a micro-batch. Raises GateError for a shape that was not recorded."""
        shape = _shape(batch)
        if shape not in self._inputs:
            what = f"no graph for micro-batches of bucket {shape[0]} and {shape[1]} rows"
            raise GateError(f"{self._name} has {what}; set compile.cuda_graphs: false")
        own = self._inputs[shape]
        for name, tensor in batch.tensors().items():
            own.batch.tensors()[name].copy_(tensor, non_blocking=True)
        own.features_bSX.copy_(features_bSX, non_blocking=True)
        sums = self._recordings.replay((shape, self._optimizer.overwriting))
        self._optimizer.overwriting = False
        self.replays += 1
        return sums.clone()  # the next replay writes over it


def _shape(batch: MicroBatch) -> tuple[int, int]:
    return batch.bucket, len(batch.rows.index_R)
