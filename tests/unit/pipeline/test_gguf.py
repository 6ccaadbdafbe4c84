"""The GGUF converter, on tiny files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import DataError
from pipeline.gguf import convert_llama_gguf
from tests.tiny_gguf import NEWLINE, SPACE, exact_llama, write_gguf


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_folder_gives_the_same_logits(tmp_path: Path, tied: bool) -> None:
    source = exact_llama(tie_word_embeddings=tied)
    out = convert_llama_gguf(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([[1, 30, 40, 50, 60, 70]])
    assert torch.equal(loaded(ids).logits, source(ids).logits)
    assert loaded.config.rms_norm_eps == 1e-5 and loaded.config.tie_word_embeddings is tied
    assert loaded.generation_config.eos_token_id == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_the_rows_of_q_and_k_really_need_their_order_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reordering off, the logits of the test above differ: it would not pass by accident."""
    source = exact_llama()
    monkeypatch.setattr("pipeline.gguf._unpermute", lambda weight, num_heads: weight)
    out = convert_llama_gguf(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out")
    ids = torch.tensor([[1, 30, 40, 50, 60, 70]])
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert not torch.allclose(loaded(ids).logits, source(ids).logits, atol=0.1)


def test_the_tokenizer_splits_digits_off_before_anything_else(tmp_path: Path) -> None:
    r"""SmolLM splits "\n\n   5" into newlines with all three spaces, then the digit."""
    out = convert_llama_gguf(write_gguf(tmp_path / "m.gguf", exact_llama()), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n   5"))
    assert tokens == [NEWLINE * 2, SPACE * 3, "5"]
    ids: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a 12"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == "<|im_start|>user\na 12<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "qwen2"}, "general.architecture is 'qwen2', this converter knows only llama"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"drop": "blk.2.ffn_up.weight"}, "1 tensors are missing.* first model.layers.2.mlp.up_proj.weight"),
        ({"extra": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' has no place"),
    ],
)
def test_other_models_are_refused_and_nothing_is_written(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", exact_llama(), **changes)
    with pytest.raises(DataError, match=message):
        convert_llama_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("spoil", [lambda raw: b"", lambda raw: b"not gguf" * 20, lambda raw: raw[: len(raw) // 2]])
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = write_gguf(tmp_path / "m.gguf", exact_llama())
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match="is not a readable GGUF file"):
        convert_llama_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
