"""A drafter's folder gives back the same bits, and a wrong one is refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.checkpoint import load_drafter, save_drafter
from dflash.errors import DFlashError
from tests.drafters import drafter_config, random_drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a good drafter's folder."""
    drafter = random_drafter()
    save_drafter(tmp_path / "drafter", drafter.config, dict(drafter.named_parameters()), torch.float32)
    load_drafter(tmp_path / "drafter")
    return tmp_path / "drafter"


def _edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "config.json").read_text())
    edit(data)
    (folder / "config.json").write_text(json.dumps(data))


def _edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def _refusal(folder: Path) -> str:
    with pytest.raises(DFlashError) as caught:
        load_drafter(folder)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "is_causal": True}], ids=["plain", "bias"])
def test_a_folder_gives_back_the_same_bits(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    drafter = random_drafter(dtype=dtype, **changes)
    save_drafter(tmp_path / "out", drafter.config, dict(drafter.named_parameters()), dtype)
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == drafter_config(dtype=str(dtype).removeprefix("torch."), **changes)
    assert not loaded.training
    before, after = dict(drafter.named_parameters()), dict(loaded.named_parameters())
    assert before.keys() == after.keys()
    for name in before:
        assert after[name].dtype == dtype
        assert torch.equal(before[name], after[name]), name


def test_a_folder_is_loaded_in_the_asked_precision(folder: Path) -> None:
    assert load_drafter(folder, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16
    assert load_drafter(folder, dtype=torch.float64).fc.weight.dtype == torch.float64


def test_a_folder_holds_two_files_and_an_older_export_is_replaced(folder: Path) -> None:
    (folder / "left over").write_text("x")
    drafter = random_drafter(seed=5)
    save_drafter(folder, drafter.config, dict(drafter.named_parameters()), torch.float32)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
    assert torch.equal(load_drafter(folder).fc.weight, drafter.fc.weight)


def test_saving_under_other_names_is_refused_and_keeps_the_older_export(folder: Path) -> None:
    weights = {f"module.{name}": p for name, p in random_drafter().named_parameters()}
    with pytest.raises(DFlashError, match=r"25 tensors are missing, first fc\.weight"):
        save_drafter(folder, drafter_config(), weights, torch.float32)
    load_drafter(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.pop("layers.1.self_attn.q_norm.weight"))
    message = _refusal(folder)
    assert "1 tensors are missing, first layers.1.self_attn.q_norm.weight" in message
    assert message.startswith(str(folder / "model.safetensors"))


@pytest.mark.parametrize("name", ["lm_head.weight", "candidate_selector.predecessor_codebook", "fc.bias"])
def test_an_unknown_tensor_is_named(folder: Path, name: str) -> None:
    """SGLang ignores such a tensor in silence; a head of its own would be overwritten (vllm-ascend#11374)."""
    _edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    assert f"1 tensors are unknown, first {name}" in _refusal(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 192)}))
    assert "fc.weight has shape [64, 192], the config wants [64, 128]" in _refusal(folder)


@pytest.mark.parametrize("keep_bytes", [0, 4, 1000])
def test_a_cut_weights_file_is_refused(folder: Path, keep_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    message = _refusal(folder)
    assert str(folder) in message and "cannot be read" in message


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"'])
def test_a_broken_config_file_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder) in _refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = _refusal(folder)
    assert "no such file" in message and name in message.split(":")[0]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in _refusal(tmp_path / "nothing")


def test_theta_in_rope_parameters_alone_is_enough(folder: Path) -> None:
    """transformers 5 writes it only there (Model-Optimizer#2221)."""
    _edit_config(folder, lambda data: data.pop("rope_theta"))
    assert load_drafter(folder).config.rope_theta == 10000.0


def test_theta_nowhere_or_twice_and_different_is_refused_with_the_path(folder: Path) -> None:
    _edit_config(folder, lambda data: data["rope_parameters"].update(rope_theta=1e6))
    assert _refusal(folder).startswith(f"{folder / 'config.json'}: rope_theta: is 10000.0")
    _edit_config(folder, lambda data: (data.pop("rope_theta"), data.pop("rope_parameters")))
    assert "rope_theta: is missing" in _refusal(folder)


@pytest.mark.parametrize("place", ["top", "inner"])
def test_either_place_of_block_size_is_enough_and_none_is_refused(folder: Path, place: str) -> None:
    _edit_config(folder, lambda data: (data["dflash_config"] if place == "top" else data).pop("block_size"))
    assert load_drafter(folder).config.block_size == 4
    _edit_config(folder, lambda data: (data if place == "top" else data["dflash_config"]).pop("block_size"))
    assert "block_size: is missing" in _refusal(folder)


def test_a_missing_mask_id_is_refused(folder: Path) -> None:
    """SpecForge#604: the id of the config was not used."""
    _edit_config(folder, lambda data: data["dflash_config"].pop("mask_token_id"))
    assert "dflash_config.mask_token_id: is missing" in _refusal(folder)


def test_a_file_in_the_published_layout_is_read(tmp_path: Path) -> None:
    """The keys of z-lab's Qwen3 drafters, at tiny sizes (speculators#616: people need to import these files)."""
    drafter = random_drafter()
    save_drafter(tmp_path / "out", drafter.config, dict(drafter.named_parameters()), torch.bfloat16)
    published = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]},
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 40960,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 320,
    }
    (tmp_path / "out" / "config.json").write_text(json.dumps(published))
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == drafter_config(rope_theta=1e6, dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    assert torch.equal(loaded.fc.weight, drafter.fc.weight.bfloat16())


def test_a_mask_embedding_of_its_own_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    """vLLM takes such a file (anatomy 1.7); without it the mask row is another one."""
    drafter = random_drafter()
    save_drafter(tmp_path / "out", drafter.config, dict(drafter.named_parameters()), torch.float32)
    load_drafter(tmp_path / "out")
    (tmp_path / "out" / "mask_embedding.pt").write_bytes(b"")
    assert "mask_embedding.pt: holds a mask embedding" in _refusal(tmp_path / "out")
