"""Drafter folders as other projects write them: keys and tensor names of anatomy 3.1 and 3.2, by hand, shrunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, WIDTH, HEADS, PAIRS, HEAD_DIM, MLP, LAYERS, TAPS = 320, 64, 4, 2, 16, 96, 2, (1, 3)


def body(dtype: torch.dtype = torch.float32, *, bias: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return random tensors under z-lab's names: 11 a layer and 3."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, len(TAPS) * WIDTH)}
    shapes |= {"hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        start = f"layers.{layer}."
        shapes |= {f"{start}{name}.weight": (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")}
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": PAIRS * HEAD_DIM, "v_proj": PAIRS * HEAD_DIM}
        shapes |= {f"{start}self_attn.{name}.weight": (size, WIDTH) for name, size in rows.items()}
        shapes[f"{start}self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
        shapes |= {f"{start}self_attn.{name}.weight": (HEAD_DIM,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{start}mlp.{name}.weight": (MLP, WIDTH) for name in ("gate_proj", "up_proj")}
        shapes[f"{start}mlp.down_proj.weight"] = (WIDTH, MLP)
        if bias:
            shapes |= {f"{start}self_attn.{name}.bias": (size,) for name, size in (rows | {"o_proj": WIDTH}).items()}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: (t * 0.2 + 1.0 if t.dim() == 1 and "norm" in n else t * 0.2).to(dtype) for n, t in drawn.items()}


def zlab_config(**changes: Any) -> dict[str, Any]:
    """Return config.json in the style of the published Qwen3-8B drafter. A change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "bos_token_id": None,
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": list(TAPS)},
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": 512,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": PAIRS,
        "num_target_layers": 4,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    return {key: value for key, value in (config | changes).items() if key not in changes or value is not None}


MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}
"""Layers as in Qwen3.6-27B's drafter, in small; it does not say how a block sees itself."""


def speculators_config(**changes: Any) -> dict[str, Any]:
    """Return config.json in speculators' style, with a head of 40 words."""
    inside = {
        key: value
        for key, value in zlab_config().items()
        if key not in ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "dtype")
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 4,
        "draft_vocab_size": 40,
        "dtype": "float32",
        "mask_token_id": 300,
        "projector_type": "dflash",
        "pure_draft_prefix_len": 1,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-tiny"},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": inside,
    }
    return config | changes


def own_head(embedding_VD: Tensor) -> dict[str, Tensor]:
    """Return what a speculators file has besides the body: every eighth word, d2t as offsets."""
    kept = torch.arange(0, VOCAB, 8)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    head = torch.randn(len(kept), WIDTH, generator=torch.Generator().manual_seed(9))
    table = embedding_VD.detach().clone()
    return {"embed_tokens.weight": table, "lm_head.weight": head, "d2t": kept - torch.arange(len(kept)), "t2d": t2d}


def write(folder: Path, config: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Path:
    """Write a folder of config.json (unless None) and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
