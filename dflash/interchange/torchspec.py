"""TorchSpec's drafters: other names for three tensors, a stored embedding, and a flat config or none.

Its `num_target_layers` is the number of taps; the target's depth is `target_num_hidden_layers` (anatomy 1.2, 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dflash.config import FULL
from dflash.config_json import DFLASH
from dflash.errors import DFlashError

_NAMES = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}


def is_torchspec(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors have TorchSpec's names, or the config its keys."""
    renamed = any(part in name for name in tensors for part in _NAMES)
    return renamed or data.get("model_type") == "dflash" or "target_num_hidden_layers" in data


def rename(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return (tensors by z-lab's names, the stored embedding).

    A training state wraps the drafter; then only what is below `draft_model.` is the drafter's.
    """
    wrapped = {name.rpartition("draft_model.")[2]: t for name, t in tensors.items() if "draft_model." in name}
    found = wrapped or dict(tensors)
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        start = next((old for old in _NAMES if name.startswith(old)), "")
        new = _NAMES[start] + name.removeprefix(start) if start else name
        if new in renamed:
            raise DFlashError(f"has {new} under two names", fix="Keep the true one.")
        renamed[new] = tensor
    return renamed, renamed.pop("embed_tokens.weight", None)


def zlab_layout(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return TorchSpec's flat config in z-lab's layout. Keys it lacks stay away."""
    flat = dict(data)
    if flat.get("model_type") == "dflash" or "target_num_hidden_layers" in flat:
        flat["num_target_layers"] = flat.pop("target_num_hidden_layers", None)
    flat |= {
        "architectures": [DFLASH],
        "model_type": "qwen3",
        "dflash_config": dict(flat.get("dflash_config") or {}),
    }
    if not flat.get("layer_types") and flat.get("num_hidden_layers"):
        flat["layer_types"] = [FULL] * flat["num_hidden_layers"]
    return flat
