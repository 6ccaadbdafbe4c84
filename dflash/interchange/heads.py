"""Successors of DFlash, known by their tensors and keys, so that a refusal can name what it refuses.

A plain reader that skips them runs another drafter than was trained: SGLang ignores unknown tensors without a word.
Sources: anatomy 1.8 and 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash.errors import DFlashError

_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash 2",
    "Qwen3DFlash2DraftModel": "DFlash 2",
    "Qwen3DSparkModel": "DSpark",
    "DSparkDraftModel": "DSpark",
    "LiLiCorrDraftModel": "LiLiCorr",
}
_TENSORS = {
    "attention_conv.": "DFlash 2",
    "mlp_conv.": "DFlash 2",
    "candidate_selector.": "DFlash 2",
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "markov_": "DSpark",
    "confidence_": "DSpark",
    "logit_head.": "DSpark",
    "lilicorr.": "LiLiCorr",
    "fusion_weights": "DFlare",
    "fusion_norms.": "DFlare",
    "attention_sink_bias": "MiMo's attention sink",
    "mask_hidden": "a mask embedding of its own",
    "mask_embedding": "a mask embedding of its own",
}
_KEYS = {
    "conv_": "DFlash 2",
    "selector_": "DFlash 2",
    "gru_hidden_dim": "Domino",
    "emb_dim": "Domino",
    "pure_draft_prefix_len": "Domino",
    "markov_": "DSpark",
    "enable_confidence": "DSpark",
    "use_confidence": "DSpark",
    "confidence_": "DSpark",
    "lilicorr_": "LiLiCorr",
    "attention_sink_bias": "MiMo's attention sink",
    "attention_value_scale": "MiMo's value scale",
}
_FIX = "Only plain DFlash drafters are read; without that part the drafter would compute something else."


def refuse_architecture(name: str) -> None:
    """Raise DFlashError if the architecture string is a successor's."""
    if name in _ARCHITECTURES:
        raise DFlashError(f"{name} is a drafter of {_ARCHITECTURES[name]}", where="architectures", fix=_FIX)


def head_of_key(key: str) -> str | None:
    """Return the successor that a key of dflash_config belongs to."""
    return next((head for start, head in _KEYS.items() if key.startswith(start)), None)


def refuse_head_keys(settings: Mapping[str, Any], where: str) -> None:
    """Raise DFlashError for the first key of a successor that is switched on (0, false and null are off)."""
    kind = settings.get("projector_type")
    if kind not in (None, "dflash"):
        raise DFlashError(f"{kind!r} is a successor of DFlash", where=f"{where}projector_type", fix=_FIX)
    for key in sorted(settings):
        head = head_of_key(key)
        if head and settings[key]:
            raise DFlashError(f"is {settings[key]!r}, which belongs to {head}", where=f"{where}{key}", fix=_FIX)


def refuse_head_tensors(names: Iterable[str], where: str) -> None:
    """Raise DFlashError naming the successor whose tensor is among `names`."""
    for name in sorted(names):
        for part, head in _TENSORS.items():
            if name.startswith(part) or f".{part}" in name:
                raise DFlashError(f"tensor {name} belongs to {head}", where=where, fix=_FIX)
