"""What other drafters write into config.json and a plain one does not compute: refused by name.

A reader that skips such a key runs another drafter than was trained. Sources: anatomy 1.8 and 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.errors import DFlashError

_ARCHITECTURES = {
    "Qwen3DSparkModel": "DSpark",
    "DSparkDraftModel": "DSpark",
    "LiLiCorrDraftModel": "LiLiCorr",
}
_KEYS = {
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
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "partial_rotary_factor": (None, 1.0),
    "logit_scale": (None, 1.0),
    "mlp_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "text_config": (None,),
}
"""Top-level keys that change numbers, with the values that a plain drafter may have."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (None, True),
    "attention_mode": (None, "gqa", "mha"),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "projector_type": (None, "dflash"),
}
_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": (None, "default"),
    "type": (None, "default"),
    "partial_rotary_factor": (None, 1.0),
    "factor": (None, 1.0),
}
"""Keys of rope_parameters besides rope_theta; any other (mrope_section, ...) turns other pairs by other angles."""
FIX = "Only DFlash and DFlash 2 drafters are read; without that part the drafter would compute something else."


def refuse_other_numbers(data: Mapping[str, Any]) -> None:
    """Raise DFlashError for the first setting of a config.json that changes numbers and is not computed here."""
    inner = data.get("dflash_config") or {}
    for key, allowed in _ONLY.items():
        _require(data.get(key), allowed, key)
    refuse_head_keys(inner, "dflash_config.")
    refuse_head_keys({key: value for key, value in data.items() if key != "dflash_config"}, "")
    for key, allowed in PLAIN.items():
        _require(inner.get(key), allowed, f"dflash_config.{key}")
        _require(data.get(key), allowed, key)
    for key, of in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        _require(data.get(key), (None, data.get(of)), key)
    for key, value in (data.get("rope_parameters") or {}).items():
        if key != "rope_theta":
            _require(value, _ROPE.get(key, (None,)), f"rope_parameters.{key}")


def _require(value: Any, allowed: tuple[Any, ...], where: str) -> None:
    if value not in allowed:
        wanted = next((repr(option) for option in allowed if option is not None), "absence")
        raise DFlashError(f"{value!r} is not supported", where=where, fix=f"Only {wanted} is.")


def refuse_architecture(name: str) -> None:
    """Raise DFlashError if the architecture string is a successor's."""
    if name in _ARCHITECTURES:
        raise DFlashError(f"{name} is a drafter of {_ARCHITECTURES[name]}", where="architectures", fix=FIX)


def head_of_key(key: str) -> str | None:
    """Return the successor that a key of dflash_config belongs to."""
    return next((head for start, head in _KEYS.items() if key.startswith(start)), None)


def refuse_head_keys(settings: Mapping[str, Any], where: str) -> None:
    """Raise DFlashError for the first key of a successor that is switched on (0, false and null are off)."""
    kind = settings.get("projector_type")
    if kind not in (None, "dflash"):
        raise DFlashError(f"{kind!r} is a successor of DFlash", where=f"{where}projector_type", fix=FIX)
    for key in sorted(settings):
        head = head_of_key(key)
        if head and settings[key]:
            raise DFlashError(f"is {settings[key]!r}, which belongs to {head}", where=f"{where}{key}", fix=FIX)
