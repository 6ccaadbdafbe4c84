"""z-lab's folders and their dialects in, and z-lab's layout out. The files are made by hand from anatomy 3.1."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint import load_drafter, save_drafter
from dflash.config_json import from_json
from dflash.errors import DFlashError
from dflash.interchange.drafter import write_zlab
from dflash.interchange.reader import read_drafter
from dflash.interchange.readings import READINGS
from dflash.interchange.zlab import canonical
from tests.drafters import drafter_config, random_drafter
from tests.foreign_drafters import MIXED, body, write, zlab_config
from tests.tiny import tiny_target

pytestmark = pytest.mark.usefixtures("one_thread")

WITHOUT_MEANING = {"auto_map", "transformers_version", "bos_token_id"}
"""Remote code that the folder does not bring, the writer's version, and an id that is null in both."""


def _through(folder: Path, out: Path, **how: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    write_zlab(out, read_drafter(folder, **how), {})
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_published_drafter_comes_back_to_the_bit_with_every_key(tmp_path: Path, dtype: torch.dtype) -> None:
    """58 tensors in Qwen3-8B's, 11 a layer and 3 (anatomy 1.4); each keeps its dtype."""
    tensors = body(dtype)
    config = zlab_config(dtype=str(dtype).removeprefix("torch."))
    data, found = _through(write(tmp_path / "theirs", config, tensors), tmp_path / "ours")
    assert len(found) == 25 and found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == dtype for n, t in tensors.items())
    same = {key: value for key, value in config.items() if key not in {*WITHOUT_MEANING, "dflash_config"}}
    assert {key: data[key] for key in same} == same
    assert config["dflash_config"].items() <= data["dflash_config"].items()
    again, _ = _through(tmp_path / "ours", tmp_path / "twice")
    assert again == data


def test_an_imported_drafter_loads_and_a_saved_one_imports(tmp_path: Path) -> None:
    write_zlab(tmp_path / "in", read_drafter(write(tmp_path / "theirs", zlab_config(), body())), {})
    assert torch.equal(load_drafter(tmp_path / "in").fc.weight, body()["fc.weight"])
    drafter = random_drafter()
    save_drafter(tmp_path / "ours", drafter.config, drafter.state_dict(), torch.float32)
    found = read_drafter(tmp_path / "ours")
    assert found.config == drafter.config
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in drafter.state_dict().items())


def test_norms_in_another_dtype_than_the_matrices_stay_exact(tmp_path: Path) -> None:
    tensors = {n: t if t.dim() == 1 else t.to(torch.bfloat16) for n, t in body().items()}
    data, found = _through(write(tmp_path / "theirs", zlab_config(dtype="bfloat16"), tensors), tmp_path / "ours")
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in tensors.items()}
    assert data["dtype"] == "float32"
    assert torch.equal(load_drafter(tmp_path / "ours").norm.weight, tensors["norm.weight"])


