"""GGUF file of a Llama model -> plain Hugging Face folder (config, bf16 weights, tokenizer with chat template).

The library's own loader (`from_pretrained(gguf_file=...)`) keeps the weights marked as quantised, so they cannot be
saved, and rebuilds the tokenizer without the Digits pre-tokenizer, which splits indented numbers differently. The
weights written here equal that loader's, rounded to bf16.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.errors import DataError

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_llama_gguf(path: Path, out: Path) -> Path:
    """Return `out`, a new Hugging Face folder with the model of `path`; `out` appears whole or not at all.

    Raises DataError if the file is not GGUF, or holds another architecture or tokenizer than this converter knows.
    """
    fields = _Fields(path)
    fields.require("general.architecture", ("llama",))
    fields.require("tokenizer.ggml.model", ("gpt2",))
    fields.require("tokenizer.ggml.pre", ("smollm",))
    config = _model_config(fields)
    weights = _weights(fields, config)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        config.save_pretrained(staging)
        ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(staging)
        save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
        _tokenizer(fields, config).save_pretrained(staging)
        staging.chmod(0o755)  # mkdtemp and save_file keep their results to the owner; a cache may be shared
        (staging / "model.safetensors").chmod(0o644)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


class _Fields:
    """The metadata and tensors of one GGUF file; a missing key is a DataError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise DataError(f"is not a readable GGUF file ({error})", where=str(path), fix="Fetch it again.") from None

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise DataError(f"GGUF metadata has no {key}", where=str(self.path), fix="Use another export of the model.")
        return default

    def require(self, key: str, accepted: tuple[str, ...]) -> None:
        found = self.get(key)
        if found not in accepted:
            raise DataError(
                f"{key} is {found!r}, this converter knows only {', '.join(accepted)}",
                where=str(self.path),
                fix="Name a folder in Hugging Face format as target.source instead.",
            )


def _model_config(fields: _Fields) -> LlamaConfig:
    num_heads = fields.get("llama.attention.head_count")
    hidden_size = fields.get("llama.embedding_length")
    head_dim = fields.get("llama.attention.key_length", hidden_size // num_heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise DataError("rotates only a part of each head", where=str(fields.path), fix="Use a Hugging Face folder.")
    tensors = {tensor.name for tensor in fields.reader.tensors}
    eps = fields.get("llama.attention.layer_norm_rms_epsilon")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        vocab_size=len(fields.get("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=fields.get("llama.feed_forward_length"),
        num_hidden_layers=fields.get("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.get("llama.context_length"),
        rms_norm_eps=float(f"{eps:.6g}"),  # stored as float32: 9.99999975e-06 means 1e-05
        rope_parameters={"rope_type": "default", "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id", fields.get("tokenizer.ggml.eos_token_id")),
    )


def _weights(fields: _Fields, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return the bf16 state dict under Hugging Face names, its names and shapes checked against the model class."""
    weights = {}
    for tensor in fields.reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            raise DataError(
                f"tensor {tensor.name!r} has no place in a plain Llama model",
                where=str(fields.path),
                fix="Name a folder in Hugging Face format as target.source instead.",
            )
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        if name.endswith("q_proj.weight"):
            weight = _unpermute(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = _unpermute(weight, config.num_key_value_heads)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    found = {name: value.shape for name, value in weights.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise DataError(
            f"{len(wrong)} tensors are missing, unknown or of another shape, first {wrong[0]}",
            where=str(fields.path),
            fix="The file is incomplete: fetch it again.",
        )
    return weights


def _hf_name(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in BLOCK_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
    return OUTER_NAMES.get(name)


def _unpermute(weight: torch.Tensor, num_heads: Any) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k: it interleaves the two rotary halves of each head."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: _Fields, config: LlamaConfig) -> PreTrainedTokenizerFast:
    tokens = fields.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges")]
    fast = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    # SmolLM splits off single digits first; without this step "\n\n   5" gets other tokens than in training.
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        pad_token=tokens[config.pad_token_id],
        unk_token=tokens[fields.get("tokenizer.ggml.unknown_token_id", config.eos_token_id)],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer
