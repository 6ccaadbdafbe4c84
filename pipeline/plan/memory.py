"""Bytes on a GPU, by part. bf16 weights and activations, float32 masters, gradients and moments."""

from __future__ import annotations

from dflash.config import DrafterConfig
from pipeline.plan.costs import KEY_BUCKET, Micro, drafter_parameters, kept_share
from pipeline.plan.shapes import TargetShape
from pipeline.turns import Turns

USABLE = 0.95
"""Of a GPU's memory: the rest is the CUDA context, libraries and what an allocator cannot use."""

Parts = dict[str, float]


def feature_bytes(drafter: DrafterConfig, micro: Micro, *, soft: bool = False) -> float:
    """Return the size of one micro-batch's features, with the state that soft labels are made from."""
    return 2.0 * micro.tokens * (drafter.feature_size + (drafter.hidden_size if soft else 0))


def table_bytes(target: TargetShape) -> float:
    """Return the size of the target's embedding and head, which a drafter borrows."""
    return 2.0 * target.table * (1 if target.tied else 2)


def drafter_memory(
    drafter: DrafterConfig, target: TargetShape, micro: Micro, *, head_rows: int, soft: bool = False, keepers: int = 1
) -> Parts:
    """Return what a drafter's GPU holds at its peak, at the start of the backward.

    head_rows   supervised slots whose logits exist at once
    keepers     ranks that float32 weights and moments are divided among (pipeline/sharded.py); gradients are not, and
                this is the GPU of the one that keeps most
    A slot leaves 3 F + 11 D numbers in each layer, a context token its keys and values, as made and repeated for each
    query head (fitted on six cases of invoke bench).
    """
    P, L = drafter_parameters(drafter), drafter.num_hidden_layers
    slot = 3 * drafter.intermediate_size + 11 * drafter.hidden_size
    context = 2 * (drafter.num_attention_heads + drafter.num_key_value_heads) * drafter.head_dim
    return {
        "float32 weights, gradients, moments": (4.0 + 12.0 * kept_share(drafter, keepers)) * P,
        "bf16 weights": 2.0 * P,
        "the target's tables": table_bytes(target),
        "features": feature_bytes(drafter, micro, soft=soft),
        "activations": 2.0 * L * (micro.slots * slot + micro.tokens * context),
        "logits": 2.0 * min(head_rows, micro.supervised) * drafter.vocab_size * (2 if soft else 1),
    }


def target_memory(
    drafter: DrafterConfig, target: TargetShape, micro: Micro, *, turns: Turns, soft: bool = False
) -> Parts:
    """Return what a GPU of one of `turns`' targets holds. By formula; not measured."""
    return {
        "the target": 2.0 * target.parameters,
        "its forward": 2.0 * micro.tokens * (2 * target.ffn + 8 * target.hidden),
        "features that wait": feature_bytes(drafter, micro, soft=soft) * turns.places(),
    }


def decode_memory(target: TargetShape, rows: int, slots: int) -> float:
    """Return what answering `rows` prompts at once takes: weights, a cache of full length, logits."""
    whole = -(-slots // KEY_BUCKET) * KEY_BUCKET
    return 2.0 * (target.parameters + rows * (whole * target.cache_width + target.vocab))


def most_rows(target: TargetShape, slots: int, usable: float) -> int:
    """Return how many prompts fit at once, 0 if the target alone does not."""
    left = usable - decode_memory(target, 0, slots)
    return max(0, int(left / (decode_memory(target, 1, slots) - decode_memory(target, 0, slots))))
