"""The target's shape: from its config.json where that is on this machine, else as a person says it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.flops import TARGETS
from dflash.config import DrafterConfig, spread_layer_ids
from dflash.errors import DFlashError
from env.caches import CacheDirs
from pipeline.catalogue import load_catalogue
from pipeline.config import RunConfig, TargetConfig
from pipeline.errors import ConfigError
from pipeline.files import expand_user

_TIED = {"smollm2"}
"""Shapes of benchmarks/flops.py whose head is their embedding."""


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """A dense Llama or Qwen target."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    """The head is the embedding."""

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of a token's keys in one layer, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Weights of the layers, which every token is multiplied with."""
        layer = 2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * self.ffn
        return self.layers * layer

    @property
    def table(self) -> int:
        """Weights of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Without norms and biases, which are less than a thousandth."""
        return self.matrices + self.table * (1 if self.tied else 2)

    @property
    def cache_width(self) -> int:
        """Numbers that one token leaves in the key-value cache."""
        return self.layers * 2 * self.keys


def named_shape(name: str) -> TargetShape:
    """Return a shape of benchmarks/flops.py. Raises KeyError."""
    known = TARGETS[name]
    return TargetShape(
        layers=known["num_target_layers"],
        hidden=known["hidden_size"],
        heads=known["num_attention_heads"],
        kv_heads=known["num_key_value_heads"],
        head_dim=known["head_dim"],
        ffn=known["intermediate_size"],
        vocab=known["vocab_size"],
        tied=name in _TIED,
    )


def given_shape(text: str) -> TargetShape:
    """Return the shape that `text` says: "qwen3-8b", or "layers=36,hidden=4096,heads=32,...,tied=0".

    kv_heads, head_dim and tied may be left out: heads, hidden / heads and 0. Raises ConfigError.
    """
    if text in TARGETS:
        return named_shape(text)
    names = [field.name for field in fields(TargetShape)]
    found: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        number = value.strip()
        if key not in names or not number.isdecimal() or (int(number) == 0 and key != "tied"):
            fix = f"Name one of {', '.join(TARGETS)}, or give {', '.join(names)} as numbers, e.g. layers=36."
            raise ConfigError(f"{part!r} is no part of a shape", where="--shape", fix=fix)
        found[key] = int(number)
    if missing := [name for name in ("layers", "hidden", "heads", "ffn", "vocab") if name not in found]:
        raise ConfigError(f"{', '.join(missing)} is missing", where="--shape", fix="Add it, e.g. layers=36.")
    found.setdefault("kv_heads", found["heads"])
    found.setdefault("head_dim", found["hidden"] // found["heads"])
    tied = bool(found.pop("tied", 0))
    return TargetShape(**found, tied=tied)


def local_shape(config: TargetConfig, caches: CacheDirs) -> TargetShape:
    """Return the shape of the run's target by its config.json; nothing is downloaded.

    Raises ConfigError when it is not on this machine, DataError when it is no target that can be trained for.
    """
    from pipeline.targets import TargetFolder, check_architecture, read_json, target_config  # brings torch

    folder = _folder(config, caches)
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"the config.json of {config.source!r} is not on this machine",
            where="target.source",
            fix=f"Say its shape: --shape {' or '.join(TARGETS)}, or --shape layers=36,hidden=4096,...",
        )
    check_architecture(read_json(folder / "config.json"), where=str(folder / "config.json"))
    found = target_config(TargetFolder(path=folder, identity="", name=config.source))
    return TargetShape(
        layers=found.num_hidden_layers,
        hidden=found.hidden_size,
        heads=found.num_attention_heads,
        kv_heads=found.num_key_value_heads,
        head_dim=getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads,
        ffn=found.intermediate_size,
        vocab=found.vocab_size,
        tied=bool(found.tie_word_embeddings),
    )


def _folder(config: TargetConfig, caches: CacheDirs) -> Path | None:
    from pipeline.targets import CONVERTER_VERSION

    if entry := load_catalogue().targets.get(config.source):
        return caches.models / f"{config.source}-{entry.file_sha256[:12]}-v{CONVERTER_VERSION}"
    if config.revision is None:
        return expand_user(config.source)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(config.source, "config.json", revision=config.revision)
    return Path(found).parent if isinstance(found, str) else None


def drafter_of(config: RunConfig, target: TargetShape) -> DrafterConfig:
    """Return the drafter that the run would train on a target of this shape. Raises ConfigError naming the key."""
    section = config.drafter
    if config.train.init_from is not None:
        from dflash.checkpoint import read_config

        try:
            return read_config(expand_user(config.train.init_from))
        except DFlashError as error:
            raise ConfigError(error.what, where=error.where, fix=error.fix) from None
    if section.head != "plain":
        fix = "Plan with --set drafter.head=plain; NOTES.md says what the heads cost."
        raise ConfigError(f"the cost of {section.head!r} is not in the model", where="drafter.head", fix=fix)
    try:
        return DrafterConfig(
            hidden_size=target.hidden,
            intermediate_size=section.intermediate_size or target.ffn,
            num_hidden_layers=section.num_layers,
            num_attention_heads=target.heads,
            num_key_value_heads=target.kv_heads,
            head_dim=target.head_dim,
            vocab_size=target.vocab,
            block_size=section.block_size,
            mask_token_id=section.mask_token_id,
            target_layer_ids=section.target_layer_ids or spread_layer_ids(target.layers, section.num_taps),
            num_target_layers=target.layers,
            rope_theta=1e6,  # no cost depends on it
            layer_types=section.layer_types or (),
            sliding_window=section.sliding_window,
            is_causal=section.is_causal,
        )
    except DFlashError as error:
        raise ConfigError(error.what, where=f"drafter.{error.where}", fix=error.fix) from None
