"""Which drafter a run trains: the one its configuration describes, or a published one that it goes on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from dflash.checkpoint import read_config
from dflash.config import DrafterConfig, spread_layer_ids
from dflash.errors import DFlashError
from pipeline.config import DrafterSection, RunConfig
from pipeline.errors import ConfigError
from pipeline.files import expand_user
from pipeline.targets import TargetFolder, target_config

_NAMES = {"num_layers": "num_hidden_layers"}
"""Fields of the drafter section that DrafterConfig calls otherwise."""
_NOT_OF_THE_FILE = {"attention", "num_taps"}
"""Fields that an exported drafter does not have: how it is computed, and a rule that chose its taps."""


def drafter_config(config: RunConfig, folder: TargetFolder) -> DrafterConfig:
    """Return the drafter that the run trains on this target. Raises ConfigError naming the key.

    With train.init_from it is the file's; what the drafter section says besides must be what the file says.
    """
    target = target_config(folder)
    longest = config.data.max_prompt_tokens + config.data.max_answer_tokens
    positions = target.max_position_embeddings
    if longest > positions:
        raise ConfigError(
            f"max_prompt_tokens + max_answer_tokens = {longest}, the target has {positions} positions",
            where="data",
            fix="Lower them.",
        )
    if config.train.init_from is not None:
        return _published(config.train.init_from, config.drafter, target)
    return _described(config.drafter, target, folder)


def _described(section: DrafterSection, target: PreTrainedConfig, folder: TargetFolder) -> DrafterConfig:
    changes: dict[str, Any] = {
        "is_causal": section.is_causal,
        "sliding_window": section.sliding_window,
        "window_reading": section.window_reading,
    }
    changes |= _head(section)
    if section.layer_types:
        changes["layer_types"] = tuple(section.layer_types)
    if section.intermediate_size:
        changes["intermediate_size"] = section.intermediate_size
    try:
        ids = section.target_layer_ids or spread_layer_ids(target.num_hidden_layers, section.num_taps)
        return DrafterConfig.for_target(
            target,
            num_hidden_layers=section.num_layers,
            block_size=section.block_size,
            mask_token_id=section.mask_token_id,
            target_layer_ids=tuple(ids),
            **changes,
        )
    except DFlashError as error:
        of_run = error.where in type(section).model_fields
        where = f"drafter.{error.where}" if of_run else f"{folder.path}/config.json: {error.where}"
        raise ConfigError(error.what, where=where, fix=error.fix) from None


def _head(section: DrafterSection) -> dict[str, Any]:
    """Return the settings of the section's head; those of DFlash 2 are the published ones."""
    if section.head == "dflash2":
        return {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": section.head_rank}
    return {"markov_rank": section.head_rank} if section.head == "markov" else {}


def _published(init_from: str, section: DrafterSection, target: PreTrainedConfig) -> DrafterConfig:
    where = f"train.init_from: {init_from}"
    try:
        found = read_config(expand_user(init_from))
    except DFlashError as error:
        raise ConfigError(error.what, where=error.where, fix=error.fix) from None
    borrowed = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_hidden_layers,
    }
    for key, value in borrowed.items():
        if getattr(found, key) != value:
            raise ConfigError(
                f"has {key} {getattr(found, key)}, the target {value}",
                where=where,
                fix="A drafter goes with the target it was trained for.",
            )
    wrong = []
    head = "dflash2" if found.selector_rank else "markov" if found.markov_rank else "plain"
    if head == "plain" and section.head != "plain":  # it starts as the identity, so a plain drafter can take one
        head, found = section.head, replace(found, **_head(section))
    own = {"head": head, "head_rank": found.selector_rank or found.markov_rank}
    for field in sorted(section.model_fields_set - _NOT_OF_THE_FILE):
        key = _NAMES.get(field, field)
        asked, has = getattr(section, field), own[field] if field in own else getattr(found, key)
        if asked is not None and asked != has:
            wrong.append(f"has {key} {_shown(has)}, this run {_shown(asked)}")
    if wrong:
        raise ConfigError("; ".join(wrong), where=where, fix="Change the run's drafter section.")
    return found


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
