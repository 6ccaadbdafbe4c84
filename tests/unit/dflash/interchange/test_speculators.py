"""speculators' folders in and out: layer numbers, nested config, its own embedding and reduced head."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash.errors import DFlashError
from dflash.interchange.drafter import ForeignDrafter, write_zlab
from dflash.interchange.reader import read_drafter
from dflash.interchange.speculators import speculators_config as our_config
from dflash.interchange.speculators import write_speculators
from dflash.interchange.target import TargetTables, read_tables
from tests.drafters import drafter_config, random_drafter
from tests.foreign_drafters import MIXED, body, own_head, speculators_config, write, zlab_config
from tests.tiny import tiny_model, tiny_target

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tables(target: Path) -> TargetTables:
    return read_tables(target, "owner/tiny")


def _tensors() -> dict[str, torch.Tensor]:
    return body() | own_head(tiny_model().get_input_embeddings().weight)


def _slide(config: dict[str, Any]) -> dict[str, Any]:
    config["transformer_layer_config"] |= MIXED
    return config


def test_a_reduced_head_goes_through_our_folder_and_back_to_the_bit(tmp_path: Path, target: Path) -> None:
    """A target's head put over a reduced one drafts at random (anatomy 6.33, vllm-ascend#11374; 6.20,
    speculators#616); so ours says that it is not used, and gives it back."""
    config, tensors = speculators_config(), _tensors()
    found = read_drafter(write(tmp_path / "theirs", config, tensors), target=target)
    loud = [note for note in found.notes if note.startswith("ITS")]
    assert len(loud) == 1 and "ITS OWN HEAD OF 40 OF 320 WORDS IS NOT USED HERE" in loud[0]
    assert found.target == "Qwen/Qwen3-tiny"
    write_zlab(tmp_path / "ours", found, {})
    # Engines load every *.safetensors beside config.json: there must be the drafter's own tensors alone.
    assert [file.name for file in (tmp_path / "ours").glob("*.safetensors")] == ["model.safetensors"]
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == body().keys()
    write_speculators(tmp_path / "back", read_drafter(tmp_path / "ours"), None, {})
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in tensors.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_layers_count_from_1_there_and_from_0_here(tmp_path: Path, target: Path) -> None:
    """Its id is hidden_states[id], our tap's hidden_states[id + 1] (anatomy 1.2, 3.2; 6.20, speculators#616)."""
    found = read_drafter(write(tmp_path / "theirs", speculators_config(), _tensors()), target=target)
    assert found.config.target_layer_ids == (1, 3)
    data = our_config(drafter_config(target_layer_ids=(0, 2)), target="t", architectures=())
    assert data["aux_hidden_state_layer_ids"] == [1, 3]
    for wrong in ([0, 2], None, [], ["2"]):
        with pytest.raises(DFlashError, match="does not name layers counted from 1"):
            read_drafter(write(tmp_path / "bad", speculators_config(aux_hidden_state_layer_ids=wrong), _tensors()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8, "is_causal": None},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8, "is_causal": False},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "window_reading": "anchor", "is_causal": None},
        {"attention_bias": True, "rope_theta": 1e6, "eos_token_id": [2, 3], "block_size": 16},
    ],
)
def test_our_drafter_goes_to_speculators_and_back_unchanged(
    tmp_path: Path, tables: TargetTables, changes: dict[str, Any]
) -> None:
    drafter = random_drafter(dtype=torch.bfloat16, target_layer_ids=(0, 2), **changes)
    config = replace(drafter.config, dtype="bfloat16")
    ours = ForeignDrafter("z-lab", config, dict(drafter.state_dict()))
    write_speculators(tmp_path / "theirs", ours, tables, {})
    found = read_drafter(tmp_path / "theirs")
    assert found.config == config
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in ours.tensors.items())
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], tables.embedding)
    assert torch.equal(stored["lm_head.weight"], tables.head)
    assert not {"d2t", "t2d"} & stored.keys()
    data = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert data["draft_vocab_size"] == data["transformer_layer_config"]["vocab_size"] == 320
    proposal = data["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == config.block_size - 1
    assert data["speculators_config"]["verifier"] == {
        "name_or_path": "owner/tiny",
        "architectures": ["Qwen3ForCausalLM"],
    }


def test_zlab_to_speculators_to_zlab_is_exact(tmp_path: Path, tables: TargetTables) -> None:
    first = read_drafter(write(tmp_path / "zlab", zlab_config(**MIXED) | {"block_size": 8}, body(torch.float16)))
    with pytest.raises(DFlashError, match="names the last layer, 3, which it cannot tap"):
        write_speculators(tmp_path / "theirs", first, tables, {})
    inner = {"mask_token_id": 300, "target_layer_ids": [0, 2]}
    first = read_drafter(write(tmp_path / "zlab", zlab_config(dflash_config=inner, **MIXED), body(torch.float16)))
    write_speculators(tmp_path / "theirs", first, tables, {})
    again = read_drafter(tmp_path / "theirs")
    write_zlab(tmp_path / "back", again, {})
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert again.config == first.config
    assert all(torch.equal(found[n], t) and found[n].dtype == torch.float16 for n, t in first.tensors.items())


@pytest.mark.parametrize(
    ("both_ways", "reading", "causal", "window"),
    [
        (False, "", None, "anchor"),
        (True, "", False, "anchor"),
        (False, "zlab", None, "slot"),
        (True, "zlab", False, "slot"),
    ],
)
def test_sliding_layers_are_causal_unless_it_says_otherwise(
    tmp_path: Path, target: Path, both_ways: bool, reading: str, causal: bool | None, window: str
) -> None:
    """Its window hangs on the anchor, everybody else's on the slot (anatomy 1.6)."""
    config = _slide(speculators_config(sliding_window_non_causal=both_ways))
    found = read_drafter(write(tmp_path / "theirs", config, _tensors()), reading=reading, target=target)
    assert (found.config.is_causal, found.config.window_reading) == (causal, window)
    assert [found.config.layer_causal(layer) for layer in (0, 1)] == [causal is None, False]


def test_a_causality_of_the_layers_that_contradicts_it_is_refused(tmp_path: Path, target: Path) -> None:
    """vLLM flattens the nested config and would believe is_causal; speculators itself does not look at it."""
    config = _slide(speculators_config())
    config["transformer_layer_config"]["is_causal"] = False
    with pytest.raises(DFlashError, match="is_causal: is False, which is not what sliding_window_non_causal says"):
        read_drafter(write(tmp_path / "theirs", config, _tensors()), target=target)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type: 'dspark' is another kind of speculator"),
        ({"projector_type": "domino"}, "projector_type: 'domino' is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor: True is not supported. Only False is plain DFlash"),
        ({"shift_label": True}, "shift_label: True is not supported"),
        ({"mask_token_id": None}, "mask_token_id: is missing"),
        ({"transformer_layer_config": None}, "transformer_layer_config: is missing"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "model_type: 'llama' is not supported"),
        ({"target_hidden_size": 128}, "target_hidden_size: is 128, the drafter's is 64"),
        ({"draft_vocab_size": 50}, r"lm_head.weight has shape \[40, 64\], the config wants \[50, 64\]"),
    ],
)
def test_what_is_not_a_plain_drafter_is_one_clear_line(
    tmp_path: Path, target: Path, changes: dict[str, Any], what: str
) -> None:
    """Slot 0 that predicts gives a drafter that is off by one when served plainly (anatomy 6.32, vllm#49614)."""
    with pytest.raises(DFlashError) as caught:
        read_drafter(write(tmp_path / "theirs", speculators_config(**changes), _tensors()), target=target)
    assert re.search(what, str(caught.value)), str(caught.value)
    assert str(tmp_path / "theirs") in str(caught.value)


