"""Tiny GGUF files, written from a tiny Llama model the way llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers

from pipeline.gguf import BLOCK_NAMES, OUTER_NAMES
from tests.tiny import CHATML, SPECIAL, tiny_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE, NEWLINE = "\u0120", "\u010a"
MERGES = [f"{NEWLINE} {NEWLINE}", f"{SPACE} {SPACE}", f"{SPACE}{SPACE} {SPACE}"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder q or k rows as llama.cpp's converter does (LlamaModel.permute)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path, model: Any, *, arch: str = "llama", pre: str = "smollm", drop: str = "", extra: str = ""
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    names = {hf: name for name, hf in OUTER_NAMES.items()}
    blocks = {hf: name for name, hf in BLOCK_NAMES.items()}
    for hf_name, weight in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = hf_name.removesuffix(".weight").split(".")
        name = names.get(hf_name) or f"blk.{parts[2]}.{blocks['.'.join(parts[3:])]}.weight"
        if name == drop:
            continue
        if "attn_q.w" in name or "attn_k.w" in name:
            weight = permute(weight, config.num_attention_heads if "attn_q" in name else config.num_key_value_heads)
        writer.add_tensor(name, weight.contiguous().numpy())
    if extra:
        writer.add_tensor(extra, torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def exact_llama(**changes: Any) -> Any:
    """Return a tiny Llama whose weights are exact in bf16, so that conversion must not change a bit."""
    model = tiny_model("llama", vocab_size=len(TOKENS), rms_norm_eps=1e-5, **changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model
