"""The shape of a training step, and its floating-point operations from that alone: what MFU divides by.

A product of (m, n) with (n, k) is 2 m n k; norms, rotations, softmax and the optimizer are not counted. Each product
counts once forward and once for every gradient that exists:

    draft layers, block and context    3: forward, gradient of the input, gradient of the weight
    fc                                 2: forward, gradient of the weight; the features are the target's
    head, supervised rows only         2: forward, gradient of the states; the head is frozen
    attention, allowed pairs only      3: two products forward (scores, values), four backward (values, weights, q, k)

This is the method as it is written. A kernel that makes the scores again in its backward does more, a drafter that
computes equal rows once or leaves unused ones out does less (`forward_blocks`: 1.8 TFLOP of the reference case); both
are the implementation's, and show in the time alone.

For the reference case this gives 71.5 TFLOP. The 72.5 that is quoted for it also counts a gradient
of the features, which nothing needs (0.52), and the scores a second time in attention's backward (0.52): `quoted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash.config import FULL, DrafterConfig, spread_layer_ids
from dflash.errors import DFlashError

NUM_TAPS = 5
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, num_target_layers=36, rope_theta=1e6,
    ),
    "smollm2": dict(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        vocab_size=49152, num_target_layers=30, rope_theta=1e5,
    ),
    "tiny": dict(
        hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=2048, num_target_layers=12, rope_theta=1e4,
    ),
}  # fmt: skip
"""What a drafter takes over from its target."""


@dataclass(frozen=True)
class Case:
    """The shape of one step: `sequences` rows of context_len tokens, num_anchors blocks of block_size slots in each."""

    name: str
    target: str
    sequences: int
    context_len: int
    num_anchors: int
    block_size: int
    num_layers: int = 5
    precision: str = "bf16"

    def drafter(self) -> DrafterConfig:
        """Return the drafter: NUM_TAPS taps, the target's last token as mask."""
        shape = TARGETS[self.target]
        return DrafterConfig(
            **shape,
            num_hidden_layers=self.num_layers,
            block_size=self.block_size,
            mask_token_id=shape["vocab_size"] - 1,
            target_layer_ids=spread_layer_ids(shape["num_target_layers"], NUM_TAPS),
        )


REFERENCE = Case("reference", "qwen3-8b", 1, 3072, 512, 16)
BY_NAME = (replace(REFERENCE, name="reference fp8", precision="fp8"),)
"""Cases that run on a GPU when they are asked for by name, and in no set of sizes."""
CUDA_CASES = (
    REFERENCE,
    Case("qwen3-8b 8 x 1024", "qwen3-8b", 8, 1024, 64, 8),
    Case("qwen3-8b 8192", "qwen3-8b", 1, 8192, 512, 16),
    Case("qwen3-8b 4 x 3072", "qwen3-8b", 4, 3072, 512, 16),
    Case("smollm2 3072", "smollm2", 1, 3072, 512, 16),
    Case("smollm2 8 x 1024", "smollm2", 8, 1024, 64, 8),
    Case("smollm2 8 x 3072", "smollm2", 8, 3072, 512, 8),
)
CPU_CASES = (
    Case("tiny 2 x 128", "tiny", 2, 128, 16, 8, num_layers=2, precision="fp32"),
    Case("smollm2 1 layer", "smollm2", 2, 256, 16, 4, num_layers=1, precision="fp32"),
)


def chosen_cases(device: torch.device, sizes: str, names: Sequence[str]) -> list[Case]:
    """Return the cases to run. Raises DFlashError for sizes or names that this device does not have."""
    cuda = device.type == "cuda"
    if not cuda and sizes in ("reference", "all"):
        raise DFlashError(f"{sizes} on {device} would take hours", where="--sizes", fix="Leave it out, or use a GPU.")
    cases = CUDA_CASES if cuda else CPU_CASES
    by_name = {case.name: case for case in (*cases, *(BY_NAME if cuda else ()))}
    if unknown := [name for name in names if name not in by_name]:
        raise DFlashError(f"{unknown[0]!r} is none of {', '.join(by_name)}", where="--case", fix="Choose one.")
    if names or sizes == "reference":
        return [by_name[name] for name in names or [REFERENCE.name]]
    return [case for case in cases if not cuda or sizes != "small" or case.target == "smollm2"]


@dataclass(frozen=True)
class StepFlops:
    """Operations of one forward and backward, by part."""

    layers: float
    """Projections and MLP of the block tokens."""
    context: float
    """Keys and values of the context, in every layer."""
    fc: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.context + self.fc + self.attention + self.head

    @property
    def quoted(self) -> float:
        """The total with fc's input gradient (3 products for 2) and attention's second scores (7 for 6)."""
        return self.total + self.fc / 2 + self.attention / 6


def expected_pairs(sequences: int, context_len: int, num_anchors: int, block_size: int) -> float:
    """Return the (query, key) pairs a layer is expected to allow for anchors drawn evenly: half the context and the
    block for each slot."""
    return sequences * num_anchors * block_size * (context_len / 2 + block_size)


def allowed_pairs(anchors_bN: Tensor, block_size: int) -> int:
    """Return the pairs that a full layer allows (dflash/masks.py): each slot sees its anchor's past and its block."""
    return block_size * (int(anchors_bN.sum()) + anchors_bN.numel() * block_size)


def step_flops(
    config: DrafterConfig, *, sequences: int, context_len: int, num_anchors: int, num_rows: int, pairs: float
) -> StepFlops:
    """Return the operations of one forward and backward.

    num_rows   supervised slots over all sequences
    pairs      (query, key) pairs that attention computes in one layer and head, over all sequences
    Raises DFlashError for a drafter whose products are not those above: sliding or causal layers (whose pairs differ
    from layer to layer) or a head that picks tokens.
    """
    if set(config.layer_types) != {FULL} or config.is_causal:
        what = f"layers {config.layer_types}, causal: {config.is_causal}, do not all see what allowed_pairs counts"
        raise DFlashError(what, where="step_flops", fix="Use full layers, not causal.")
    if config.conv_kernel_size or config.selector_rank or config.markov_rank:
        raise DFlashError("a drafter with a head of its own is not counted", where="step_flops", fix="Use a plain one.")
    D, L = config.hidden_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    block_tokens, context_tokens = sequences * num_anchors * config.block_size, sequences * context_len
    layer = 2 * D * (queries + 2 * keys) + 2 * queries * D + 6 * D * config.intermediate_size
    return StepFlops(
        layers=3.0 * L * block_tokens * layer,
        context=3.0 * L * context_tokens * 2 * D * 2 * keys,
        fc=2.0 * context_tokens * 2 * config.feature_size * D,
        attention=3.0 * L * pairs * 2 * 2 * queries,
        head=2.0 * num_rows * 2 * D * config.vocab_size,
    )


def optimizer_bytes(num_parameters: int, *, rounded_copy: bool) -> int:
    """Return the least memory traffic of a clipped AdamW step in float32: the gradient is read for its norm and again,
    weight and both moments are read and written; then a bf16 copy is written, or, without one, the gradient as zero
    (with one, the next micro-batch is written over it)."""
    return num_parameters * (2 * 4 + 3 * 2 * 4 + (2 if rounded_copy else 4))
