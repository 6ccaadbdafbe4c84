"""Successors of DFlash, known by their tensors, so that a refusal can name them (by their keys: dflash/strict.py).

A plain reader that skips them runs another drafter than was trained: SGLang ignores unknown tensors without a word.
Sources: anatomy 1.8 and 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash.errors import DFlashError
from dflash.strict import FIX

_TENSORS = {
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


def refuse_head_tensors(names: Iterable[str], where: str, *, own_markov: bool = False) -> None:
    """Raise DFlashError naming the successor whose tensor is among `names`.

    own_markov   the file's config has this project's Markov bias, whose tensors have DSpark's names
    """
    for name in sorted(names):
        for part, head in _TENSORS.items():
            ours = own_markov and name.startswith("markov_head.")
            if not ours and (name.startswith(part) or f".{part}" in name):
                raise DFlashError(f"tensor {name} belongs to {head}", where=where, fix=FIX)
