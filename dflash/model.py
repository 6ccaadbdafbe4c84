"""The DFlash drafter: draft layers whose keys and values come from the target's features and from the block itself.

Legend: b batch, T context tokens, Q block tokens (N anchors x B slots in training, B at decode), D model width,
C = taps x D, H query heads, G key/value heads, h head width.
Source: arXiv 2602.06036, section 4; tensor names are those of the published z-lab checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.attention import AttentionMask, block_attention
from dflash.config import DrafterConfig
from dflash.heads.conv import DynamicConv
from dflash.heads.markov import MarkovHead
from dflash.heads.selector import CandidateSelector

KeyValues = tuple[Tensor, Tensor]
Projected = tuple[Tensor, Tensor, Tensor]
Rotation = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32 at least (float64 stays float64)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rotation(positions_bL: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return cos and sin as (b, 1, L, h). Angles are float32: bf16 ones drift with the position (Automodel#2859)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions_bL.device, dtype=torch.float32) / head_dim)
    angle = positions_bL.float()[:, None, :, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rope: Rotation) -> Tensor:
    """Apply RoPE (half-split convention, as Llama and Qwen in transformers)."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DraftAttention(nn.Module):
    """Attention whose keys and values have two sources, projected by the same matrices: context, then the block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        D, h, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = h
        self.q_proj = nn.Linear(D, config.num_attention_heads * h, bias=bias)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * h, bias=bias)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * h, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * h, D, bias=bias)
        self.q_norm = RMSNorm(h, config.rms_norm_eps)
        self.k_norm = RMSNorm(h, config.rms_norm_eps)

    def _heads(self, x_bLX: Tensor) -> Tensor:
        return x_bLX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x_bLX: Tensor, norm: RMSNorm, rope: Rotation) -> Tensor:
        """Return projected queries or keys normed and rotated, (b, heads, L, h)."""
        # Only in compiled code: elsewhere Triton would compile at the first call, outside any warm-up.
        if x_bLX.is_cuda and torch.compiler.is_compiling():
            from dflash.kernels import norm_rope  # needs Triton, which a machine without a GPU may lack

            if norm_rope.takes(self.head_dim, x_bLX.dtype):
                return cast(Tensor, norm_rope.norm_rope(x_bLX, norm.weight, *rope, norm.eps))
        return rotate(norm(self._heads(x_bLX)), rope)

    def key_values(self, x_bLD: Tensor, rope: Rotation) -> KeyValues:
        """Return rotated keys and values (b, G, L, h) of context features or of normed block states."""
        return self._rotated(self.k_proj(x_bLD), self.k_norm, rope), self._heads(self.v_proj(x_bLD))

    def project(self, x_LD: Tensor) -> Projected:
        """Return queries, keys and values (..., X) of normed states (..., D), neither normed nor rotated yet."""
        return self.q_proj(x_LD), self.k_proj(x_LD), self.v_proj(x_LD)

    def forward(
        self,
        projected: Projected,
        ropes: tuple[Rotation, Rotation],
        context: KeyValues,
        mask: AttentionMask,
        implementation: str,
    ) -> Tensor:
        """Return (b, Q, D) of block tokens given as `project` returns them; ropes are the queries' and the keys'."""
        q = self._rotated(projected[0], self.q_norm, ropes[0])
        k, v = self._rotated(projected[1], self.k_norm, ropes[1]), self._heads(projected[2])
        k, v = torch.cat((context[0], k), dim=2), torch.cat((context[1], v), dim=2)
        out_bHQh = block_attention(q, k, v, mask, implementation)
        return self.o_proj(out_bHQh.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm block. The context passes neither input_layernorm nor o_proj nor the MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = self.mlp_conv = None
        if config.conv_kernel_size:
            shape = {"taps": config.conv_kernel_size, "group_size": config.conv_group_size}
            self.attention_conv = DynamicConv(config.hidden_size, config.block_size, **shape)
            self.mlp_conv = DynamicConv(config.hidden_size, config.block_size, **shape)

    def forward(
        self, x_bQD: Tensor, rope: Rotation, context: KeyValues, mask: AttentionMask, implementation: str
    ) -> Tensor:
        def attend(y_bQD: Tensor) -> Tensor:
            projected = self.self_attn.project(y_bQD)
            attended: Tensor = self.self_attn(projected, (rope, rope), context, mask, implementation)
            return attended

        normed = self.input_layernorm(x_bQD)
        x_bQD = x_bQD + (self.attention_conv.around(attend, normed) if self.attention_conv else attend(normed))
        return self.feed_forward(x_bQD)

    def feed_forward(self, x_bQD: Tensor) -> Tensor:
        """Return the second half of the layer: x + mlp(norm(x))."""
        normed = self.post_attention_layernorm(x_bQD)
        return x_bQD + (self.mlp_conv.around(self.mlp, normed) if self.mlp_conv else self.mlp(normed))


class DFlashDraftModel(nn.Module):
    """Drafter without head and embedding, which are the target's.

    Training calls it whole; decoding calls `context_key_values` once for each verified token and `draft` for each
    block, so both run the same lines.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        V, D = config.vocab_size, config.hidden_size
        self.candidate_selector = self.markov_head = None
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(V, D, rank=config.selector_rank, top_k=config.selector_top_k)
        if config.markov_rank:
            self.markov_head = MarkovHead(V, rank=config.markov_rank)

    @property
    def picker(self) -> CandidateSelector | MarkovHead | None:
        """The head that chooses a slot's token after the one before it; None in a plain drafter."""
        return self.candidate_selector or self.markov_head

    def initialise(self, seed: int, head_VD: Tensor) -> None:
        """Draw every matrix from N(0, initializer_range) with a generator of its own; norms start at 1, biases at 0.

        The final norm starts at 4 / (sqrt(D) * rms |head row|). A fresh drafter's state points along the mask token's
        embedding, which with a tied head is a row: its logit begins at 4 instead of sqrt(D) * |row|. On SmolLM2 the
        loss then begins at 12.4 (uniform: 10.8); with the norm at 1 it began at 74 and training had to undo that.
        The generator is on the CPU, so that the same seed gives the same weights on every device.
        Convolution, selector and Markov bias start as the identity beside the same plain drafter.
        """
        generator = torch.Generator().manual_seed(seed)
        added = {"attention_conv", "mlp_conv", "candidate_selector", "markov_head"}
        for module in self.modules():
            if isinstance(module, DynamicConv):
                module.reset_to_identity()
        if self.picker:
            self.picker.initialise(seed, self.config.initializer_range)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if added & set(name.split(".")):
                    continue
                if parameter.dim() == 2:
                    drawn = torch.empty(parameter.shape).normal_(
                        0.0, self.config.initializer_range, generator=generator
                    )
                    parameter.copy_(drawn)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            self.norm.weight.fill_(4.0 / (self.config.hidden_size**0.5 * _rms_of_rows(head_VD)))

    def context_key_values(self, features_bTC: Tensor, positions_bT: Tensor) -> list[KeyValues]:
        """Return each layer's keys and values of the context, from target features at `positions_bT`."""
        context_bTD = self.hidden_norm(self.fc(features_bTC))
        rope = rotation(positions_bT, self.config.head_dim, self.config.rope_theta, context_bTD.dtype)
        return [cast(DraftLayer, layer).self_attn.key_values(context_bTD, rope) for layer in self.layers]

    def draft(
        self,
        embeddings_bQD: Tensor,
        positions_bQ: Tensor,
        context: Sequence[KeyValues],
        masks: Sequence[AttentionMask],
        implementation: str,
    ) -> Tensor:
        """Return the normed states (b, Q, D) of block tokens, ready for the target's head."""
        rope = rotation(positions_bQ, self.config.head_dim, self.config.rope_theta, embeddings_bQD.dtype)
        x_bQD = embeddings_bQD
        for layer, key_values, mask in zip(self.layers, context, masks, strict=True):
            x_bQD = layer(x_bQD, rope, key_values, mask, implementation)
        return self.norm(x_bQD)

    def forward(
        self,
        features_bTC: Tensor,
        embeddings_bQD: Tensor,
        positions_bQ: Tensor,
        masks: Sequence[AttentionMask],
        implementation: str,
        context_positions_bT: Tensor | None = None,
    ) -> Tensor:
        """Return the states (b, Q, D) of all blocks of a row; without context_positions_bT it is one document, whose
        tokens stand at positions 0..T-1."""
        if context_positions_bT is None:
            context_positions_bT = torch.arange(features_bTC.shape[1], device=features_bTC.device)[None]
        context = self.context_key_values(features_bTC, context_positions_bT)
        return self.draft(embeddings_bQD, positions_bQ, context, masks, implementation)

    @property
    def drafts_slots_apart(self) -> bool:
        """Whether slot 0's last output goes nowhere, so that `forward_blocks` leaves it out: not with a convolution,
        which mixes a slot with the one before it."""
        return not self.config.conv_kernel_size

    def forward_blocks(
        self,
        features_bTC: Tensor,
        anchors_bND: Tensor,
        mask_D: Tensor,
        positions_bQ: Tensor,
        masks: Sequence[AttentionMask],
        implementation: str,
        context_positions_bT: Tensor,
    ) -> Tensor:
        """`forward` for training's blocks, an anchor's embedding and then the mask token's: the same states with less
        work, slot 0's zero when `drafts_slots_apart` (nothing is drafted there; the last mask must then begin at
        slot 1).

        Before the first attention all mask slots are one vector, so it is projected once (1.6 of 95 ms of products at
        5 layers of width 4096, 512 blocks of 16); the last layer leaves slot 0 out of all but keys and values (0.8 ms).
        """
        b, N, B = *anchors_bND.shape[:2], self.config.block_size
        rows_UD = torch.cat((anchors_bND.flatten(0, 1), mask_D[None]))

        def spread(rows_UX: Tensor) -> Tensor:
            first, rest = rows_UX[:-1].view(b, N, 1, -1), rows_UX[-1].expand(b, N, B - 1, -1)
            return torch.cat((first, rest), dim=2).flatten(1, 2)

        context = self.context_key_values(features_bTC, context_positions_bT)
        if not self.drafts_slots_apart:
            return self.draft(spread(rows_UD), positions_bQ, context, masks, implementation)
        rope = rotation(positions_bQ, self.config.head_dim, self.config.rope_theta, anchors_bND.dtype)
        later = _later_slots(rope[0], B, dim=2), _later_slots(rope[1], B, dim=2)
        x_bQD = spread(rows_UD)
        for place, (layer, key_values, mask) in enumerate(zip(self.layers, context, masks, strict=True)):
            assert isinstance(layer, DraftLayer)
            last, attention = place == len(self.layers) - 1, layer.self_attn
            if place == 0:
                q, k, v = (spread(part) for part in attention.project(layer.input_layernorm(rows_UD)))
                q = _later_slots(q, B, dim=1) if last else q
            else:
                normed = layer.input_layernorm(x_bQD)
                q = attention.q_proj(_later_slots(normed, B, dim=1) if last else normed)
                k, v = attention.k_proj(normed), attention.v_proj(normed)
            if last:
                x_bQD = _later_slots(x_bQD, B, dim=1)
            x_bQD = x_bQD + attention((q, k, v), (later if last else rope, rope), key_values, mask, implementation)
            x_bQD = layer.feed_forward(x_bQD)
        return F.pad(self.norm(x_bQD).unflatten(1, (N, B - 1)), (0, 0, 1, 0)).flatten(1, 2)


def _later_slots(x: Tensor, block_size: int, dim: int) -> Tensor:
    """Return x without slot 0 of each block of dimension `dim`."""
    blocks = x.unflatten(dim, (-1, block_size))
    return blocks.narrow(dim + 1, 1, block_size - 1).flatten(dim, dim + 1)


def _rms_of_rows(head_VD: Tensor) -> float:
    """Return the root mean square length of the head's rows, by one thread: several add up parts of a mean over a large
    vocabulary, and a rank with fewer cores than another would start from another last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return float(head_VD.float().square().sum(1).mean().sqrt())
    finally:
        torch.set_num_threads(threads)
