"""Compiled equals dense: a training step as it runs, against the same step computed the plain way."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.acceptance import layer_masks
from dflash.compile import CompileGate
from dflash.head import block_embeddings, head_logits, shaped_logits
from dflash.heads.rows import predecessors
from dflash.model import DFlashDraftModel
from pipeline.batches import Collator, MicroBatch, StepBatch, plan_of
from pipeline.cache import CachedData
from pipeline.config import RunConfig
from pipeline.gates import Gate
from pipeline.replica import Borrowed, Replica, feature_width
from pipeline.rounded import round_linears, rounded_product
from pipeline.target_forward import target_features
from pipeline.topology import CachedFeatures

FLOAT32_LIMIT = 1e-3
"""Largest difference over the largest value, of states or of one gradient, in float32."""
ROUNDING_LIMIT = 2.0
"""In bf16: the difference's norm over that of dense bf16 steps, which differ from float32 too. A fixed limit would be a
guess: in a trained 5-layer drafter some gradients of key projections cancel so far that bf16 moves them by 0.13 of
their largest value. In fp8 the dense step rounds every operand of a product that runs in fp8, and multiplies in
float32. A mask that leaks one token to a random tiny drafter is 2.5 in fp8."""
DENSE_ATTENTIONS = ("sdpa", "eager")
NARROW_BATCHES = 4
"""Micro-batches that such norms are taken over, with both attentions: each is a draw of rounding errors. On one
batch the two dense steps themselves were 2.3 apart at one gradient's largest difference, 1.6 in norms; over two batches
no more than 1.2 (H200, SmolLM2-135M, 5 layers, 500 steps; the compiled step 1.1, median 0.7)."""


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| / max |b| in float32; infinity when anything is not finite, since NaN passes comparisons."""
    found = float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-12))
    return found if math.isfinite(found) else math.inf


def compiled_equals_dense(
    config: RunConfig, data: CachedData, target: Any, trained: DFlashDraftModel, device: torch.device
) -> Gate:
    """The compiled body with its attention, and the fused head, against dense attention and a plain cross-entropy in
    float32, on a real batch of every bucket that has one: states and every gradient."""
    gate = CompileGate(workers=1, backend=config.compile.backend)
    dtype = next(trained.parameters()).dtype
    replica = Replica("verify", config, data.drafter, trained, Borrowed.of(target, device, dtype), device, gate)
    exactly, fp8 = dtype == torch.float32, config.train.precision == "fp8"
    steps = _of_every_bucket(plan_of(config, data.samples).epoch(0), 1 if exactly else NARROW_BATCHES)
    collator = Collator(config, data.drafter, data.samples)
    batches = [collator.collate(s.epoch, s.bucket, s.indices[: config.train.micro_batch]).to(device) for s in steps]
    found: list[tuple[Tensor, list[Tensor]]] = []
    features = [_features(config, data, target, batch, device, dtype) for batch in batches]

    def run() -> None:
        if config.recorded:
            replica.warm_up()  # what is compared is what training replays
        for batch, given in zip(batches, features, strict=True):
            states = replica.states(batch, given).detach()
            for _ in range(2):  # the first is written over the gradients, the second is added to them
                replica.forward_backward(batch, given)
            found.append((states, [g / 2 for g in replica.optimizer.gradients]))
            replica.optimizer.forget()

    with gate.worker("verify"):
        gate.warm_up(run)
    gate.close()
    largest: dict[str, float] = {}
    errors, costs, sizes = (defaultdict[str, float](float) for _ in range(3))
    for batch, given, (states, gradients) in zip(batches, features, found, strict=True):
        mine = _named(replica, batch, states, gradients)
        exact = _named(replica, batch, *dense_step(replica, batch, given, torch.float32, "eager"))
        for name, reference in exact.items():
            largest[name] = max(largest.get(name, 0.0), relative_difference(mine[name], reference))
            errors[name] += squared_norm(mine[name].float() - reference)
            sizes[name] += squared_norm(reference)
        for attention in () if exactly else DENSE_ATTENTIONS:
            rounded = _named(replica, batch, *dense_step(replica, batch, given, dtype, attention, fp8=fp8))
            for name, reference in exact.items():
                costs[name] += squared_norm(rounded[name].float() - reference) / len(DENSE_ATTENTIONS)
    ratios = {name: times(errors[name], costs[name], sizes[name]) for name in errors}
    measured = largest if exactly else ratios
    where = max(measured, key=lambda name: measured[name])
    worst = measured[where]
    limit = FLOAT32_LIMIT if exactly else ROUNDING_LIMIT
    narrow = "fp8" if fp8 else str(dtype).removeprefix("torch.")
    unit = "relative" if exactly else f"x what dense {narrow} costs"
    buckets = f"{len({step.bucket for step in steps})} of {len(config.data.buckets)} buckets"
    batch_count = f"{len(batches)} micro-batch{'es' if len(batches) > 1 else ''}"
    detail = f"worst at {where}; {replica.attention} against eager, {batch_count}, {buckets}"
    return Gate("compiled equals dense", float(f"{worst:.2e}"), f"<= {limit:g} {unit}", worst <= limit, detail)


def _of_every_bucket(steps: Sequence[StepBatch], count: int) -> list[StepBatch]:
    """Return the first step of every bucket, then others of the longest buckets until there are `count`."""
    first = {step.bucket: step for step in reversed(steps)}
    chosen = list(first.values())
    others = sorted((s for s in steps if s not in chosen), key=lambda step: -step.bucket)
    return chosen + others[: max(0, count - len(chosen))]