def test_biases_and_the_prefix_model_are_read(tmp_path: Path) -> None:
    tensors = body(bias=True)
    prefixed = {f"model.{name}": t for name, t in tensors.items()} | {"model.rotary_emb.inv_freq": torch.ones(8)}
    _, found = _through(write(tmp_path / "theirs", zlab_config(attention_bias=True), prefixed), tmp_path / "ours")
    assert found.keys() == tensors.keys()


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    tensors = body()
    folder = write(tmp_path / "theirs", zlab_config(), tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places: dict[str, str] = {}
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    _, found = _through(folder, tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(DFlashError, match=r"model-1\.safetensors: no such file"):
        read_drafter(folder)


@pytest.mark.parametrize("place", ["top", "inside", "both"])
def test_values_are_read_at_the_top_and_in_dflash_config(place: str) -> None:
    """z-lab's code looks into dflash_config, then at the top level; vLLM takes taps at the top too (anatomy 3.2)."""
    values = {
        "mask_token_id": 300,
        "target_layer_ids": [1, 3],
        "input_embedding_scale": 8.0,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 20.0,
    }
    top = values if place != "inside" else {}
    data = zlab_config(**top) | {"dflash_config": values if place != "top" else {}}
    config = from_json(canonical(data, "")[0])
    assert {k: getattr(config, k) for k in values} == values | {"target_layer_ids": (1, 3)}
    wrong = zlab_config(output_multiplier=0.5) | {"dflash_config": values}
    with pytest.raises(DFlashError, match=r"output_multiplier: is 0.5, and 0.25 in dflash_config"):
        canonical(wrong, "")


def test_vllms_numbered_taps_must_be_the_same_layers() -> None:
    """vLLM believes eagle_aux_hidden_state_layer_ids before dflash_config (anatomy 3.2; 6.29, TorchSpec#87)."""
    data = zlab_config(eagle_aux_hidden_state_layer_ids=[2, 4])
    assert from_json(canonical(data, "")[0]).target_layer_ids == (1, 3)
    with pytest.raises(DFlashError, match=r"\[1, 3\] are not the layers \[1, 3\] counted from 1"):
        canonical(zlab_config(eagle_aux_hidden_state_layer_ids=[1, 3]), "")


def test_specforges_mirror_of_theta_and_its_own_architecture_string_are_read() -> None:
    """rope_scaling that scales nothing stands beside rope_parameters (anatomy 3.2; 6.26, Model-Optimizer#2221)."""
    mirror = {"rope_type": "default", "rope_theta": 1e7}
    data = zlab_config(rope_theta=None, rope_parameters=mirror, rope_scaling=mirror, architectures=["DraftTrainer"])
    assert from_json(canonical(data, "")[0]).rope_theta == 1e7
    only = zlab_config(rope_theta=None, rope_scaling={"type": "default", "rope_theta": 1e7})
    assert from_json(canonical(only, "")[0]).rope_theta == 1e7
    with pytest.raises(DFlashError, match=r"rope_scaling: has theta 10000.0, rope_parameters 10000000.0"):
        canonical(data | {"rope_scaling": mirror | {"rope_theta": 1e4}}, "")
    with pytest.raises(DFlashError, match=r"rope_scaling.*yarn.*is not supported"):
        canonical(zlab_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "")


@pytest.mark.parametrize(
    ("reading", "causal", "window"),
    [
        ("", None, "slot"),
        ("zlab", None, "slot"),
        ("specforge", None, "slot"),
        ("speculators", None, "anchor"),
        ("model-optimizer", False, "slot"),
        ("automodel", False, "slot"),
    ],
)
def test_a_silent_sliding_file_is_read_as_the_named_project_does(
    tmp_path: Path, reading: str, causal: bool | None, window: str
) -> None:
    """Six projects read it in different ways (anatomy 1.6; 6.31, vllm#40898), and what was chosen is written down."""
    found = read_drafter(write(tmp_path / "theirs", zlab_config(**MIXED), body()), reading=reading)
    assert (found.config.is_causal, found.config.window_reading) == (causal, window)
    assert f"as {reading or 'zlab'} reads it" in found.notes[0]
    write_zlab(tmp_path / "ours", found, {})
    assert read_drafter(tmp_path / "ours").config == found.config


def test_what_a_file_says_wins_over_any_reading(tmp_path: Path) -> None:
    for causal in (True, False):
        folder = write(tmp_path / str(causal), zlab_config(**MIXED, is_causal=causal), body())
        assert {read_drafter(folder, reading=name).config.is_causal for name in READINGS} == {causal}
    with pytest.raises(DFlashError, match=r"'mine' is no reading. One of zlab, specforge"):
        read_drafter(folder, reading="mine")


def test_a_reading_changes_nothing_in_a_drafter_without_sliding_layers(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", zlab_config(), body())
    found = [read_drafter(folder, reading=name) for name in READINGS]
    assert {drafter.config for drafter in found} == {found[0].config}
    assert not any(drafter.notes for drafter in found)


def test_model_optimizers_window_keys_make_every_layer_slide() -> None:
    """vLLM does so even where layer_types says full; bidirectional inside (anatomy 1.6)."""
    data = zlab_config(sliding_window=16)
    data["dflash_config"] |= {"use_swa": True, "swa_window_size": 16, "causal": False}
    config = from_json(canonical(data, "")[0])
    assert (config.layer_types, config.sliding_window) == (("sliding_attention",) * 2, 16)
    assert config.is_causal is False
    del data["dflash_config"]["causal"]
    assert from_json(canonical(data, "")[0]).is_causal is False
    data["dflash_config"]["swa_window_size"] = 32
    with pytest.raises(DFlashError, match=r"sliding_window: is 16, and 32 in dflash_config.swa_window_size"):
        canonical(data, "")


def test_automodels_architecture_is_read_with_automodels_sliding_layers() -> None:
    flat, notes = canonical(zlab_config(architectures=["Qwen3DFlashDraftModel"], **MIXED), "")
    assert from_json(flat).is_causal is False
    assert "as automodel reads it" in notes[0]


@pytest.mark.parametrize(
    ("outer", "inner", "what"),
    [
        ({}, {"conv_kernel_size": 2}, "selector_rank: 0 beside conv_kernel_size 2"),
        ({}, {"selector_rank": 256}, "dflash_config.selector_rank: is 256, and the architecture DFlashDraftModel"),
        ({}, {"projector_type": "domino"}, "projector_type: 'domino' is a successor of DFlash"),
        ({}, {"markov_rank": 256}, "belongs to DSpark"),
        ({"markov_rank": 256}, {}, "markov_rank: is 256, which belongs to DSpark"),
        ({}, {"attention_sink_bias": True}, "belongs to MiMo's attention sink"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            {},
            "selector_rank: is None, and the architecture DFlash2",
        ),
        ({"architectures": ["Qwen3DSparkModel"]}, {}, "Qwen3DSparkModel is a drafter of DSpark"),
        ({"architectures": ["LlamaForCausalLM"], "auto_map": None}, {}, "LlamaForCausalLM is not a DFlash drafter"),
        ({}, {"sample_from_anchor": True}, "sample_from_anchor: True is not supported. Only False is."),
        ({}, {"shift_label": True}, "shift_label: True is not supported"),
        ({}, {"use_aux_hidden_state": False}, "use_aux_hidden_state: False is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config: .* Only absence is."),
        ({"is_neox_style": False}, {}, "is_neox_style: False is not supported"),
        ({"draft_vocab_size": 40}, {}, "draft_vocab_size: 40 is not supported. Only 320 is."),
        ({"target_hidden_size": 128}, {}, "target_hidden_size: 128 is not supported"),
        ({}, {"novel_key": 1}, "dflash_config.novel_key: is not known"),
        ({"rms_norm_eps": "1e-6"}, {}, "rms_norm_eps: '1e-6' is not a number"),
        ({}, {"target_layer_ids": ["1", "3"]}, "is not a list of whole numbers"),
        ({"layer_types": "full_attention"}, {}, "layer_types: 'full_attention' is not a list of names"),
        ({"block_size": [4]}, {}, r"block_size: \[4\] is not a whole number"),
    ],
)
def test_a_key_that_means_another_drafter_is_one_clear_line(
    outer: dict[str, Any], inner: dict[str, Any], what: str
) -> None:
    """A successor served as a plain drafter accepts almost nothing (anatomy 6.32, vllm#49614)."""
    data = zlab_config(**outer)
    data["dflash_config"] |= inner
    with pytest.raises(DFlashError) as caught:
        from_json(canonical(data, "")[0])
    assert "\n" not in str(caught.value)
    assert re.search(what, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("outer", "inner", "kind"),
    [
        ({}, {}, "z-lab"),
        ({"architectures": ["Qwen3DFlashDraftModel"]}, {}, "Automodel"),
        ({"max_window_layers": None, "dtype": None, "torch_dtype": "float32"}, {"use_swa": False}, "Model-Optimizer"),
        ({"architectures": ["OnlineModel"], "rope_scaling": {"rope_type": "default"}}, {}, "z-lab"),
    ],
)
def test_folders_of_every_trainer_of_this_layout_are_read(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], kind: str
) -> None:
    """anatomy 3.2: Automodel, Model-Optimizer and SpecForge write z-lab's layout, each in its own way."""
    config = zlab_config(**outer)
    config["dflash_config"] |= inner
    found = read_drafter(write(tmp_path / "theirs", config, body()))
    assert found.format == kind
    assert found.config == read_drafter(write(tmp_path / "plain", zlab_config(), body())).config


def test_a_mask_token_that_texts_contain_is_said_loudly(tmp_path: Path) -> None:
    """anatomy 6.23, Automodel#2461: pad == EOS as the mask token."""
    data = zlab_config(eos_token_id=[2, 5], pad_token_id=0)
    for mask, loud in ((5, True), (0, True), (300, False)):
        data["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": [1, 3]}
        notes = read_drafter(write(tmp_path / str(mask), data, body())).notes
        assert any("IS PAD OR EOS" in note for note in notes) is loud


def test_keys_of_successors_that_are_switched_off_are_plain() -> None:
    data = zlab_config()
    off = {"conv_kernel_size": 0, "projector_type": "dflash", "markov_rank": None, "attention_mode": "gqa"}
    data["dflash_config"] |= off | {"final_logit_softcapping": 0, "use_swa": False, "mask_token": "<|mask|>"}
    assert from_json(canonical(data, "")[0]) == from_json(canonical(zlab_config(), "")[0])


@pytest.mark.parametrize(
    ("extra", "head"),
    [
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("model.markov_head.markov_w1.weight", "DSpark"),
        ("logit_head.markov_w2.weight", "DSpark"),
        ("layers.1.self_attn.attention_sink_bias", "MiMo's attention sink"),
    ],
)
def test_a_tensor_of_a_successor_is_refused_by_its_name(tmp_path: Path, extra: str, head: str) -> None:
    """SGLang ignores unknown tensors in silence (anatomy 3.2)."""
    folder = write(tmp_path / "theirs", zlab_config(), body() | {extra: torch.ones(2)})
    with pytest.raises(DFlashError, match=f"tensor {extra.removeprefix('model.')} belongs to {head}"):
        read_drafter(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"norm.weight": None}, "1 tensors are missing, first norm.weight"),
        ({"lm_head.weight": torch.ones(3)}, "1 tensors are unknown, first lm_head.weight"),
        ({"norm.weight": torch.ones(65)}, r"norm.weight has shape \[65\], the config wants \[64\]"),
        ({"norm.weight": torch.ones(64, dtype=torch.int8)}, "tensor norm.weight is int8"),
        ({"model.norm.weight": torch.ones(64)}, "has model.norm.weight and the same without model."),
    ],
)
def test_missing_unknown_misshapen_and_quantised_tensors_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], what: str
) -> None:
    tensors = {name: t for name, t in (body() | change).items() if t is not None}
    with pytest.raises(DFlashError) as caught:
        read_drafter(write(tmp_path / "theirs", zlab_config(), tensors))
    assert str(tmp_path / "theirs") in str(caught.value)
    assert re.search(what, str(caught.value)), str(caught.value)


