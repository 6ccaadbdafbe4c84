"""The frozen target's forward over a micro-batch, up to its last tapped layer and without logits; on a GPU compiled and
replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.compile import CompileGate
from dflash.compile.gate import GateError
from dflash.config import DrafterConfig
from dflash.model import Rotation, rotate
from dflash.objective import send
from dflash.taps import extract_features
from pipeline.batches import MicroBatch
from pipeline.config import RunConfig
from pipeline.errors import PipelineError
from pipeline.recorded import Recordings
from pipeline.static_decode import ROPE_TYPES, why_not_static

FEATURES_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05, torch.float64: 1e-9}
"""Largest difference, by norm, of the compiled features from transformers' own: one of rounding in every layer, not of
another computation, which is of the order of 1."""


def target_features(target: Any, batch: MicroBatch, layer_ids: tuple[int, ...], final_state: bool) -> Tensor:
    """Return the target's features (b, S, X) of a micro-batch, on the target's device, by transformers' own forward."""
    positions = None if batch.starts_bN is None else send(batch.positions_bS, target.device)
    tokens = send(batch.tokens_bS, target.device)
    return extract_features(target, tokens, layer_ids, positions, final_state=final_state)


def recorded_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return the shapes (b, S) of tokens whose forward a run records: none where features are cached."""
    online = config.data.features == "online" and config.recorded
    return [(config.train.micro_batch, bucket) for bucket in config.data.buckets] if online else []


class TargetForward:
    """Features (b, S, X) of micro-batches, on the target's device; until `record` by transformers' own forward.

    That one launches 40 small kernels a layer from Python, and asks the GPU each time whether rows are packed and waits
    for the answer. Recorded it does neither. Compiled, a layer is a few kernels beside its products: on an H200 a
    batch of 64 x 384 tokens of SmolLM2-135M took 38 ms recorded alone.
    """

    def __init__(self, target: Any, layer_ids: tuple[int, ...], *, final_state: bool, packed: bool) -> None:
        self.target, self._layer_ids, self._final_state, self._packed = target, layer_ids, final_state, packed
        self._inputs: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._recordings: Recordings[Tensor] = Recordings(target.device)

    @classmethod
    def of(cls, config: RunConfig, drafter: DrafterConfig, target: Any) -> TargetForward:
        """Return what a run's drafter is trained on."""
        soft, packed = bool(config.train.soft_weight), config.data.samples_per_row > 1
        return cls(target, drafter.target_layer_ids, final_state=soft, packed=packed)

    def why_not_compiled(self) -> str | None:
        """Return why `record` leaves transformers' forward as it is, or None if it compiles the layers."""
        return "rows are packed" if self._packed else why_not_static(self.target)

    @torch.no_grad()
    def record(self, shapes: Iterable[tuple[int, int]], gate: CompileGate, name: str = "target") -> list[Tensor]:
        """Record the forward for every shape (b, S) of tokens, compiled where that is possible, and return the tensors
        that features will come in. Only in the gate's warm-up, which counts it under `name`.

        Raises PipelineError when the features are not those of transformers' own forward.
        """
        if self.target.config.get_text_config().rope_parameters["rope_type"] not in ROPE_TYPES:
            return []  # its angles are decided on the host in each forward: nothing can be recorded
        made = []
        layer = None if self.why_not_compiled() else gate.compile(causal_layer, name=f"{name} layer")
        for shape in shapes:
            tokens = torch.zeros(shape, dtype=torch.long, device=self.target.device)
            positions = torch.arange(shape[1], device=tokens.device).repeat(shape[0], 1) if self._packed else None

            def run(tokens: Tensor = tokens, positions: Tensor | None = positions) -> Tensor:
                if layer is not None:
                    return self._layers(tokens, layer)
                return extract_features(self.target, tokens, self._layer_ids, positions, final_state=self._final_state)

            self._recordings.rehearse(run)
            self._recordings.record(shape, run)
            self._inputs[shape] = tokens, positions
            vocabulary, seeded = self.target.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
            tokens.copy_(torch.randint(vocabulary, shape, generator=seeded))
            made.append(self._recordings.replay(shape))
            expected = extract_features(self.target, tokens, self._layer_ids, positions, final_state=self._final_state)
            error = float((made[-1] - expected).float().norm() / expected.float().norm())
            if not error <= FEATURES_LIMIT[expected.dtype]:
                raise PipelineError(
                    f"the compiled target's features are {error:.2g} from transformers' own",
                    where=f"tokens {list(shape)}",
                    fix="Set compile.cuda_graphs: false and report it.",
                )
            del expected
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()  # what transformers' forward took
        return made

    def _layers(self, tokens_bS: Tensor, layer: Callable[..., Tensor]) -> Tensor:
        """Return the features by `layer`, as far up as they are tapped."""
        body = self.target.base_model
        x_bSD = body.embed_tokens(tokens_bS)
        cos_1Sh, sin_1Sh = body.rotary_emb(x_bSD, torch.arange(tokens_bS.shape[1], device=tokens_bS.device)[None])
        rope, tapped = (cos_1Sh[:, None], sin_1Sh[:, None]), dict[int, Tensor]()
        last = len(body.layers) - 1 if self._final_state else max(self._layer_ids)
        for index, module in enumerate(body.layers[: last + 1]):
            x_bSD = layer(x_bSD, module, rope)
            tapped[index] = x_bSD
        features = [tapped[index] for index in self._layer_ids]
        return torch.cat([*features, body.norm(x_bSD)] if self._final_state else features, dim=-1)

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return a micro-batch's features; the next call may write over them. Raises GateError for a shape that was
        not recorded, when others were."""
        if not self._inputs:
            return target_features(self.target, batch, self._layer_ids, self._final_state)
        shape = tuple(batch.tokens_bS.shape)
        if shape not in self._inputs:
            raise GateError(f"the target has no graph for tokens {list(shape)}; set compile.cuda_graphs: false")
        own_tokens, own_positions = self._inputs[shape]
        _write(own_tokens, batch.tokens_bS)
        if own_positions is not None:
            _write(own_positions, batch.positions_bS)
        return self._recordings.replay(shape)


def _write(own: Tensor, new: Tensor) -> None:
    """Copy to `own` without a tensor between the two: another thread may be counting the GPU's memory."""
    pinned = new.pin_memory() if own.is_cuda and new.device.type == "cpu" else new
    own.copy_(pinned, non_blocking=True)


