"""The drafter's configuration, and its form in config.json (z-lab's vocabulary, which vLLM and SGLang read).

Source of the keys: the published z-lab drafters; arXiv 2602.06036 for what they mean.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash.errors import DFlashError

FULL, SLIDING = "full_attention", "sliding_attention"
_INNER_KEYS = {
    "mask_token_id",
    "mask_token",
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "causal",
    "input_embedding_scale",
}
"""What dflash_config may hold for a plain drafter; anything else would change numbers that we do not compute."""

PLAIN: dict[str, Any] = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "use_swa": False,
    "sample_from_anchor": False,
    "shift_label": False,
}
"""Keys of dflash_config that other projects write, with the only value this implementation computes."""


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
    is_causal: bool = False
    """True: a slot attends to itself and earlier slots of its block only. Written out, never inferred."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
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

    def to_json(self) -> dict[str, Any]:
        """Return config.json's content. block_size and theta are written in both places that readers look at."""
        values = asdict(self)
        ids, mask = list(values.pop("target_layer_ids")), values.pop("mask_token_id")
        scale = values.pop("input_embedding_scale")
        causal = values["is_causal"]
        values["layer_types"] = list(self.layer_types)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **values,
            "dflash_config": {
                "mask_token_id": mask,
                "target_layer_ids": ids,
                "block_size": self.block_size,
                "causal": causal,
                "input_embedding_scale": scale,
            },
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_hidden_layers,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """Return the configuration that a config.json of z-lab's layout describes.

        Raises DFlashError for a missing key, and for a setting that this implementation would not honour.
        """
        inner = data.get("dflash_config") or {}
        kind = (data.get("architectures") or ["none"])[0]
        if kind != "DFlashDraftModel":
            raise DFlashError(
                f"architecture {kind} is not a DFlash drafter", where="architectures", fix="Expected DFlashDraftModel."
            )
        block_sizes = {v for v in (data.get("block_size"), inner.get("block_size")) if v is not None}
        causals = {v for v in (data.get("is_causal"), inner.get("causal")) if v is not None}
        for name, found in (("block_size", block_sizes), ("is_causal", causals)):
            if len(found) > 1:
                raise DFlashError(
                    f"is given twice with different values {sorted(found)}", where=name, fix="Keep the true one."
                )
        if not block_sizes:
            raise DFlashError("is missing", where="block_size", fix="The drafter's export must name it.")
        unknown = inner.keys() - _INNER_KEYS - PLAIN.keys()
        if unknown:
            raise DFlashError(
                "is not supported",
                where=f"dflash_config.{min(unknown)}",
                fix="Successors of DFlash need their own code.",
            )
        for key in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            # vLLM reads these before dflash_config's, so a file that has them may mean other layers than it says.
            if data.get(key) is not None:
                raise DFlashError("stands at the top level", where=key, fix="Name the taps in dflash_config only.")
        refused = {"rope_scaling": None, "hidden_act": "silu", "attention_dropout": 0.0}
        for key, only in refused.items():
            if data.get(key, only) not in (only, None):
                raise DFlashError(f"{data[key]!r} is not supported", where=key, fix=f"Only {only!r} is.")
        rope_type = (data.get("rope_parameters") or {}).get("rope_type", "default")
        if rope_type != "default":
            raise DFlashError(
                f"{rope_type!r} is not supported", where="rope_parameters.rope_type", fix="Only 'default' is."
            )
        for key, plain in PLAIN.items():
            if inner.get(key, plain) not in (plain, None):
                raise DFlashError(
                    f"{inner[key]!r} is not supported", where=f"dflash_config.{key}", fix=f"Only {plain!r} is."
                )
        kind_of_layers = tuple(data.get("layer_types") or ())
        if data.get("use_sliding_window") and SLIDING not in kind_of_layers:
            raise DFlashError("names no sliding layer", where="layer_types", fix="Or set use_sliding_window to false.")
        if SLIDING in kind_of_layers and data.get("use_sliding_window") is False:
            raise DFlashError(
                "is false, and layer_types has sliding layers", where="use_sliding_window", fix="Keep the true one."
            )
        if not causals and SLIDING in kind_of_layers:
            raise DFlashError(
                "is missing, and projects disagree on what a sliding layer then means",
                where="is_causal",
                fix="Write it into the config.",
            )
        values: dict[str, Any] = {
            "block_size": block_sizes.pop(),
            "is_causal": bool(causals.pop()) if causals else False,
        }
        for key in ("mask_token_id", "target_layer_ids"):
            if inner.get(key) is None:
                raise DFlashError("is missing", where=f"dflash_config.{key}", fix="The drafter's export must name it.")
            values[key] = inner[key]
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        values["layer_types"] = kind_of_layers
        values["rope_theta"] = read_rope_theta(data)
        values["input_embedding_scale"] = inner.get("input_embedding_scale", 1.0)
        values["dtype"] = data.get("dtype") or data.get("torch_dtype") or "float32"
        required = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
        )
        for key in required:
            value = inner.get(key) if data.get(key) is None else data[key]  # num_target_layers stands in either
            if value is None:
                raise DFlashError("is missing", where=key, fix="The drafter's config.json must name it.")
            values[key] = value
        for key in (*required, "block_size", "mask_token_id"):
            if type(values[key]) is not int:
                raise DFlashError(f"{values[key]!r} is not a whole number", where=key, fix="Mend config.json.")
        optional = (
            "rms_norm_eps",
            "max_position_embeddings",
            "attention_bias",
            "initializer_range",
            "sliding_window",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
        )
        values |= {key: data[key] for key in optional if data.get(key) is not None}
        if SLIDING not in kind_of_layers:  # Qwen2-style configs carry a window that no layer uses
            values.pop("sliding_window", None)
        return cls(**values)


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
