"""A drafter's configuration as config.json, in z-lab's vocabulary, which vLLM and SGLang read.

Strict: what would change numbers that we do not compute is refused, whatever project wrote it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dflash.config import SLIDING, DrafterConfig, read_rope_theta
from dflash.errors import DFlashError
from dflash.strict import FIX, PLAIN, refuse_other_numbers

DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"

_INNER_KEYS = {
    "mask_token_id",
    "mask_token",
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "window_reading",
    "use_swa",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "dflash_markov_rank",
}
"""What dflash_config may hold; anything else would change numbers that we do not compute."""

_LOGIT_KEYS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
MARKOV_KEY = "dflash_markov_rank"
"""Not DSpark's markov_rank: there slot 0 predicts too, so its files mean other slots."""

EITHER_PLACE = ("mask_token_id", "target_layer_ids", *_LOGIT_KEYS, *DFLASH2_KEYS)
"""Keys of dflash_config that some readers look for at the top level first."""

_WHOLE, _NUMBER, _SWITCH = "a whole number", "a number", "true or false"
_KINDS = {
    **dict.fromkeys(("dflash_config", "rope_parameters", "auto_map"), "an object"),
    **dict.fromkeys(("architectures", "layer_types"), "a list of names"),
    **dict.fromkeys(("target_layer_ids", "eagle_aux_hidden_state_layer_ids"), "a list of whole numbers"),
    **dict.fromkeys(("block_size", "mask_token_id", "sliding_window", "swa_window_size", "num_target_layers"), _WHOLE),
    **dict.fromkeys(("max_position_embeddings", "bos_token_id", "pad_token_id"), _WHOLE),
    **dict.fromkeys((*DFLASH2_KEYS, MARKOV_KEY), _WHOLE),
    **dict.fromkeys(("is_causal", "causal", "attention_bias", "use_sliding_window", "use_swa"), _SWITCH),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "initializer_range", *_LOGIT_KEYS), _NUMBER),
}


def check_kinds(data: dict[str, Any]) -> None:
    """Raise DFlashError for a value of the wrong kind, at the top level or in dflash_config; null counts as absent."""
    for key, kind in _KINDS.items():
        _check_kind(data.get(key), kind, key)
    for key, value in (data.get("dflash_config") or {}).items():
        _check_kind(value, _KINDS.get(key, ""), f"dflash_config.{key}")
    _check_kind((data.get("rope_parameters") or {}).get("rope_theta"), _NUMBER, "rope_parameters.rope_theta")


def _check_kind(value: Any, kind: str, where: str) -> None:
    is_list = isinstance(value, list)
    fits = {
        _WHOLE: type(value) is int,
        _NUMBER: type(value) in (int, float),
        _SWITCH: type(value) is bool,
        "an object": isinstance(value, dict),
        "a list of names": is_list and all(isinstance(item, str) for item in value),
        "a list of whole numbers": is_list and all(type(item) is int for item in value),
    }
    if value is not None and not fits.get(kind, True):
        raise DFlashError(f"{value!r} is not {kind}", where=where, fix="Mend config.json.")


