"""A drafter as it was read: this project's configuration, its tensors, and what belongs to the other project only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.checkpoint import CONFIG, WEIGHTS, check_tensors
from dflash.config import DrafterConfig
from dflash.config_json import to_json
from dflash.errors import DFlashError
from dflash.interchange.files import (
    NOTE,
    check_dtypes,
    publish,
    read_object,
    read_tensors,
    save_tensors,
    write_object,
)
from dflash.interchange.heads import refuse_head_tensors

KEPT = "speculators"
"""Folder for what a speculators file has and z-lab's layout has not. A folder, since engines load every *.safetensors
that stands beside config.json."""
EXTRA = "extra.safetensors"


@dataclass(frozen=True)
class Kept:
    """config.json and the tensors besides the drafter's own, as the speculators file had them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class ForeignDrafter:
    """tensors: exactly the drafter's, by z-lab's names. notes: what a person must know, one line each.
    target: what its own files call the target, if they do."""

    format: str
    config: DrafterConfig
    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    kept: Kept | None = None
    target: str = ""


def body_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefix `model.` and without rotary tables, which are computed."""
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if len(bare) != len(tensors):
        twice = next(name for name in tensors if name.startswith("model.") and name.removeprefix("model.") in tensors)
        raise DFlashError(f"has {twice} and the same without model.", fix="Keep the true one.")
    return {name: tensor for name, tensor in bare.items() if not name.endswith("rotary_emb.inv_freq")}


def checked(config: DrafterConfig, tensors: Mapping[str, Tensor], where: str) -> DrafterConfig:
    """Return the configuration with the tensors' true dtype (the widest, when they differ).

    Raises DFlashError for a successor's tensor, a missing, unknown or misshapen one, and a quantised one.
    """
    refuse_head_tensors(tensors, where, own_markov=bool(config.markov_rank))
    check_tensors(config, tensors, where)
    return replace(config, dtype=str(check_dtypes(tensors, where)).removeprefix("torch."))


def write_zlab(out: Path, drafter: ForeignDrafter, note: Mapping[str, Any]) -> None:
    """Publish a folder in z-lab's layout, each tensor in its own dtype, and beside it what must be kept."""

    def fill(folder: Path) -> None:
        write_object(folder / CONFIG, to_json(drafter.config))
        save_tensors(drafter.tensors, folder / WEIGHTS)
        write_object(folder / NOTE, note)
        if drafter.kept is not None:
            (folder / KEPT).mkdir()
            write_object(folder / KEPT / CONFIG, drafter.kept.config)
            save_tensors(drafter.kept.tensors, folder / KEPT / EXTRA)

    publish(out, fill)


def read_note(folder: Path) -> dict[str, Any]:
    """Return what import or export wrote about the folder; empty for a folder of somebody else."""
    return read_object(folder / NOTE) if (folder / NOTE).is_file() else {}


def read_kept(folder: Path) -> Kept | None:
    """Return what `write_zlab` kept of a speculators file."""
    kept = folder / KEPT
    ours = (folder / NOTE).is_file() and kept.is_dir()
    return Kept(read_object(kept / CONFIG), read_tensors(kept / EXTRA)) if ours else None
