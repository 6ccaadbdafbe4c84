"""A target that is refused is told what is missing, by what its config.json says."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import DataError
from pipeline.targets import ARCHITECTURES, check_architecture
from pipeline.unsupported import what_is_missing

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "T5ForConditionalGeneration": ({"is_encoder_decoder": True, "model_type": "t5"}, "decoder-only"),
    "Qwen3NextForCausalLM": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "num_experts": 512},
        "recurrent state",
    ),
    "MambaForCausalLM": ({"model_type": "mamba"}, "recurrent state"),
    "Qwen3_5ForConditionalGeneration": (
        {"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"]}},
        "recurrent state",
    ),
    "Qwen3VLForConditionalGeneration": (
        {"model_type": "qwen3_vl", "text_config": {}, "vision_config": {}},
        "text only",
    ),
    "Qwen3MoeForCausalLM": ({"model_type": "qwen3_moe", "num_experts": 128}, "experts"),
    "Gemma2ForCausalLM": ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "capped logits"),
    "GraniteForCausalLM": ({"model_type": "granite", "logits_scaling": 8.0}, "multipliers"),
    "MistralForCausalLM": ({"model_type": "mistral"}, "nobody has proved"),
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_refusal_says_what_is_missing(architecture: str) -> None:
    config, reason = CONFIGS[architecture]
    with pytest.raises(DataError) as caught:
        check_architecture(config | {"architectures": [architecture]}, where="config.json")
    line = str(caught.value)
    assert line.startswith(f"config.json: architecture is {architecture}. Supported targets: Llama")
    assert reason in line and "\n" not in line


def test_each_reason_is_given_for_its_own_kind_only() -> None:
    found = {name: what_is_missing(config) for name, (config, _) in CONFIGS.items()}
    assert len(set(found.values())) == 7
    for architecture in ARCHITECTURES:
        check_architecture(
            {"architectures": [architecture], "model_type": architecture.removesuffix("ForCausalLM").lower()},
            where="config.json",
        )
