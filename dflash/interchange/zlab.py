"""z-lab's config.json in all its dialects, brought to the one form that dflash.config_json reads.

Dialects: values at the top level or in dflash_config (z-lab's code looks in both), SpecForge's mirror of theta in
rope_scaling, Model-Optimizer's use_swa and swa_window_size, Automodel's architecture string, vLLM's numbered taps.
Two places that disagree are refused: readers differ in which one they believe.
Sources: anatomy 1.5, 1.6, 1.7 and 3.1.
"""

from __future__ import annotations

from typing import Any

from dflash.config import FULL, SLIDING
from dflash.config_json import DFLASH, DFLASH2, DFLASH2_KEYS, EITHER_PLACE, check_kinds
from dflash.errors import DFlashError
from dflash.interchange.readings import find_reading
from dflash.strict import PLAIN, head_of_key, refuse_architecture, refuse_other_numbers

AUTOMODEL = {"Qwen3DFlashDraftModel": DFLASH, "Qwen3DFlash2DraftModel": DFLASH2}


def canonical(data: dict[str, Any], reading: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return (config.json's content in this project's form, notes for a person).

    reading   one of READINGS by name, for what a sliding layer's config leaves open; "" for its writer's own, None
              if the format leaves nothing open
    Raises DFlashError for a successor of DFlash and for whatever would change numbers that we do not compute.
    """
    check_kinds(data)
    notes: list[str] = []
    flat = dict(data)
    inner = dict(data.get("dflash_config") or {})
    written_by_automodel = _architecture(flat)
    refuse_other_numbers(data)
    for key in PLAIN:
        inner.pop(key, None)
        flat.pop(key, None)
    for key in EITHER_PLACE:
        _merge(flat, inner, key)
    inner = {key: value for key, value in inner.items() if not _is_off(key, value)}
    _drop_numbered_taps(flat, inner)
    _plain_rope(flat)
    implied = _sliding(flat, inner)
    inner.pop("mask_token", None)  # a name for the id, which is there
    if reading is not None and SLIDING in (flat.get("layer_types") or ()):
        writer = "automodel" if written_by_automodel else "model-optimizer" if implied else "zlab"
        notes += _apply_reading(flat, inner, reading or writer)
    flat["dflash_config"] = inner
    return flat, notes


def _architecture(flat: dict[str, Any]) -> bool:
    """Set the architecture string; return whether it was Automodel's. A training script's own string is accepted where
    auto_map says what it stands for (SpecForge's exports)."""
    names = flat.get("architectures") or []
    for name in names:
        refuse_architecture(str(name))
    mapped = str((flat.get("auto_map") or {}).get("AutoModel", "")).rpartition(".")[2]
    kind = names[0] if names else "none"
    known = AUTOMODEL.get(kind) or (kind if kind in (DFLASH, DFLASH2) else None)
    if known is None and mapped in (DFLASH, DFLASH2):
        known = mapped
    if known is None and not names and flat.get("dflash_config"):
        known = DFLASH
    if known is None:
        raise DFlashError(
            f"architecture {kind} is not a DFlash drafter", where="architectures", fix=f"Expected {DFLASH}."
        )
    flat["architectures"] = [known]
    return kind in AUTOMODEL


def _merge(flat: dict[str, Any], inner: dict[str, Any], key: str) -> None:
    """Move a value of the top level into dflash_config. Raises DFlashError if both have one and differ."""
    outer = flat.pop(key, None)
    if outer is None:
        return
    if inner.get(key) not in (None, outer):
        raise DFlashError(f"is {outer!r}, and {inner[key]!r} in dflash_config", where=key, fix="Keep the true one.")
    inner[key] = outer


def _is_off(key: str, value: Any) -> bool:
    """Return whether a key of dflash_config says nothing; z-lab's code takes a softcap of 0 as none."""
    if key == "final_logit_softcapping":
        return not value or value < 0
    return value is None or ((head_of_key(key) is not None or key in DFLASH2_KEYS) and not value)


def _drop_numbered_taps(flat: dict[str, Any], inner: dict[str, Any]) -> None:
    """Remove vLLM's own list of taps, counted from 1, if it names the same layers; vLLM would believe it first."""
    numbered, ids = flat.pop("eagle_aux_hidden_state_layer_ids", None), inner.get("target_layer_ids")
    if numbered is not None and ids is not None and list(numbered) != [i + 1 for i in ids]:
        raise DFlashError(
            f"{numbered} are not the layers {ids} counted from 1",
            where="eagle_aux_hidden_state_layer_ids",
            fix="Keep the true list.",
        )
    if numbered is not None and ids is None:
        inner["target_layer_ids"] = [i - 1 for i in numbered]


def _plain_rope(flat: dict[str, Any]) -> None:
    """Fold a rope_scaling that scales nothing (SpecForge's mirror, older `type: default`) into rope_parameters."""
    scaling = flat.get("rope_scaling")
    if not isinstance(scaling, dict):
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    extra = sorted(scaling.keys() - {"rope_type", "type", "rope_theta"})
    if kind != "default" or extra:
        raise DFlashError(f"{scaling!r} is not supported", where="rope_scaling", fix="Only the default rope is.")
    nested = dict(flat.get("rope_parameters") or {"rope_type": "default"})
    theta = scaling.get("rope_theta")
    if theta is not None and nested.get("rope_theta") not in (None, theta):
        raise DFlashError(
            f"has theta {theta}, rope_parameters {nested['rope_theta']}", where="rope_scaling", fix="Keep the true one."
        )
    if theta is not None:
        nested["rope_theta"] = theta
    flat["rope_scaling"], flat["rope_parameters"] = None, nested


def _sliding(flat: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Bring use_swa and swa_window_size to layer_types and sliding_window; return whether use_swa made layers slide."""
    use_swa, window = inner.pop("use_swa", None), inner.pop("swa_window_size", None)
    kinds = list(flat.get("layer_types") or ())
    if use_swa is False and SLIDING in kinds:
        raise DFlashError(
            "is false, and layer_types has sliding layers", where="dflash_config.use_swa", fix="Keep the true one."
        )
    implied = bool(use_swa) and SLIDING not in kinds
    if implied:
        kinds = [SLIDING] * (len(kinds) or int(flat.get("num_hidden_layers") or 0))
        flat["layer_types"], flat["use_sliding_window"] = kinds, True
    if SLIDING not in kinds:
        return False
    windows = {w for w in (window, flat.get("sliding_window")) if w is not None}
    if len(windows) > 1:
        raise DFlashError(
            f"is {flat['sliding_window']}, and {window} in dflash_config.swa_window_size",
            where="sliding_window",
            fix="Keep the true one.",
        )
    flat["sliding_window"] = windows.pop() if windows else None
    return implied


def _apply_reading(flat: dict[str, Any], inner: dict[str, Any], name: str) -> list[str]:
    """Fill in what the file leaves open about its sliding layers, and return what was filled in."""
    reading, notes = find_reading(name), []
    if flat.get("is_causal") is None and inner.get("causal") is None:
        if reading.is_causal is not None:
            flat["is_causal"] = reading.is_causal
        mixed = ", full ones bidirectional" if FULL in flat["layer_types"] else ""
        inside = "all layers bidirectional" if reading.is_causal is False else f"sliding layers causal{mixed}"
        notes.append(f"the file does not say how a block sees itself; as {name} reads it: {inside}")
    if inner.get("window_reading") is None and reading.window != "slot":
        inner["window_reading"] = reading.window
        notes.append(f"as {name} reads it the window hangs on the anchor: slot i sees i + 1 context keys more")
    return notes
