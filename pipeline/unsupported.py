"""Why a target is not supported yet, from its config.json: what would have to be written or proved first."""

from __future__ import annotations

from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "rwkv", "ssm")


def what_is_missing(config: dict[str, Any]) -> str:
    """Return in a few words what dflash lacks for the model of `config` (a config.json)."""
    inner = config.get("text_config")
    text: dict[str, Any] = config | (inner if isinstance(inner, dict) else {})
    kinds = " ".join(
        str(text.get(key)) for key in ("layer_types", "layers_block_type", "hybrid_override_pattern", "model_type")
    ).lower()
    if config.get("is_encoder_decoder"):
        return "taps and decoding are written for decoder-only models"
    if any(word in kinds for word in _RECURRENT) or text.get("full_attention_interval"):
        return "rejected tokens are taken back by cropping a cache, which does not rewind a recurrent state"
    if isinstance(inner, dict) or "vision_config" in config:
        return "prompts are text only, and the decoder of such a model sits elsewhere"
    if any(text.get(key) for key in _EXPERTS):
        return "lossless decoding was not proved with experts, whose routing may change with the batch"
    if text.get("final_logit_softcapping") or str(text.get("model_type")).startswith("gemma"):
        return "the target's scaled embeddings and capped logits would have to be read from its config"
    if any(text.get(key) not in (None, 1, 1.0) for key in ("logits_scaling", "logit_scale", "embedding_multiplier")):
        return "the target's multipliers would have to be read from its config"
    return "nobody has proved that its layers' outputs are what a tap should be"
