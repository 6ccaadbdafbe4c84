"""The tiny target, by the name that the tests know it under; the smoke test makes the same one."""

from __future__ import annotations

from pipeline.tiny_target import (
    CHATML,
    EOS_ID,
    MASK_ID,
    PAD_ID,
    SPECIAL,
    START_ID,
    UNUSED_ID,
    VOCAB_SIZE,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

__all__ = [
    "CHATML",
    "EOS_ID",
    "MASK_ID",
    "PAD_ID",
    "SPECIAL",
    "START_ID",
    "UNUSED_ID",
    "VOCAB_SIZE",
    "tiny_model",
    "tiny_target",
    "tiny_tokenizer",
]
