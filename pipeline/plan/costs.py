"""Seconds of each part of a run on one GPU: operations and bytes by formula, over shares of the GPU's own rates.

The shares were fitted on one H200 (points.py compares). Two things take time, and the longer one counts: the GPU, and
the Python that starts its kernels, which a larger micro-batch does not make longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.flops import StepFlops, expected_pairs, optimizer_bytes, step_flops
from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from pipeline.errors import ConfigError
from pipeline.plan.gpus import Gpu
from pipeline.plan.shapes import TargetShape
from pipeline.sharded import Shard

PRODUCTS = 0.890
"""Share of the matmul rate that products reach, with all that grows with their rows (norms, softmax, float32 sums)."""
NARROW = 680
"""Width at which that share is about half of it: products of few columns are not as fast, and write much for what they
compute (SmolLM2's 576: 48 % of the rate)."""
ATTENTION = 0.605
"""The same of attention's products in flex attention."""
DRAFTER_HOST = 0.0064
"""Seconds of Python for each draft layer, forward and backward, that is launched kernel by kernel: 32 ms at five
layers, the only number measured."""
OPTIMIZER = 0.595
"""Share of the copy rate that a clipped AdamW step reaches, by its least traffic."""
RECORDED_HOST = 0.002
"""Seconds of Python for a micro-batch whose forward and backward are one CUDA graph (compile.cuda_graphs), and for one
of the target's: assumed, not measured."""
OPTIMIZER_HOST = 0.00047
"""Seconds of Python for each draft layer in an optimizer step."""
TARGET_HOST = 0.0022
"""Seconds of Python for each layer of the target's forward: what a run of SmolLM2 (30 layers) left when the drafter's
own share was taken off."""
DECODE_LAUNCH = 95e-6
"""Seconds of a decoding step for each layer, whatever its rows: about 40 small kernels that one CUDA graph starts."""
DECODE_PASSES = 144
"""How often a decoding step reads or writes a row's state (hidden width) in one layer, all small kernels together."""
DECODE_CACHE = 0.385
"""Share of the copy rate at which a decoding step reads keys and values."""
DECODE_OVERHEAD = 1.09
"""All that a batch of answers takes beside its steps, as a factor: recording, checks, prompts' padding."""
OWN_TEXTS = 1.4
"""Texts that a target writes for each prompt of its own that is kept (14,036 for 10,044)."""
KEY_BUCKET = 128
"""Slots that a decoding step attends to are a multiple of this (pipeline/static_decode.py)."""


@dataclass(frozen=True, kw_only=True)
class Micro:
    """The shape of one micro-batch."""

    rows: int
    length: int
    """Tokens of a row, padding included."""
    anchors: int
    """Blocks of a row."""
    block: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def slots(self) -> int:
        return self.rows * self.anchors * self.block

    @property
    def supervised(self) -> int:
        """At most: slot 0 is never supervised."""
        return self.rows * self.anchors * (self.block - 1)


def drafter_flops(drafter: DrafterConfig, micro: Micro) -> StepFlops:
    """Return the operations of one forward and backward (benchmarks/flops.py); anchors lie evenly. Raises ConfigError
    for a drafter that cannot be counted."""
    try:
        return step_flops(
            drafter,
            sequences=micro.rows,
            context_len=micro.length,
            num_anchors=micro.anchors,
            num_rows=micro.supervised,
            pairs=expected_pairs(micro.rows, micro.length, micro.anchors, micro.block),
        )
    except DFlashError as error:
        raise ConfigError(error.what, where="drafter", fix=error.fix) from None


def drafter_parameters(drafter: DrafterConfig) -> int:
    """Return the drafter's trained weights, without norms."""
    D, queries = drafter.hidden_size, drafter.num_attention_heads * drafter.head_dim
    keys = drafter.num_key_value_heads * drafter.head_dim
    layer = 2 * D * (queries + keys) + 3 * D * drafter.intermediate_size
    return drafter.num_hidden_layers * layer + drafter.feature_size * D


@dataclass(frozen=True)
class Seconds:
    """What one piece of work keeps busy: the GPU, and Python."""

    gpu: float
    host: float

    @property
    def alone(self) -> float:
        """The time that it takes with a GPU and a process of its own."""
        return max(self.gpu, self.host)


def drafter_seconds(
    drafter: DrafterConfig, micro: Micro, gpu: Gpu, *, soft: bool = False, recorded: bool = False
) -> Seconds:
    """Return what forward and backward of one micro-batch take.

    soft       the target's logits are made as well
    recorded   the step is a CUDA graph, else its kernels are launched by Python
    """
    flops = drafter_flops(drafter, micro)
    products = flops.total - flops.attention + (flops.head / 2 if soft else 0)
    share = products_share(drafter.hidden_size)
    busy = products / (share * gpu.matmul) + flops.attention / (ATTENTION * gpu.matmul)
    return Seconds(busy, RECORDED_HOST if recorded else DRAFTER_HOST * drafter.num_hidden_layers)


def products_share(width: int) -> float:
    """Return the share of the matmul rate that products of a model of `width` reach: PRODUCTS at 4096 and above."""
    return PRODUCTS * min(1.0, width / (width + NARROW) * (4096 + NARROW) / 4096)


def optimizer_seconds(drafter: DrafterConfig, gpu: Gpu) -> Seconds:
    """Return what clipping and AdamW take once a step."""
    traffic = optimizer_bytes(drafter_parameters(drafter), rounded_copy=True)
    return Seconds(traffic / (OPTIMIZER * gpu.copy), OPTIMIZER_HOST * drafter.num_hidden_layers)


@cache
def kept_share(drafter: DrafterConfig, drafters: int) -> float:
    """Return the share of the parameters that one of `drafters` keeps at the most when the optimizer is sharded: an
    even one, but for a parameter that is larger (pipeline/sharded.py)."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in DFlashDraftModel(drafter).parameters()]
    held = [0] * drafters
    for size, owner in zip(sizes, Shard(0, drafters).owners(sizes), strict=True):
        held[owner] += size
    return max(held) / sum(sizes)


def exchange_seconds(drafter: DrafterConfig, gpu: Gpu, drafters: int, *, sharded: bool = False) -> float:
    """Return what adding up float32 gradients over `drafters` GPUs takes: each receives, and sends, every gradient
    twice but for its own share; where the optimizer is sharded, those that it keeps, and all rounded weights. By
    formula; not measured.
    """
    others = (drafters - 1) / drafters
    size = 4 * kept_share(drafter, drafters) * (drafters - 1) + 2 * others if sharded else (4 + 4) * others
    return size * drafter_parameters(drafter) / gpu.link


def target_flops(target: TargetShape, micro: Micro) -> tuple[float, float]:
    """Return the operations of one forward without the head: of products, and of causal attention."""
    products = 2.0 * micro.tokens * target.matrices
    return products, target.layers * micro.rows * micro.length**2 / 2 * 4.0 * target.queries


def target_seconds(target: TargetShape, micro: Micro, gpu: Gpu, *, recorded: bool = False) -> Seconds:
    """Return what the features of one micro-batch take. The shares of the rate are the drafter's: not measured."""
    products, attention = target_flops(target, micro)
    busy = products / (products_share(target.hidden) * gpu.matmul) + attention / (ATTENTION * gpu.matmul)
    return Seconds(busy, RECORDED_HOST if recorded else TARGET_HOST * target.layers)


def decode_seconds(target: TargetShape, rows: int, slots: int, gpu: Gpu) -> float:
    """Return what one decoding step of `rows` answers takes that attends to `slots` slots: the weights are read or
    multiplied, whichever takes longer; states and the cache are read; each kernel has its least time."""
    weights = target.matrices + target.table
    products = max(2 * weights / gpu.copy, 2 * weights * rows / (PRODUCTS * gpu.matmul))
    states = rows * target.layers * target.hidden * 2 * DECODE_PASSES / gpu.copy
    cache = rows * slots * target.cache_width * 2 / (DECODE_CACHE * gpu.copy)
    return products + states + cache + target.layers * DECODE_LAUNCH


def answer_seconds(target: TargetShape, rows: int, prompt: int, answer: int, gpu: Gpu) -> float:
    """Return what a batch of `rows` answers of `answer` tokens takes, its prompts included."""
    steps = (
        decode_seconds(target, rows, -(-(prompt + step) // KEY_BUCKET) * KEY_BUCKET, gpu) for step in range(answer)
    )
    prompts, attention = target_flops(target, Micro(rows=rows, length=prompt, anchors=0, block=1))
    prefill = prompts / (PRODUCTS * gpu.matmul) + attention / (ATTENTION * gpu.matmul)
    return DECODE_OVERHEAD * (sum(steps) + prefill)
