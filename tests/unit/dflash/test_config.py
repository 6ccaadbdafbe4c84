"""The drafter's configuration and its config.json. What a folder on disk adds is in test_checkpoint.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from dflash.config import SLIDING, DrafterConfig, read_rope_theta, spread_layer_ids
from dflash.config_json import from_json, to_json
from dflash.errors import DFlashError
from tests.drafters import drafter_config

SLIDING_LAYERS: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


@pytest.mark.parametrize(
    ("num_target_layers", "expected"),
    [
        (16, (1, 4, 7, 10, 13)),
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
        (30, (1, 8, 14, 20, 27)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (48, (1, 12, 23, 34, 45)),
        (64, (1, 16, 31, 46, 61)),
        (94, (1, 24, 46, 68, 91)),
    ],
)
def test_five_taps_stand_where_the_published_drafters_have_them(num_target_layers: int, expected: tuple[int]) -> None:
    """T = 94 and T = 30 have ties: 23.5 -> 24, 68.5 -> 68, 7.5 -> 8 and 20.5 -> 20, since round is to even."""
    assert spread_layer_ids(num_target_layers, 5) == expected


def test_one_tap_stands_in_the_middle() -> None:
    assert spread_layer_ids(36, 1) == (18,)


@pytest.mark.parametrize(("num_target_layers", "num_taps"), [(4, 2), (6, 5), (2, 2), (3, 2)])
def test_a_target_with_too_few_layers_for_the_taps_is_refused(num_target_layers: int, num_taps: int) -> None:
    with pytest.raises(DFlashError, match=f"{num_target_layers} layers has no {num_taps} evenly spread taps"):
        spread_layer_ids(num_target_layers, num_taps)


def test_taps_are_counted_apart_from_draft_layers() -> None:
    config = drafter_config(num_hidden_layers=3, target_layer_ids=(0, 2))
    assert config.feature_size == 2 * 64
    assert from_json(to_json(config)).target_layer_ids == (0, 2)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 320}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("full_attention", "chunked_attention")}, "layer_types"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_window"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (1, 4)}, "target_layer_ids"),
        ({"target_layer_ids": (-1, 2)}, "target_layer_ids"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_naming_the_key(changes: dict[str, Any], where: str) -> None:
    drafter_config()
    with pytest.raises(DFlashError) as caught:
        drafter_config(**changes)
    assert caught.value.where == where


def test_only_sliding_layers_have_a_window() -> None:
    config = drafter_config(**SLIDING_LAYERS)
    assert [config.layer_window(0), config.layer_window(1)] == [8, None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SLIDING_LAYERS | {"is_causal": True},
        SLIDING_LAYERS | {"is_causal": False},
        {"attention_bias": True, "input_embedding_scale": 8.0, "rope_theta": 1e6, "eos_token_id": [2, 3]},
    ],
)
def test_json_gives_back_the_same_configuration(changes: dict[str, Any]) -> None:
    config = drafter_config(**changes)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_json_has_every_value_in_all_places_that_engines_read() -> None:
    data = to_json(drafter_config(rope_theta=5e5, block_size=8, **SLIDING_LAYERS))
    inner = data["dflash_config"]
    assert data["architectures"] == ["DFlashDraftModel"]
    assert (data["block_size"], inner["block_size"]) == (8, 8)
    assert (data["rope_theta"], data["rope_parameters"]["rope_theta"]) == (5e5, 5e5)
    assert (data["is_causal"], inner["causal"]) == (False, False)
    assert (data["use_sliding_window"], data["sliding_window"]) == (True, 8)
    assert (inner["target_layer_ids"], inner["mask_token_id"]) == ([1, 3], 3)


@pytest.mark.parametrize("place", ["top", "inner"])
def test_block_size_is_read_from_either_place(place: str) -> None:
    """Older files have it at the top, Qwen3.5 and later inside dflash_config."""
    data = to_json(drafter_config(block_size=6))
    del (data["dflash_config"] if place == "top" else data)["block_size"]
    assert from_json(data).block_size == 6


def test_two_block_sizes_or_two_causalities_are_refused() -> None:
    data = to_json(drafter_config())
    for outer, inner, other in (("block_size", "block_size", 16), ("is_causal", "causal", True)):
        changed = data | {"dflash_config": data["dflash_config"] | {inner: other}}
        with pytest.raises(DFlashError, match="different values") as caught:
            from_json(changed)
        assert caught.value.where == outer


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_a_missing_key_of_dflash_config_is_refused(key: str) -> None:
    """A mask id that is not read leaves the drafter with another embedding (SpecForge#604); ids have no default."""
    data = to_json(drafter_config())
    del data["dflash_config"][key]
    with pytest.raises(DFlashError, match="missing") as caught:
        from_json(data)
    assert caught.value.where == f"dflash_config.{key}"


@pytest.mark.parametrize("key", ["hidden_size", "head_dim", "vocab_size", "num_target_layers", "num_hidden_layers"])
def test_a_missing_size_is_refused(key: str) -> None:
    data = to_json(drafter_config())
    del data[key]
    with pytest.raises(DFlashError, match="missing") as caught:
        from_json(data)
    assert caught.value.where == key


@pytest.mark.parametrize("value", ["64", 64.0, True, [64]])
def test_a_size_that_is_not_a_whole_number_is_refused(value: object) -> None:
    with pytest.raises(DFlashError, match="is not a whole number") as caught:
        from_json(to_json(drafter_config()) | {"hidden_size": value})
    assert caught.value.where == "hidden_size"


def test_a_missing_block_size_is_refused() -> None:
    data = to_json(drafter_config())
    del data["block_size"], data["dflash_config"]["block_size"]
    with pytest.raises(DFlashError, match="block_size: is missing"):
        from_json(data)


def test_theta_is_read_where_transformers_5_puts_it() -> None:
    """A reader of the flat key alone takes 1e4 for 1e6 (Model-Optimizer#2221)."""
    data = to_json(drafter_config(rope_theta=1e6))
    del data["rope_theta"]
    assert from_json(data).rope_theta == 1e6
    assert read_rope_theta({"rope_theta": 1e6}) == 1e6
    assert read_rope_theta({"rope_theta": 1e6, "rope_parameters": None}) == 1e6


def test_no_theta_or_two_thetas_are_refused() -> None:
    data = to_json(drafter_config(rope_theta=1e6))
    with pytest.raises(DFlashError, match=r"is 10000.0 and in rope_parameters 1000000.0"):
        from_json(data | {"rope_theta": 10000.0})
    with pytest.raises(DFlashError, match="rope_theta: is missing"):
        from_json(data | {"rope_theta": None, "rope_parameters": {"rope_type": "default"}})


def test_a_sliding_drafter_that_does_not_say_whether_it_is_causal_is_causal_there_only() -> None:
    """How z-lab's code, SpecForge, vLLM and SGLang run it (anatomy 1.6); our export then leaves the key out too."""
    data = to_json(drafter_config(**SLIDING_LAYERS))
    assert (data.pop("is_causal"), data["dflash_config"].pop("causal")) == (False, False)
    config = from_json(data)
    assert config.is_causal is None
    assert [config.layer_causal(i) for i in range(2)] == [kind == SLIDING for kind in config.layer_types]
    again = to_json(config)
    assert "is_causal" not in again and "causal" not in again["dflash_config"]
    full = to_json(drafter_config())
    del full["is_causal"], full["dflash_config"]["causal"]
    assert from_json(full).is_causal is False


@pytest.mark.parametrize(
    ("outer", "inner", "where"),
    [
        ({"rope_scaling": {"factor": 4.0}}, {}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, {}, "rope_parameters.rope_type"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
        ({"attention_dropout": 0.1}, {}, "attention_dropout"),
        ({"use_sliding_window": True, "layer_types": None}, {}, "layer_types"),
        ({}, {"use_swa": True}, "dflash_config.use_swa"),
        ({}, {"sample_from_anchor": True}, "dflash_config.sample_from_anchor"),
        ({}, {"conv_kernel_size": 2}, "selector_rank"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, "eagle_aux_hidden_state_layer_ids"),
        ({"output_multiplier": 2.0}, {}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
        ({"mask_token_id": 7}, {}, "mask_token_id"),
        ({"target_layer_ids": [0, 3]}, {}, "target_layer_ids"),
        ({"num_target_layers": 4}, {"num_target_layers": 5}, "num_target_layers"),
        ({"projector_type": "domino"}, {}, "projector_type"),
        ({"sample_from_anchor": True}, {}, "sample_from_anchor"),
        ({"markov_rank": 256}, {}, "markov_rank"),
        ({"partial_rotary_factor": 0.25}, {}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
            {},
            "rope_parameters.partial_rotary_factor",
        ),
        (
            {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [1, 1]}},
            {},
            "rope_parameters.mrope_section",
        ),
        ({"is_neox_style": False}, {}, "is_neox_style"),
        ({"mlp_bias": True}, {}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config"),
        ({"draft_vocab_size": 40}, {}, "draft_vocab_size"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(outer: dict[str, Any], inner: dict[str, Any], where: str) -> None:
    """A sliding drafter run as a full one accepts nothing past its window (vllm#40898)."""
    data = to_json(drafter_config())
    with pytest.raises(DFlashError) as caught:
        from_json(data | outer | {"dflash_config": data["dflash_config"] | inner})
    assert caught.value.where == where


def test_sliding_layers_that_are_switched_off_are_refused() -> None:
    data = to_json(drafter_config(**SLIDING_LAYERS))
    from_json(data)
    with pytest.raises(DFlashError, match="use_sliding_window: is false, and layer_types has sliding layers"):
        from_json(data | {"use_sliding_window": False})


def test_a_setting_of_another_project_at_its_plain_value_is_read() -> None:
    """Exporters write use_swa: false and the like for plain drafters."""
    config = drafter_config()
    data = to_json(config)
    data["dflash_config"] |= {"use_swa": False, "sample_from_anchor": False, "final_logit_softcapping": None}
    assert from_json(data) == config


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig, Qwen2Config])
def test_a_drafter_takes_its_shape_from_the_target(kind: Any) -> None:
    """Heads and widths mixed up by hand gave drafters that could not be served (SpecForge#560)."""
    target = kind(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    config = DrafterConfig.for_target(
        target, num_hidden_layers=2, block_size=8, mask_token_id=3, target_layer_ids=spread_layer_ids(9, 3)
    )
    expected_head_dim = getattr(target, "head_dim", None) or 16
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 128, 320)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, expected_head_dim)
    assert (config.num_target_layers, config.target_layer_ids) == (9, (1, 4, 6))
    assert config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({**SLIDING_LAYERS, "sliding_window": -1}, "sliding_window: -1 is not above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not above 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: 0 is not above 0"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"rope_theta": 0.0}, "rope_theta: 0.0 is not above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: -1e-06 is not above 0"),
        ({"output_multiplier": 0.0}, "output_multiplier: 0.0 is not above 0"),
        ({"final_logit_softcapping": -3.0}, "final_logit_softcapping: -3.0 is not above 0"),
    ],
)
def test_a_size_that_cannot_be_is_refused(change: dict[str, Any], line: str) -> None:
    """A window below 1 leaves rows of the mask empty, and their softmax is NaN (Automodel#2826)."""
    with pytest.raises(DFlashError) as caught:
        drafter_config(**change)
    assert str(caught.value).startswith(line)


def test_causality_by_kind_is_spelled_out_where_all_layers_are_sliding() -> None:
    """None is only needed by mixed layers; a config should say what is meant (anatomy 1.6)."""
    every = drafter_config(layer_types=(SLIDING,) * 2, sliding_window=5, is_causal=None)
    assert every.is_causal is True and to_json(every)["is_causal"] is True
