"""TorchSpec's exports in: renamed tensors, pickles without a config, and its own meaning of num_target_layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.errors import DFlashError
from dflash.interchange.drafter import write_zlab
from dflash.interchange.reader import read_drafter
from tests.foreign_drafters import body, write, zlab_config
from tests.tiny import tiny_model, tiny_target

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}


def _renamed(before: str = "") -> dict[str, torch.Tensor]:
    out = {"embed_tokens.weight": tiny_model().get_input_embeddings().weight.detach().clone()}
    for name, tensor in body().items():
        start = next((old for old in NAMES if name.startswith(old)), "")
        out[NAMES.get(start, "") + name.removeprefix(start)] = tensor
    return {before + name: tensor for name, tensor in out.items()}


def _flat_config(**changes: Any) -> dict[str, Any]:
    """Its own keys: flat, K under num_target_layers and the depth under another name."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {key: zlab_config()[key] for key in (*sizes, "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")}
    config |= {"model_type": "dflash", "block_size": 4, "mask_token_id": 300, "target_layer_ids": [1, 3]}
    return config | {"num_target_layers": 2, "target_num_hidden_layers": 4} | changes


def _check_body(tensors: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == body().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in body().items())


def test_a_folder_with_its_names_and_flat_config_is_read(tmp_path: Path) -> None:
    """num_target_layers is the number of taps there (anatomy 1.2, trap c)."""
    found = read_drafter(write(tmp_path / "theirs", _flat_config(), _renamed()))
    assert found.format == "TorchSpec"
    assert (found.config.num_target_layers, found.config.target_layer_ids) == (4, (1, 3))
    _check_body(found.tensors)
    write_zlab(tmp_path / "ours", found, {})
    again = read_drafter(tmp_path / "ours")
    assert again.config == found.config
    _check_body(again.tensors)


def test_taps_left_to_the_published_rule_are_written_out(tmp_path: Path) -> None:
    found = read_drafter(
        write(tmp_path / "theirs", _flat_config(target_layer_ids=None, target_num_hidden_layers=9), _renamed())
    )
    assert found.config.target_layer_ids == (1, 6)
    assert "target_layer_ids are not in the file; by the published rule [1, 6]" in found.notes


@pytest.mark.parametrize("wrap", ["plain", "nested", "training"])
def test_a_pickle_without_config_takes_the_rest_from_the_target(tmp_path: Path, wrap: str) -> None:
    folder, config = tmp_path / "theirs", tmp_path / "two-keys.json"
    folder.mkdir()
    state: dict[str, Any] = _renamed("model.draft_model." if wrap == "training" else "")
    if wrap == "training":
        state["model.target_head.weight"] = torch.ones(2)
    torch.save({"model": state, "step": 3} if wrap == "nested" else state, folder / "draft.pt")
    config.write_text(json.dumps({"block_size": 4, "mask_token_id": 300, "target_layer_ids": [0, 2]}))
    found = read_drafter(folder, config_file=config, target=tiny_target(tmp_path))
    _check_body(found.tensors)
    shape = found.config
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.vocab_size, shape.num_target_layers, shape.rope_theta) == (320, 4, 10000.0)
    assert (shape.block_size, shape.mask_token_id, shape.target_layer_ids) == (4, 300, (0, 2))
    assert (shape.eos_token_id, shape.max_position_embeddings) == (2, 512)
    assert any(note.startswith("taken from the target: num_target_layers 4") for note in found.notes)
    assert read_drafter(folder / "draft.pt", config_file=config, target=tiny_target(tmp_path)).config == shape


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"mask_token_id": 300, "target_layer_ids": [0, 2]}, "block_size: is missing"),
        ({"block_size": 4, "target_layer_ids": [0, 2]}, "dflash_config.mask_token_id: is missing"),
        ({"block_size": 4, "mask_token_id": 300}, "4 layers has no 2 evenly spread taps"),
    ],
)
def test_what_no_tensor_and_no_target_shows_is_never_guessed(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    """A mask id that is not given would be another embedding row (anatomy 6.10, SpecForge#604)."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    torch.save(_renamed(), tmp_path / "draft.pt")
    with pytest.raises(DFlashError, match=what):
        read_drafter(tmp_path / "draft.pt", config_file=path, target=tiny_target(tmp_path))


def test_without_config_and_target_the_first_missing_key_is_named(tmp_path: Path) -> None:
    torch.save(_renamed(), tmp_path / "draft.pt")
    with pytest.raises(DFlashError, match="target_layer_ids: is missing, and so is the number of target layers"):
        read_drafter(tmp_path / "draft.pt")


def test_a_stored_embedding_is_compared_with_the_targets(tmp_path: Path) -> None:
    tensors = _renamed()
    folder = write(tmp_path / "theirs", _flat_config(), tensors)
    target = tiny_target(tmp_path)
    assert not any("EMBEDDING" in note for note in read_drafter(folder, target=target).notes)
    assert any("give --target to compare" in note for note in read_drafter(folder).notes)
    tensors["embed_tokens.weight"][7] += 1
    notes = read_drafter(write(tmp_path / "theirs", _flat_config(), tensors), target=target).notes
    assert any("ITS EMBEDDING DIFFERS FROM THE TARGET'S IN 1 ROWS" in note for note in notes)


@pytest.mark.parametrize("content", [{"step": 3}, [1, 2]])
def test_a_pickle_without_tensors_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "draft.pt")
    with pytest.raises(DFlashError, match=r"draft\.pt: holds no named tensors"):
        read_drafter(tmp_path / "draft.pt")


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(2), "hook": print}, tmp_path / "draft.pt")
    with pytest.raises(DFlashError, match="cannot be read") as caught:
        read_drafter(tmp_path / "draft.pt")
    assert "\n" not in str(caught.value)
