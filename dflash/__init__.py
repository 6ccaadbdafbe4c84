"""DFlash drafters in torch: the model, its training objective, decoding, acceptance, and race-safe compilation.

Imports torch and transformers and nothing of the pipeline; usable on its own.
"""

from dflash.acceptance import chained_walk, pooled_tau
from dflash.anchors import build_blocks, draw_anchors, sample_seed
from dflash.checkpoint import load_drafter, save_drafter
from dflash.compile import CompileGate
from dflash.config import DrafterConfig, spread_layer_ids
from dflash.decode import greedy_decode, speculative_decode
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss, make_rows
from dflash.taps import FeatureTaps, extract_features

__all__ = [
    "CompileGate",
    "DFlashDraftModel",
    "DFlashError",
    "DrafterConfig",
    "FeatureTaps",
    "Weighting",
    "build_blocks",
    "chained_walk",
    "draw_anchors",
    "extract_features",
    "greedy_decode",
    "head_loss",
    "load_drafter",
    "make_rows",
    "pooled_tau",
    "sample_seed",
    "save_drafter",
    "speculative_decode",
    "spread_layer_ids",
]