def causal_layer(x_bSD: Tensor, layer: Any, rope: Rotation) -> Tensor:
    """Return what a Llama, Qwen2 or Qwen3 layer of transformers gives for whole sequences, (b, S, D)."""
    attention = layer.self_attn

    def heads(projected_bSX: Tensor, norm: str) -> Tensor:
        split_bSHh = projected_bSX.unflatten(-1, (-1, attention.head_dim))
        of_layer = getattr(attention, norm, None)  # Qwen3 norms queries and keys
        return (split_bSHh if of_layer is None else of_layer(split_bSHh)).transpose(1, 2)

    normed = layer.input_layernorm(x_bSD)
    q_bHSh = rotate(heads(attention.q_proj(normed), "q_norm"), rope)
    k_bNSh = rotate(heads(attention.k_proj(normed), "k_norm"), rope)
    v_bNSh = heads(attention.v_proj(normed), "no norm")
    groups = q_bHSh.shape[1] // k_bNSh.shape[1]
    k_bHSh, v_bHSh = k_bNSh.repeat_interleave(groups, dim=1), v_bNSh.repeat_interleave(groups, dim=1)
    attended = F.scaled_dot_product_attention(q_bHSh, k_bHSh, v_bHSh, is_causal=True, scale=attention.scaling)
    x_bSD = x_bSD + attention.o_proj(attended.transpose(1, 2).flatten(2))
    fed: Tensor = layer.mlp(layer.post_attention_layernorm(x_bSD))
    return x_bSD + fed
