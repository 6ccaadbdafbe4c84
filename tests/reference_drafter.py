"""A second reader of drafter folders, written from anatomy 1.1 to 1.6 and 3.1 alone: torch functions, none of ours.

What it computes from an export is what the export means to others. One sequence, one block, no cache, float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors in float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return config, {name: tensor.float() for name, tensor in tensors.items()}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate heads (H, T, h): dimension i and i + h/2 are one plane, turned by position * theta^(-2i/h)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half).float() * 2 / x.shape[-1])
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _visible(config: dict[str, Any], layer: int, context: int, block: int) -> Tensor:
    """Return (B, S + B) bool: which keys each slot sees. The block stands right after the context."""
    sliding = config["layer_types"][layer] == "sliding_attention"
    said = config.get("is_causal")
    causal = sliding if said is None else said
    seen = torch.ones(block, context + block, dtype=torch.bool)
    for slot in range(block):
        for key in range(context + block):
            distance = context + slot - key
            late = causal and distance < 0
            far = sliding and (distance >= config["sliding_window"] or -distance >= config["sliding_window"])
            seen[slot, key] = not (late or far)
    return seen


def block_states(config: dict[str, Any], tensors: dict[str, Tensor], features_SC: Tensor, inputs_BD: Tensor) -> Tensor:
    """Return the states (B, D) of the block at positions S..S+B-1, for the target's head."""
    eps, width = config["rms_norm_eps"], config["head_dim"]
    theta = config["rope_parameters"]["rope_theta"]
    num_heads, num_pairs = config["num_attention_heads"], config["num_key_value_heads"]
    S, B = features_SC.shape[0], inputs_BD.shape[0]
    everywhere, in_block = torch.arange(S + B), torch.arange(S, S + B)
    context = _norm(features_SC @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    x = inputs_BD
    for layer in range(config["num_hidden_layers"]):
        mine = {n.removeprefix(f"layers.{layer}."): t for n, t in tensors.items() if n.startswith(f"layers.{layer}.")}

        def project(name: str, rows: Tensor, heads: int, mine: dict[str, Tensor] = mine) -> Tensor:
            out = rows @ mine[f"self_attn.{name}.weight"].T
            if f"self_attn.{name}.bias" in mine:
                out = out + mine[f"self_attn.{name}.bias"]
            return out.view(len(rows), heads, width).transpose(0, 1)

        h = _norm(x, mine["input_layernorm.weight"], eps)
        both = torch.cat((context, h))
        q = _turn(_norm(project("q_proj", h, num_heads), mine["self_attn.q_norm.weight"], eps), in_block, theta)
        k = _turn(_norm(project("k_proj", both, num_pairs), mine["self_attn.k_norm.weight"], eps), everywhere, theta)
        v = project("v_proj", both, num_pairs)
        heads = []
        for head in range(num_heads):
            pair = head // (num_heads // num_pairs)
            scores = q[head] @ k[pair].T / width**0.5
            scores = scores.masked_fill(~_visible(config, layer, S, B), float("-inf"))
            heads.append(scores.softmax(-1) @ v[pair])
        out = torch.cat(heads, dim=-1) @ mine["self_attn.o_proj.weight"].T
        x = x + out + mine.get("self_attn.o_proj.bias", torch.zeros(()))
        h = _norm(x, mine["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(h @ mine["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ mine["mlp.up_proj.weight"].T)) @ mine["mlp.down_proj.weight"].T
    return _norm(x, tensors["norm.weight"], eps)


def target_features(config: dict[str, Any], target: Any, tokens: list[int]) -> Tensor:
    """Return (S, C): transformers' hidden_states[id + 1] of each tap, side by side."""
    with torch.no_grad():
        states = target(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in config["dflash_config"]["target_layer_ids"]], dim=-1)


def draft(config: dict[str, Any], tensors: dict[str, Tensor], target: Any, tokens: list[int]) -> list[int]:
    """Return the B - 1 tokens drafted after `tokens`, whose last one is the anchor."""
    inner = config["dflash_config"]
    mask, block = inner["mask_token_id"], inner.get("block_size") or config["block_size"]
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    ids = torch.tensor([tokens[-1], *[mask] * (block - 1)])
    inputs = table[ids].detach() * inner.get("input_embedding_scale", 1.0)
    states = block_states(config, tensors, target_features(config, target, tokens[:-1]), inputs)
    drafted: list[int] = (states[1:] @ head.detach().T).argmax(-1).tolist()
    return drafted


def decode(folder: Path, target: Any, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """Return (`count` or more tokens after the prompt, how many drafted ones each verification accepted)."""
    config, tensors = load(folder)

    def choose(tokens: list[int]) -> list[int]:
        with torch.no_grad():
            best: list[int] = target(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        return best

    text, accepted = [*prompt, choose(prompt)[-1]], []
    while len(text) < len(prompt) + count:
        drafted = draft(config, tensors, target, text)
        wanted = choose(text + drafted)[len(text) - 1 :]
        right = 0
        while right < len(drafted) and drafted[right] == wanted[right]:
            right += 1
        text += wanted[: right + 1]
        accepted.append(right)
    return text[len(prompt) :], accepted
