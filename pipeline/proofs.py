"""What is proved on decoded texts and on the export: lossless decoding, tau, train equals decode, strict reload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.acceptance import chained_walk, layer_masks, pooled_tau
from dflash.checkpoint import load_drafter
from dflash.decode import Decoded, DraftContext, draft_states, greedy_decode, speculative_decode_batch
from dflash.head import block_embeddings
from dflash.model import DFlashDraftModel
from dflash.taps import extract_features
from pipeline.dense_step import relative_difference
from pipeline.gates import Gate
from pipeline.rendering import Sample
from pipeline.static_decode import StaticDecoder, why_not_static


@dataclass(frozen=True)
class DecodedSet:
    """One set of prompts decoded both ways in float32, with the features of the whole texts."""

    name: str
    prompts: list[list[int]]
    plain: list[list[int]]
    speculative: list[Decoded]
    features: list[Tensor]

    @property
    def tau(self) -> float:
        return pooled_tau([len(d.tokens) for d in self.speculative], [len(d.accepted) for d in self.speculative])


def decode_set(
    name: str,
    target: Any,
    drafter: DFlashDraftModel,
    samples: Sequence[Sample],
    *,
    max_new_tokens: int,
    eos_ids: set[int],
    advance: Callable[[], None],
    at_once: int = 1,
) -> DecodedSet:
    """Decode each prompt plainly and speculatively. Both run here, one after the other, on the same weights.

    at_once   prompts in a batch. A GPU waits for Python at each call (100 ms on an H200 for a target of 30 layers), so
              there 80 prompts of 128 tokens take 13 minutes one by one.
    """
    found = DecodedSet(name, [], [], [], [])
    limits: Any = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids}
    for first in range(0, len(samples), at_once):
        prompts = [sample.input_ids for sample in samples[first : first + at_once]]
        if at_once > 1 and why_not_static(target) is None:
            slots = max(map(len, prompts)) + max_new_tokens
            plain = StaticDecoder(target, sorted(eos_ids), len(prompts), slots).answers(prompts, max_new_tokens)
        else:
            plain = [greedy_decode(target, prompt, **limits) for prompt in prompts]
        speculative = speculative_decode_batch(target, drafter, prompts, **limits)
        found.prompts.extend(prompts)
        found.plain.extend(plain)
        found.speculative.extend(speculative)
        for prompt, answer in zip(prompts, plain, strict=True):
            ids = torch.tensor([[*prompt, *answer]], device=target.device)
            found.features.append(extract_features(target, ids, drafter.config.target_layer_ids))
            advance()
    return found


def lossless(sets: Sequence[DecodedSet]) -> Gate:
    """Speculative and plain greedy decoding give the same tokens, in float32, token for token."""
    pairs = [
        (s.name, i, d.tokens, p) for s in sets for i, (d, p) in enumerate(zip(s.speculative, s.plain, strict=True))
    ]
    different = [
        (name, i, next((k for k, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y))))
        for name, i, x, y in pairs
        if x != y
    ]
    detail = f"{sum(len(p) for *_, p in pairs)} tokens of {len(pairs)} prompts, float32"
    if different:
        name, index, token = different[0]
        detail = f"first difference: {name} prompt {index}, token {token}"
    return Gate("lossless greedy decoding", len(different), "0 prompts differ", not different, detail)


def chained_tau(found: DecodedSet, drafter: DFlashDraftModel, target: Any) -> float:
    """Return the tau that decoding the set's own texts must have with `drafter`, without decoding."""
    calls = [
        len(
            chained_walk(
                drafter,
                features,
                [*prompt, *plain],
                len(prompt),
                target.get_input_embeddings().weight,
                target.get_output_embeddings().weight,
            )
        )
        for prompt, plain, features in zip(found.prompts, found.plain, found.features, strict=True)
    ]
    return pooled_tau([len(p) for p in found.plain], calls)


@torch.no_grad()
def train_equals_decode(found: DecodedSet, drafter: DFlashDraftModel, target: Any) -> Gate:
    """At every anchor of a held-out text, the training mask and the decode loop's cache give the same states."""
    embedding_VD, config = target.get_input_embeddings().weight, drafter.config
    worst, anchors = 0.0, 0
    texts = [t for t in zip(found.prompts, found.plain, found.features, strict=True) if len(t[1]) > 1]
    for prompt, plain, features in texts[:2]:
        tokens = torch.tensor([*prompt, *plain], device=features.device)
        anchors_N = torch.arange(len(prompt), len(tokens) - 1, device=features.device)
        noise = torch.full((len(anchors_N), config.block_size), config.mask_token_id, device=features.device)
        noise[:, 0] = tokens[anchors_N]
        positions = anchors_N[:, None] + torch.arange(config.block_size, device=features.device)
        masks = layer_masks(drafter, anchors_N[None], features.shape[1], "sdpa")
        trained = drafter(
            features, block_embeddings(noise.view(1, -1), embedding_VD, config), positions.view(1, -1), masks, "sdpa"
        )
        trained = trained.view(len(anchors_N), config.block_size, -1)
        context = DraftContext(drafter)
        context.extend(features[:, : len(prompt)])
        for row, anchor in enumerate(anchors_N.tolist()):
            if context.length < anchor:
                context.extend(features[:, context.length : anchor])
            decoded = draft_states(drafter, context, int(tokens[anchor]), embedding_VD)
            worst = max(worst, relative_difference(decoded[0], trained[row]))
            anchors += 1
    detail = f"states at {anchors} anchors of held-out text, float32"
    holds = worst <= 1e-3 and anchors > 0
    return Gate("train equals decode", float(f"{worst:.2e}"), "<= 1e-3 relative", holds, detail)


def export_equals_training(folder: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> Gate:
    """The export reloads with every tensor known and none missing, and equals the last checkpoint in `dtype`."""
    try:
        loaded = dict(load_drafter(folder).named_parameters())
    except ValueError as error:
        return Gate("export reloads strictly", "refused", "equal", False, str(error))
    different = [name for name, tensor in weights.items() if not torch.equal(loaded[name], tensor.to(dtype))]
    value = f"{len(different)} tensors differ" if different else "equal"
    return Gate(
        "export reloads strictly",
        value,
        "equal",
        not different,
        f"{len(loaded)} tensors, {str(dtype).removeprefix('torch.')}",
    )
