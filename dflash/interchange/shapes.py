"""What a config leaves out and the tensors or the target say: sizes, head counts, theta.

Never guessed: block_size and mask_token_id, which no tensor shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dflash.config import read_rope_theta, spread_layer_ids
from dflash.errors import DFlashError

_OF_NO_CONFIG = ("rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Taken from the target only where there was no real config: a config that lacks rms_norm_eps means Qwen3's 1e-6."""


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sizes that the drafter's tensors (z-lab's names) show; what they do not show is left out."""
    found: dict[str, Any] = {}
    first = "layers.0."

    def rows(name: str) -> int | None:
        return tensors[name].shape[0] if name in tensors else None

    found["hidden_size"] = rows("norm.weight")
    found["intermediate_size"] = rows(f"{first}mlp.gate_proj.weight")
    found["head_dim"] = rows(f"{first}self_attn.q_norm.weight")
    layers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    found["num_hidden_layers"] = len(layers) or None
    head_dim = found["head_dim"]
    for key, name in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        size = rows(f"{first}self_attn.{name}.weight")
        found[key] = size // head_dim if size and head_dim else None
    found["attention_bias"] = True if f"{first}self_attn.q_proj.bias" in tensors else None
    return {key: value for key, value in found.items() if value is not None}


def num_taps(tensors: Mapping[str, Tensor]) -> int | None:
    """Return K, from the width of the fusion."""
    fc = tensors.get("fc.weight")
    return None if fc is None or fc.dim() != 2 or not fc.shape[0] else fc.shape[1] // fc.shape[0]


def complete(data: dict[str, Any], tensors: Mapping[str, Tensor], target: Mapping[str, Any] | None) -> list[str]:
    """Fill missing keys of a z-lab config in place, from the tensors first and then from the target's config.json.

    Returns notes about what came from the target. Raises DFlashError when the target is not one for this drafter.
    """
    optional = _OF_NO_CONFIG if data.get("hidden_size") is None else ()
    for key, value in from_tensors(tensors).items():
        if data.get(key) is None:
            data[key] = value
    if target is None:
        return []
    taken: list[str] = []
    for key in ("hidden_size", "vocab_size"):
        if None not in (data.get(key), target.get(key)) and data[key] != target[key]:
            raise DFlashError(
                f"has {key} {target[key]}, the drafter {data[key]}", where="--target", fix="Name the drafter's own."
            )
    depth = target.get("num_hidden_layers")
    inner = data.setdefault("dflash_config", {})
    named = data.get("num_target_layers") or inner.get("num_target_layers")
    if named is None:
        data["num_target_layers"] = depth
        taken.append(f"num_target_layers {depth}")
    elif depth is not None and named != depth:
        raise DFlashError(f"has {depth} layers, the drafter's has {named}", where="--target", fix="Name the true one.")
    for key in ("vocab_size", *optional):
        if data.get(key) is None and target.get(key) is not None:
            data[key] = target[key]
            taken.append(f"{key} {target[key]}")
    if data.get("rope_theta") is None and (data.get("rope_parameters") or {}).get("rope_theta") is None:
        data["rope_theta"] = read_rope_theta(dict(target))
        taken.append(f"rope_theta {data['rope_theta']}")
    return [f"taken from the target: {', '.join(taken)}"] if taken else []


def complete_taps(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill in target_layer_ids by the published rule where the file leaves them to it (TorchSpec does).

    Raises DFlashError if the number of target layers is not known either.
    """
    inner = data.setdefault("dflash_config", {})
    count, depth = num_taps(tensors), data.get("num_target_layers")
    if inner.get("target_layer_ids") is not None or count is None:
        return []
    if depth is None:
        raise DFlashError(
            "is missing, and so is the number of target layers", where="target_layer_ids", fix="Give --target."
        )
    inner["target_layer_ids"] = list(spread_layer_ids(depth, count))
    return [f"target_layer_ids are not in the file; by the published rule {inner['target_layer_ids']}"]
