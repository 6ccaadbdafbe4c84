"""The drafter's configuration: everything that decides its numbers (its form in config.json: config_json.py).

Source of the names: the published z-lab drafters; arXiv 2602.06036 for what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.errors import DFlashError

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_READINGS = ("slot", "anchor")
"""How a sliding layer's window W hangs: "slot", position(query) - position(key) < W in the context and in the block
(z-lab, SpecForge, Model-Optimizer, Automodel, vLLM); "anchor", every slot sees the context from anchor - W on, and its
whole block (speculators)."""


def spread_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return `num_taps` 0-based target layers, evenly from layer 1 to the fourth last one.

    The rule of the published drafters (36 layers, 5 taps: 1, 9, 17, 25, 33). Python's round is to even, as theirs is.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    ids = tuple(round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps))
    if list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise DFlashError(
            f"a target of {num_target_layers} layers has no {num_taps} evenly spread taps",
            where="target_layer_ids",
            fix="Name the layers explicitly.",
        )
    return ids


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that decides a drafter's numbers. hidden_size is the target's, whose head and embedding it borrows."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based: the tap `id` is the output of decoder layer `id`, `hidden_states[id + 1]` in transformers."""
    num_target_layers: int
    rope_theta: float
    layer_types: tuple[str, ...] = ()
    """One per draft layer; empty means all full_attention."""
    sliding_window: int | None = None
    is_causal: bool | None = False
    """True: a slot attends to itself and earlier slots of its block only. None: in sliding layers only, which is how
    z-lab's code, vLLM and SGLang run a drafter whose config.json does not say."""
    window_reading: str = "slot"
    """One of WINDOW_READINGS; "anchor" only to go on with a drafter that was trained so."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    """Factor on rows of the target's raw embedding table (Gemma scales inside its module, Granite by a multiplier)."""
    output_multiplier: float = 1.0
    """Factor on the logits, before the softcap."""
    final_logit_softcapping: float | None = None
    """Logits become c * tanh(logits / c), as the target's do."""
    conv_kernel_size: int = 0
    """Taps of DFlash 2's convolution around each sublayer (heads/conv.py), 0 for none; published drafters have 2."""
    conv_group_size: int = 16
    selector_rank: int = 0
    """Rank of DFlash 2's path selector (heads/selector.py), 0 for none; published drafters have 256."""
    selector_top_k: int = 16
    markov_rank: int = 0
    """Rank of a Markov bias (heads/markov.py), 0 for none."""
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "output_multiplier",
            "input_embedding_scale",
        ):
            self._require(getattr(self, key) > 0, key, f"{getattr(self, key)} is not above 0")
        for key in ("conv_kernel_size", "selector_rank", "markov_rank"):
            self._require(getattr(self, key) >= 0, key, f"{getattr(self, key)} is below 0")
        self._require(
            bool(self.conv_kernel_size) == bool(self.selector_rank),
            "selector_rank",
            f"{self.selector_rank} beside conv_kernel_size {self.conv_kernel_size}: only DFlash 2 has them, and both",
        )
        self._require(
            not (self.selector_rank and self.markov_rank),
            "markov_rank",
            "is given beside selector_rank, and only one of them can choose a slot's token",
        )
        if self.is_causal is None and FULL not in self.layer_types:
            object.__setattr__(self, "is_causal", True)  # what it means; a config should say what is meant
        window = self.sliding_window
        self._require(window is None or window > 0, "sliding_window", f"{window} is not above 0")
        self._require(self.head_dim % 2 == 0, "head_dim", f"{self.head_dim} is odd, and RoPE turns pairs")
        self._require(self.block_size >= 2, "block_size", "must be at least 2: one anchor and one drafted token")
        self._require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            f"{self.mask_token_id} is not a row of the embedding (0 to {self.vocab_size - 1})",
        )
        self._require(
            len(self.layer_types) == self.num_hidden_layers,
            "layer_types",
            f"names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}",
        )
        unknown = set(self.layer_types) - {FULL, SLIDING}
        self._require(not unknown, "layer_types", f"unknown kind {sorted(unknown)}")
        self._require(
            SLIDING not in self.layer_types or bool(self.sliding_window),
            "sliding_window",
            "is required by sliding_attention layers",
        )
        self._require(
            SLIDING in self.layer_types or self.sliding_window is None,
            "sliding_window",
            "is given, and no layer is sliding_attention",
        )
        self._require(
            SLIDING in self.layer_types or self.is_causal is not None,
            "is_causal",
            "is left to the layers' kinds, and none is sliding_attention",
        )
        self._require(
            self.window_reading in WINDOW_READINGS,
            "window_reading",
            f"{self.window_reading!r} is not one of {', '.join(WINDOW_READINGS)}",
        )
        cap = self.final_logit_softcapping
        self._require(cap is None or cap > 0, "final_logit_softcapping", f"{cap} is not above 0")
        ids = self.target_layer_ids
        self._require(bool(ids), "target_layer_ids", "is empty")
        self._require(len(set(ids)) == len(ids), "target_layer_ids", f"{list(ids)} names a layer twice")
        self._require(
            all(0 <= i < self.num_target_layers for i in ids),
            "target_layer_ids",
            f"{list(ids)} are not all layers of a target with {self.num_target_layers}",
        )
        self._require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            "does not divide num_attention_heads",
        )

    @staticmethod
    def _require(holds: bool, where: str, what: str) -> None:
        if not holds:
            raise DFlashError(what, where=where, fix="Mend the drafter's configuration.")

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps, K * hidden_size."""
        return len(self.target_layer_ids) * self.hidden_size

    def layer_window(self, layer: int) -> int | None:
        """Return the window W of one draft layer, or None for a full one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def layer_causal(self, layer: int) -> bool:
        """Return whether one draft layer's slots see only themselves and earlier slots of their block."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        num_hidden_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...],
        **changes: Any,
    ) -> DrafterConfig:
        """Return the configuration of a drafter that borrows head and embedding of `target` (a transformers config)."""
        theta = read_rope_theta(target.to_dict())
        head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        values: dict[str, Any] = dict(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_hidden_layers,
            rope_theta=theta,
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            pad_token_id=target.pad_token_id,
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
        )
        return cls(**(values | changes))


def read_rope_theta(data: dict[str, Any]) -> float:
    """Return rope_theta from the flat key or from rope_parameters, where transformers 5 puts it.

    Reading one place only gave drafters a theta 100 times off (Model-Optimizer#2221). Raises DFlashError if it is
    nowhere, or in both and different.
    """
    nested = (data.get("rope_parameters") or {}).get("rope_theta")
    flat = data.get("rope_theta")
    if nested is not None and flat is not None and float(nested) != float(flat):
        raise DFlashError(f"is {flat} and in rope_parameters {nested}", where="rope_theta", fix="Keep the true one.")
    theta = nested if nested is not None else flat
    if theta is None:
        raise DFlashError("is missing", where="rope_theta", fix="Name it in the config.")
    return float(theta)
