"""One drafter on one device: model, compiled body, head, optimizer, and what one micro-batch does to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.acceptance import layer_masks
from dflash.attention import choose_attention
from dflash.checkpoint import load_drafter
from dflash.compile import CompileGate
from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.fp8 import Fp8Linear, refresh, use_fp8
from dflash.fp8_head import Fp8Head
from dflash.head import block_embeddings
from dflash.heads.loss import picker_loss
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, default_gamma, head_loss, level_blocks, make_rows
from dflash.soft_labels import Teacher
from pipeline.batches import Collator, MicroBatch
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.files import expand_user
from pipeline.optim import MasterAdamW
from pipeline.recorded import Recordings
from pipeline.recorded_step import RecordedStep
from pipeline.rendering import Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What weights, activations and exports are in, by train.precision; of fp8 only the products' operands are narrower."""


@dataclass(frozen=True)
class Borrowed:
    """The target's frozen embedding and head (V, D) on one device; the same tensor when they are tied."""

    embedding_VD: Tensor
    head_VD: Tensor

    @classmethod
    def of(cls, target: Any, device: torch.device, dtype: torch.dtype) -> Borrowed:
        embedding = target.get_input_embeddings().weight.detach().to(device, dtype)
        source = target.get_output_embeddings().weight
        tied = source.data_ptr() == target.get_input_embeddings().weight.data_ptr()
        return cls(embedding, embedding if tied else source.detach().to(device, dtype))

    @cached_property
    def fp8_head(self) -> Fp8Head:
        """The head in fp8, made once for all replicas of the device."""
        return Fp8Head(self.head_VD)


def new_drafter(config: RunConfig, drafter: DrafterConfig, head_VD: Tensor) -> DFlashDraftModel:
    """Return the drafter that training starts from: random by the run's seed, or train.init_from's weights, to which a
    head that they lack is added as the identity."""
    model = DFlashDraftModel(drafter)
    if config.train.init_from is None:
        model.initialise(config.seed, head_VD)
        return model
    start = load_drafter(expand_user(config.train.init_from), dtype=torch.float32)
    adding = model.picker is not None and start.picker is None
    if adding:
        model.initialise(config.seed, head_VD)
    model.load_state_dict(start.state_dict(), strict=not adding)
    return model