def squared_norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a, dtype=torch.float64)) ** 2


def times(error: float, cost: float, size: float) -> float:
    """Return how many times what rounding costs an error is, all three squared norms; what float32 may differ by is
    allowed besides, so that a gradient which rounding happens to leave alone is not divided by nothing. Infinity when
    anything is not finite, since NaN passes comparisons."""
    if not math.isfinite(error + cost + size):
        return math.inf
    return math.sqrt(error) / max(math.sqrt(cost) + FLOAT32_LIMIT * math.sqrt(size), 1e-12)


def _named(replica: Replica, batch: MicroBatch, states: Tensor, gradients: list[Tensor]) -> dict[str, Tensor]:
    """Return the supervised states and every gradient by name."""
    supervised = states.flatten(0, 1)[batch.rows.index_R[batch.rows.valid_R]]
    return {"states": supervised, **dict(zip(replica.optimizer.names, gradients, strict=True))}


def dense_step(
    replica: Replica, batch: MicroBatch, features_bSX: Tensor, dtype: torch.dtype, attention: str, *, fp8: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return states (b, Q, D) and gradients of the loss numerator, computed the plain way: no compile, dense softmax
    attention, whole logits. The model and its products run in `dtype`, the loss in float32; with fp8, what a replica
    computes in fp8 is rounded to it."""
    model = DFlashDraftModel(replica.drafter).to(replica.device)
    model.load_state_dict(replica.model.state_dict())
    model.to(dtype)
    if fp8:
        round_linears(model)
    embeddings = block_embeddings(batch.noise_bQ, replica.borrowed.embedding_VD.to(dtype), replica.drafter)
    masks = layer_masks(model, batch.anchors_bN, features_bSX.shape[1], attention, batch.starts_bN)
    features_bSC = features_bSX[..., : replica.drafter.feature_size].to(dtype)
    states = model(features_bSC, embeddings, batch.positions_bQ, masks, attention, batch.positions_bS)
    rows, K, head_VD = batch.rows, replica.drafter.block_size, replica.borrowed.head_VD.to(dtype)
    states_RD = states.flatten(0, 1)[rows.index_R]
    if fp8 and not replica.config.train.soft_weight:
        logits_RV = shaped_logits(rounded_product(states_RD, head_VD), replica.drafter)
    else:
        logits_RV = head_logits(states_RD, head_VD, replica.drafter)
    hard_R = loss_R = F.cross_entropy(logits_RV, rows.label_R, reduction="none")
    if soft := replica.config.train.soft_weight:
        taught_RV = (replica.teacher(batch, features_bSX).state_RD.to(dtype) @ head_VD.T).to(logits_RV.dtype)
        wanted, found = taught_RV.log_softmax(-1), logits_RV.log_softmax(-1)
        loss_R = (1 - soft) * hard_R + soft * F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    places = states.shape[0] * states.shape[1]
    valid_MK = torch.zeros(places, dtype=torch.bool, device=hard_R.device).index_put((rows.index_R,), rows.valid_R)
    valid_MK = valid_MK.view(-1, K)

    def weigh(entropy_R: Tensor) -> Tensor:
        entropy_MK = entropy_R.new_zeros(places).index_put((rows.index_R,), entropy_R.detach()).view(-1, K)
        return replica.weighting.slot_weights(entropy_MK, valid_MK).flatten()[rows.index_R]

    total = (weigh(hard_R) * loss_R).sum()
    if model.picker:
        before_R = predecessors(batch.tokens_bS, batch.anchors_bN, rows)
        picked_R = _picker_loss(model, states.flatten(0, 1)[rows.index_R], logits_RV, before_R, rows.label_R)
        total = total + (weigh(picked_R if model.markov_head else hard_R) * picked_R).sum()
    total.backward()
    return states.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def _picker_loss(
    model: DFlashDraftModel, states_RD: Tensor, logits_RV: Tensor, before_R: Tensor, label_R: Tensor
) -> Tensor:
    """Return the head's cross-entropy of each row, over whole logits; 0 where no candidate is the label."""
    states_RD, logits_RV = states_RD.detach(), logits_RV.detach()
    if markov := model.markov_head:
        bias_RV = markov.markov_w1.weight[before_R] @ markov.markov_w2.weight.T
        return F.cross_entropy(logits_RV + bias_RV.to(logits_RV.dtype), label_R, reduction="none")
    selector = model.candidate_selector
    assert selector is not None
    gate_RE = selector.predecessor_codebook[before_R] * (states_RD @ selector.hidden_projection.weight.T)
    scores_RV = logits_RV + (gate_RE @ selector.successor_codebook.T).to(logits_RV.dtype)
    chosen = torch.zeros_like(logits_RV, dtype=torch.bool).scatter(1, logits_RV.topk(selector.top_k).indices, True)
    known_R = chosen.gather(1, label_R[:, None])[:, 0]
    scores_RV = scores_RV.masked_fill(~chosen, float("-inf"))
    label_R = torch.where(known_R, label_R, logits_RV.argmax(-1))
    return F.cross_entropy(scores_RV, label_R, reduction="none") * known_R


def _features(
    config: RunConfig, data: CachedData, target: Any, batch: MicroBatch, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if data.features is None:
        found = target_features(target, batch, data.drafter.target_layer_ids, bool(config.train.soft_weight))
        return found.to(device, dtype)
    cached = CachedFeatures(data.features, feature_width(config, data.drafter))
    return cached(batch, config.train.micro_batch, device, dtype)
