"""DFlash drafters in torch: the model, its training objective, decoding, acceptance, and race-safe compilation.

Imports torch and transformers and nothing of the pipeline; usable on its own.
"""

from dflash.acceptance import chained_walk, pooled_tau
from dflash.anchors import build_blocks, draw_anchors, sample_seed
from dflash.block_length import AdaptiveLength, FixedLength
from dflash.checkpoint import load_drafter, save_drafter
from dflash.compile import CompileGate
from dflash.config import DrafterConfig, spread_layer_ids
from dflash.decode import (
    Decoded,
    acceptance_histogram,
    conditional_acceptance,
    greedy_decode,
    sample_decode,
    speculative_decode,
    speculative_decode_batch,
)
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss, make_rows
from dflash.sampling import Sampling, row_generators
from dflash.soft_labels import Teacher
from dflash.taps import FeatureTaps, extract_features

__all__ = [
    "AdaptiveLength",
    "CompileGate",
    "DFlashDraftModel",
    "DFlashError",
    "Decoded",
    "DrafterConfig",
    "FeatureTaps",
    "FixedLength",
    "Sampling",
    "Teacher",
    "Weighting",
    "acceptance_histogram",
    "build_blocks",
    "chained_walk",
    "conditional_acceptance",
    "draw_anchors",
    "extract_features",
    "greedy_decode",
    "head_loss",
    "load_drafter",
    "make_rows",
    "pooled_tau",
    "row_generators",
    "sample_decode",
    "sample_seed",
    "save_drafter",
    "speculative_decode",
    "speculative_decode_batch",
    "spread_layer_ids",
]