class Replica:
    """A drafter with everything one worker thread needs. Replicas of one run start and stay equal."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        drafter: DrafterConfig,
        start: DFlashDraftModel,
        borrowed: Borrowed,
        device: torch.device,
        gate: CompileGate,
        keeps: Callable[[Sequence[int]], list[int]] | None = None,
    ) -> None:
        """keeps   of the parameters' sizes, those that this replica's optimizer updates (pipeline/sharded.py); all"""
        self.name, self.config, self.drafter, self.device = name, config, drafter, device
        self.dtype = DTYPES[config.train.precision]
        check_precision(config.train.precision, device)
        try:
            self.attention = choose_attention(config.drafter.attention, device)
        except DFlashError as error:
            raise ConfigError(error.what, where=f"drafter.{error.where}", fix=error.fix) from None
        self.model = DFlashDraftModel(drafter)
        self.model.load_state_dict(start.state_dict())
        self.model.to(device=device, dtype=self.dtype)
        self.borrowed = borrowed
        self.fp8_linears = use_fp8(self.model) if config.train.precision == "fp8" else list[Fp8Linear]()
        self.fp8_head = borrowed.fp8_head if self.fp8_linears and not config.train.soft_weight else None
        self.mask_token = torch.tensor(drafter.mask_token_id, device=device)
        kept = keeps([p.numel() for p in self.model.parameters()]) if keeps else None
        self.optimizer = MasterAdamW(self.model, config.train, start.state_dict(), kept)
        gamma = config.train.gamma or default_gamma(drafter.block_size)
        self.weighting = Weighting(config.train.loss, gamma, config.train.dpace_alpha)
        self.body = gate.compile(body_of(self.model, self.attention), name=name)
        self.recordings = Recordings[Tensor](device)
        self.recorded = RecordedStep(name, self._run, self.optimizer, self.recordings)

    def forward_backward(self, batch: MicroBatch, features_bSX: Tensor) -> Tensor:
        """Add the gradient of the loss numerator and return the loss sums as a vector. Only inside gate.step()."""
        refresh(self.fp8_linears)  # not in _run, which is recorded: it does something only after a step
        run = self.recorded if self.recorded else self._run
        return run(batch, features_bSX)

    def _run(self, batch: MicroBatch, features_bSX: Tensor) -> Tensor:
        hidden_bQD = self.states(batch, features_bSX)
        rows, weight = batch.rows, self.config.train.soft_weight
        hidden_RD = hidden_bQD.flatten(0, 1)[rows.index_R]
        sums = head_loss(
            hidden_RD,
            self.borrowed.head_VD,
            rows,
            self.weighting,
            soft_weight=weight,
            teacher=self.teacher(batch, features_bSX) if weight else None,
            softcap=self.drafter.final_logit_softcapping,
            multiplier=self.drafter.output_multiplier,
            fp8_head=self.fp8_head,
        )
        numerator = sums.numerator
        if picker := self.model.picker:
            places = (batch.tokens_bS, batch.anchors_bN, rows)
            numerator = numerator + picker_loss(
                picker, hidden_RD, self.borrowed.head_VD, *places, self.weighting, self.drafter
            )
        numerator.backward()
        self.optimizer.collect()
        return sums.vector()

    def teacher(self, batch: MicroBatch, features_bSX: Tensor) -> Teacher:
        """Return what the target says to each supervised slot: its state one position earlier, which predicts it."""
        K, N = self.drafter.block_size, batch.anchors_bN.shape[1]
        block_R, slot_R = batch.rows.index_R // K, batch.rows.slot_R
        row_R = block_R // N
        before_R = batch.anchors_bN.flatten()[block_R] + slot_R - 1
        before_R = before_R.clamp(max=features_bSX.shape[1] - 1)  # past it stand only rows that weigh nothing
        state_RD = features_bSX[row_R, before_R, self.drafter.feature_size :]
        # The supported targets have neither a multiplier nor a softcap of their own.
        return Teacher(state_RD=state_RD, multiplier=1.0, softcap=None)

    def states(self, batch: MicroBatch, features_bSX: Tensor) -> Tensor:
        """Return the compiled body's states (b, Q, D) of a micro-batch on this device; slot 0's may be left out, 0."""
        features_bSC = features_bSX[..., : self.drafter.feature_size]
        table_VD, size = self.borrowed.embedding_VD, self.drafter.block_size
        anchors_bND = block_embeddings(batch.noise_bQ[:, ::size], table_VD, self.drafter)
        mask_D = block_embeddings(self.mask_token, table_VD, self.drafter)
        masks = layer_masks(
            self.model,
            batch.anchors_bN,
            features_bSC.shape[1],
            self.attention,
            batch.starts_bN,
            apart=self.model.drafts_slots_apart,
        )
        return self.body(features_bSC, anchors_bND, mask_D, batch.positions_bQ, masks, batch.positions_bS)

    def warm_up(self) -> None:
        """Run forward and backward once for every declared shape, record them where steps are CUDA graphs, and forget
        the gradients."""
        width, room = feature_width(self.config, self.drafter), list[Tensor]()
        for bucket in self.config.data.buckets:
            shape = (self.config.train.micro_batch, bucket, width)
            features = torch.zeros(shape, device=self.device, dtype=self.dtype)
            batches = [batch.to(self.device) for batch in warm_batches(self.config, self.drafter, bucket)]
            for batch in batches:
                run = partial(self._run, batch, features)
                if self.config.recorded:
                    self.recordings.rehearse(run)
                else:  # in the stream of training: what this one has freed serves no other
                    run()
            for batch in batches if self.config.recorded else ():
                self.recorded.record(batch, features)
            room.append(features)
        if self.config.recorded:  # room for the features that come; those that the graphs read are their own
            room = [torch.empty_like(features) for features in room]
        del room
        self.optimizer.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError where `device` has no products of this precision: fp8 came with capability 8.9."""
    if precision != "fp8":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < (8, 9):
        what = f"fp8 on {device}, " + (f"capability {capability[0]}.{capability[1]}" if capability else "no GPU")
        raise ConfigError(what, where="train.precision", fix="Use bf16; fp8 needs a GPU of capability 8.9 or more.")


def feature_width(config: RunConfig, drafter: DrafterConfig) -> int:
    """Return X, what a token brings from the target: the taps, and for soft labels the state that the head reads."""
    return drafter.feature_size + (drafter.hidden_size if config.train.soft_weight else 0)


def body_of(model: DFlashDraftModel, attention: str) -> Callable[..., Tensor]:
    """Return the function that is compiled: everything between embeddings and head."""

    def body(
        features_bSC: Tensor,
        anchors_bND: Tensor,
        mask_D: Tensor,
        positions_bQ: Tensor,
        masks: list[Any],
        positions_bS: Tensor,
    ) -> Tensor:
        return model.forward_blocks(features_bSC, anchors_bND, mask_D, positions_bQ, masks, attention, positions_bS)

    return body


def warm_batches(config: RunConfig, drafter: DrafterConfig, bucket: int) -> list[MicroBatch]:
    """Return micro-batches of made-up tokens, one of each shape that a bucket's have; the largest comes first, in which
    every slot of every place is supervised: no batch of training needs more memory (speculators#979 ran out of it
    part-way through an epoch)."""
    token = 0 if drafter.mask_token_id else 1  # clear of the mask token
    length = bucket // config.data.samples_per_row
    count = config.train.micro_batch * config.data.samples_per_row
    mask = (np.arange(length) > 0).tolist()
    samples = [Sample(id=f"warm-{i}", input_ids=[token] * length, loss_mask=mask) for i in range(count)]
    batch = Collator(config, drafter, samples).collate(0, bucket, tuple(range(config.train.micro_batch)))
    # Whole blocks stay inside the row, for the teacher's state of each slot.
    batch = replace(batch, anchors_bN=batch.anchors_bN.clamp(max=max(0, bucket - drafter.block_size)))
    places = batch.anchors_bN.numel()
    made = []
    for supervised in reversed(level_blocks(places, config.row_levels or 1)):
        valid_MK = torch.zeros(places, drafter.block_size, dtype=torch.bool)
        valid_MK[:supervised, 1:] = True
        rows = make_rows(torch.full(valid_MK.shape, token), valid_MK, config.head_rows, config.row_levels)
        made.append(replace(batch, rows=rows))
    return made
