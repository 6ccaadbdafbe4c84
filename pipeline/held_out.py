"""Tau while training: the target's own answers to the held-out prompts, walked with the weights of the moment.

The answers are greedy text of the target (regenerate.py), so the walk is exact for them. Written in a batch and in the
run's dtype, they may differ at near-ties from what verification decodes in float32.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dflash.acceptance import TextDrafts, draft_text, estimate_tau
from dflash.taps import extract_features
from pipeline.cache import CachedData
from pipeline.config import RunConfig
from pipeline.data import prompt_len
from pipeline.rendering import Sample
from pipeline.replica import Replica


class HeldOutTau:
    """The first verify.num_prompts held-out texts with their features, kept in main memory.

    Features come from the cache; where they are made online, `target` makes them here, once.
    """

    def __init__(self, config: RunConfig, data: CachedData, target: Any) -> None:
        self._texts = data.held_out[: config.verify.num_prompts]
        self._features = [_features(data, target, index) for index in range(len(self._texts))]

    def __call__(self, replica: Replica) -> dict[str, Any]:
        """Return {"chained", "uniform", "marginals", "prompts"} (see dflash.acceptance.TauEstimates) of the working
        weights.

        The model runs uncompiled, without gradients, in its own dtype; nothing of the training's state is touched.
        """
        texts = [_drafts(replica, text, found) for text, found in zip(self._texts, self._features, strict=True)]
        return {**asdict(estimate_tau(texts)), "prompts": len(texts)}


def _features(data: CachedData, target: Any, index: int) -> Tensor:
    if data.features is not None:
        return data.features(len(data.samples) + index)[:, : data.drafter.feature_size]  # soft labels add a state
    ids = torch.tensor([data.held_out[index].input_ids], device=target.device)
    return extract_features(target, ids, data.drafter.target_layer_ids)[0].cpu()


def _drafts(replica: Replica, text: Sample, features_TC: Tensor) -> TextDrafts:
    return draft_text(
        replica.model,
        features_TC[None].to(replica.device, replica.dtype),
        text.input_ids,
        prompt_len(text),
        replica.borrowed.embedding_VD,
        replica.borrowed.head_VD,
    )