def to_json(config: DrafterConfig) -> dict[str, Any]:
    """Return config.json's content. block_size, theta and causality are written in both places that readers look at.

    is_causal None is written in neither: vLLM takes a value it finds there for all layers.
    """
    values = asdict(config)
    ids, mask = list(values.pop("target_layer_ids")), values.pop("mask_token_id")
    logits = {key: values.pop(key) for key in _LOGIT_KEYS}
    reading, causal = values.pop("window_reading"), values["is_causal"]
    heads = {key: values.pop(key) for key in DFLASH2_KEYS}
    markov = values.pop("markov_rank")
    if causal is None:
        del values["is_causal"]
    values["layer_types"] = list(config.layer_types)
    return {
        "architectures": [DFLASH2 if config.selector_rank else DFLASH],
        "model_type": "qwen3",
        **values,
        "dflash_config": {
            "mask_token_id": mask,
            "target_layer_ids": ids,
            "block_size": config.block_size,
            **({} if causal is None else {"causal": causal}),
            **({} if reading == "slot" else {"window_reading": reading}),
            **logits,
            **(heads if config.selector_rank else {}),
            **({MARKOV_KEY: markov} if markov else {}),
        },
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def from_json(data: dict[str, Any]) -> DrafterConfig:
    """Return the configuration that a config.json of z-lab's layout describes.

    Raises DFlashError for a missing key, and for a setting that this implementation would not honour.
    """
    check_kinds(data)
    inner = data.get("dflash_config") or {}
    kind: str = (data.get("architectures") or ["none"])[0]
    if kind not in (DFLASH, DFLASH2):
        raise DFlashError(
            f"architecture {kind} is not a DFlash drafter", where="architectures", fix=f"Expected {DFLASH}."
        )
    if (kind == DFLASH2) != bool(inner.get("selector_rank")):
        both = f"is {inner.get('selector_rank')}, and the architecture {kind}"
        raise DFlashError(both, where="dflash_config.selector_rank", fix=f"Only {DFLASH2} has a selector, and must.")
    block_sizes = {v for v in (data.get("block_size"), inner.get("block_size")) if v is not None}
    causals = {v for v in (data.get("is_causal"), inner.get("causal")) if v is not None}
    for name, found in (("block_size", block_sizes), ("is_causal", causals)):
        if len(found) > 1:
            raise DFlashError(
                f"is given twice with different values {sorted(found)}", where=name, fix="Keep the true one."
            )
    if not block_sizes:
        raise DFlashError("is missing", where="block_size", fix="The drafter's export must name it.")
    refuse_other_numbers(data)
    unknown = inner.keys() - _INNER_KEYS - PLAIN.keys()
    if unknown:
        raise DFlashError("is not known", where=f"dflash_config.{min(unknown)}", fix=FIX)
    for key in EITHER_PLACE:
        if data.get(key) not in (None, inner.get(key)):
            both = f"is {data[key]!r}, and {inner.get(key)!r} in dflash_config"
            raise DFlashError(both, where=key, fix="Keep the true one, in dflash_config.")
    if data.get("eagle_aux_hidden_state_layer_ids") is not None:  # vLLM believes it before dflash_config
        where = "eagle_aux_hidden_state_layer_ids"
        raise DFlashError("names taps in another way", where=where, fix="Name them in dflash_config only.")
    if None not in (data.get("num_target_layers"), inner.get("num_target_layers")) and (
        data["num_target_layers"] != inner["num_target_layers"]
    ):
        both = f"is {data['num_target_layers']}, and {inner['num_target_layers']} in dflash_config"
        raise DFlashError(both, where="num_target_layers", fix="Keep the true one.")
    refused = {"rope_scaling": None, "hidden_act": "silu", "attention_dropout": 0.0}
    for key, only in refused.items():
        if data.get(key, only) not in (only, None):
            raise DFlashError(f"{data[key]!r} is not supported", where=key, fix=f"Only {only!r} is.")
    if inner.get("use_swa"):
        raise DFlashError("True is not supported", where="dflash_config.use_swa", fix="Only layer_types is.")
    kind_of_layers = tuple(data.get("layer_types") or ())
    if data.get("use_sliding_window") and SLIDING not in kind_of_layers:
        raise DFlashError("names no sliding layer", where="layer_types", fix="Or set use_sliding_window to false.")
    if SLIDING in kind_of_layers and data.get("use_sliding_window") is False:
        raise DFlashError(
            "is false, and layer_types has sliding layers", where="use_sliding_window", fix="Keep the true one."
        )
    values: dict[str, Any] = {
        "block_size": block_sizes.pop(),
        "is_causal": bool(causals.pop()) if causals else (None if SLIDING in kind_of_layers else False),
    }
    for key in ("mask_token_id", "target_layer_ids"):
        if inner.get(key) is None:
            raise DFlashError("is missing", where=f"dflash_config.{key}", fix="The drafter's export must name it.")
        values[key] = inner[key]
    values["target_layer_ids"] = tuple(values["target_layer_ids"])
    values["layer_types"] = kind_of_layers
    values["rope_theta"] = read_rope_theta(data)
    settings = (*_LOGIT_KEYS, *DFLASH2_KEYS, "window_reading")
    values |= {key: inner[key] for key in settings if inner.get(key) is not None}
    values["markov_rank"] = inner.get(MARKOV_KEY) or 0
    values["dtype"] = data.get("dtype") or data.get("torch_dtype") or "float32"
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "num_target_layers",
    )
    for key in required:
        value = inner.get(key) if data.get(key) is None else data[key]  # num_target_layers stands in either
        if value is None:
            raise DFlashError("is missing", where=key, fix="The drafter's config.json must name it.")
        values[key] = value
    for key in (*required, "block_size", "mask_token_id"):
        if type(values[key]) is not int:
            raise DFlashError(f"{values[key]!r} is not a whole number", where=key, fix="Mend config.json.")
    optional = (
        "rms_norm_eps",
        "max_position_embeddings",
        "attention_bias",
        "initializer_range",
        "sliding_window",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    values |= {key: data[key] for key in optional if data.get(key) is not None}
    if SLIDING not in kind_of_layers:  # Qwen2-style configs carry a window that no layer uses
        values.pop("sliding_window", None)
    return DrafterConfig(**values)