def test_the_depth_of_the_target_is_asked_for_and_checked(tmp_path: Path, target: Path) -> None:
    folder = write(tmp_path / "theirs", speculators_config(), _tensors())
    with pytest.raises(DFlashError, match=r"num_target_layers: is missing: this format does not say.*Give --target"):
        read_drafter(folder)
    config_alone = tmp_path / "config-only"
    config_alone.mkdir()
    (config_alone / "config.json").write_bytes((target / "config.json").read_bytes())
    assert read_drafter(folder, target=config_alone).config.num_target_layers == 4
    other = json.loads((target / "config.json").read_text()) | {"vocab_size": 100}
    (config_alone / "config.json").write_text(json.dumps(other))
    with pytest.raises(DFlashError, match="--target: has vocab_size 100, the drafter 320"):
        read_drafter(folder, target=config_alone)


def test_an_embedding_that_is_not_the_targets_is_said_loudly(tmp_path: Path, target: Path) -> None:
    """A mask row trained in a table of its own is lost with the target's (anatomy 6.27, Model-Optimizer#1621)."""
    tensors = _tensors()
    tensors["embed_tokens.weight"][300] += 1
    found = read_drafter(write(tmp_path / "theirs", speculators_config(), tensors), target=target)
    assert any("ITS EMBEDDING DIFFERS FROM THE TARGET'S IN 1 ROWS" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"is_causal": True}, "is_causal: is true for full layers"),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale: is 8.0, for which it has no key"),
        ({"output_multiplier": 0.5}, "output_multiplier: is 0.5"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping: is 20.0"),
        ({"target_layer_ids": (1, 3)}, "names the last layer, 3"),
    ],
)
def test_what_the_format_cannot_say_is_not_exported(changes: dict[str, Any], what: str) -> None:
    config = drafter_config(**{"target_layer_ids": (0, 2)} | changes)
    with pytest.raises(DFlashError, match=what):
        our_config(config, target="t", architectures=())


def test_an_export_needs_the_tables_of_the_right_target(tmp_path: Path, tables: TargetTables) -> None:
    drafter = random_drafter(target_layer_ids=(0, 2))
    ours = ForeignDrafter("z-lab", drafter.config, dict(drafter.state_dict()))
    with pytest.raises(DFlashError, match="needs the target's embedding and head"):
        write_speculators(tmp_path / "out", ours, None, {})
    small = replace(tables, head=tables.head[:100])
    with pytest.raises(DFlashError, match=r"owner/tiny: has head \[100, 64\], the drafter wants \[320, 64\]"):
        write_speculators(tmp_path / "out", ours, small, {})
    assert not (tmp_path / "out").exists()


def test_a_kept_config_is_not_given_back_for_a_changed_drafter(tmp_path: Path, target: Path) -> None:
    write_zlab(
        tmp_path / "ours", read_drafter(write(tmp_path / "in", speculators_config(), _tensors()), target=target), {}
    )
    path = tmp_path / "ours" / "config.json"
    data = json.loads(path.read_text())
    data["dflash_config"]["mask_token_id"] = 301
    path.write_text(json.dumps(data))
    with pytest.raises(DFlashError, match="mask_token_id: is 301, and was 300 in the imported file"):
        write_speculators(tmp_path / "back", read_drafter(tmp_path / "ours"), None, {})
