"""Command lines for vLLM and SGLang, and refusals where the engine would run another drafter."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.interchange.engines import serving
from tests import drafters

ALL_SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}
MIXED: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


def drafter_config(**changes: Any) -> DrafterConfig:
    return drafters.drafter_config(**{"target_layer_ids": (0, 2)} | changes)


def test_vllm_drafts_the_block_without_its_anchor() -> None:
    """num_speculative_tokens is B - 1 (anatomy 3.2)."""
    found = serving("vllm", "/runs/my drafter", "Qwen/Qwen3-8B", drafter_config(block_size=16), revision="abc")
    words = shlex.split(found.command)
    assert words[:4] == ["vllm", "serve", "Qwen/Qwen3-8B", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "dflash", "model": "/runs/my drafter", "num_speculative_tokens": 15}
    assert words[5:] == ["--attention-backend", "flash_attn", "--revision", "abc"]
    assert found.warnings == ()


def test_sglang_counts_the_anchor_among_the_draft_tokens() -> None:
    """--speculative-num-draft-tokens is B (anatomy 3.2)."""
    words = shlex.split(serving("sglang", "/d", "/models/it's", drafter_config(block_size=16)).command)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    pairs = dict(zip(words[3::2], words[4::2], strict=True))
    assert pairs == {
        "--model-path": "/models/it's",
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": "/d",
        "--speculative-num-draft-tokens": "16",
    }


def test_mixed_layers_need_vllms_second_runner_and_causal_ones_no_special_backend() -> None:
    """anatomy 1.6 and 6.32 (vllm#49559: works under one runner and not the other)."""
    mixed = serving("vllm", "/d", "t", drafter_config(**MIXED, is_causal=None))
    assert mixed.command.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve")
    assert "V2 runner" in mixed.warnings[0]
    causal = serving("vllm", "/d", "t", drafter_config(**ALL_SLIDING, is_causal=None))
    assert "--attention-backend" not in causal.command and "V2_MODEL" not in causal.command


@pytest.mark.parametrize(
    ("changes", "sglang"),
    [
        ({}, ""),
        ({"is_causal": True}, "layer 0 is full and causal"),
        (ALL_SLIDING | {"is_causal": None}, ""),
        (ALL_SLIDING | {"is_causal": True}, ""),
        (ALL_SLIDING | {"is_causal": False}, "layer 0 slides and is bidirectional"),
        (MIXED | {"is_causal": None}, ""),
        (MIXED | {"is_causal": True}, "layer 1 is full and causal"),
        (MIXED | {"is_causal": False}, "layer 0 slides and is bidirectional"),
    ],
)
def test_sglang_serves_only_the_causality_that_it_derives_from_the_layers(changes: dict[str, Any], sglang: str) -> None:
    """It runs full layers both ways and sliding ones causally, whatever is_causal says (anatomy 1.6); vLLM reads it."""
    config = drafter_config(**changes)
    assert serving("vllm", "/d", "t", config).command
    if not sglang:
        assert serving("sglang", "/d", "t", config).command
        return
    with pytest.raises(DFlashError, match=sglang) as caught:
        serving("sglang", "/d", "t", config)
    assert "Serve it with --engine vllm." in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_window_on_the_anchor_is_a_warning_in_both_engines(engine: str) -> None:
    """Engines hang it on each slot: i + 1 keys less at slot i (anatomy 1.6)."""
    config = drafter_config(**ALL_SLIDING, is_causal=None, window_reading="anchor")
    (warning,) = serving(engine, "/d", "t", config).warnings
    assert "slot i loses the i + 1 oldest context keys" in warning
    assert serving(engine, "/d", "t", drafter_config(**ALL_SLIDING, is_causal=None)).warnings == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_scaled_input_is_refused_since_no_engine_scales_it(engine: str) -> None:
    with pytest.raises(DFlashError, match=r"input_embedding_scale: is 8.0, and neither engine"):
        serving(engine, "/d", "t", drafter_config(input_embedding_scale=8.0))


def test_logit_settings_that_vllm_drops_are_a_warning() -> None:
    warnings = serving("vllm", "/d", "t", drafter_config(final_logit_softcapping=20.0)).warnings
    assert "greedy drafts stay the same" in warnings[0]


def test_sglang_cannot_read_the_format_of_speculators() -> None:
    with pytest.raises(DFlashError, match=r"cannot read speculators' format. Export the drafter --to zlab"):
        serving("sglang", "/d", "t", drafter_config(), layout="speculators")
    assert "dflash" in serving("vllm", "/d", "t", drafter_config(), layout="speculators").command


def test_a_tap_of_the_last_layer_is_a_warning() -> None:
    """Its output before the final norm is nobody's hidden_states (anatomy 1.1; 6.29, TorchSpec#89)."""
    (warning,) = serving("vllm", "/d", "t", drafter_config(target_layer_ids=(1, 3))).warnings
    assert "tap 3 is the target's last layer" in warning


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(DFlashError, match=r"'tgi' is no engine. One of vllm, sglang"):
        serving("tgi", "/d", "t", drafter_config())