def test_the_whole_vocabulary_of_our_own_config_survives(tmp_path: Path) -> None:
    config = drafter_config(
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=8,
        is_causal=None,
        window_reading="anchor",
        output_multiplier=0.5,
        final_logit_softcapping=20.0,
        input_embedding_scale=8.0,
    )
    drafter = random_drafter()
    save_drafter(tmp_path / "ours", config, drafter.state_dict(), torch.float32)
    assert read_drafter(tmp_path / "ours", reading="automodel").config == replace(config, is_causal=False)
    assert read_drafter(tmp_path / "ours").config == config


def test_a_target_fills_in_only_what_a_config_must_have(tmp_path: Path) -> None:
    """A config without rms_norm_eps means 1e-6, which is not the target's to change."""
    missing = dict.fromkeys(("rms_norm_eps", "eos_token_id", "num_target_layers", "rope_theta", "head_dim"))
    folder = write(tmp_path / "theirs", zlab_config(**missing), body())
    with pytest.raises(DFlashError, match="rope_theta: is missing"):
        read_drafter(folder)
    target = tiny_target(tmp_path, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = read_drafter(folder, target=target).config
    assert (config.rms_norm_eps, config.eos_token_id, config.head_dim) == (1e-6, None, 16)
    assert (config.num_target_layers, config.rope_theta) == (4, 5e5)
