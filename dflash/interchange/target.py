"""The target's part of a drafter that brings its own embedding and head: the two tables, from the target's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.checkpoint import CONFIG, WEIGHTS
from dflash.errors import DFlashError
from dflash.interchange.files import INDEX, read_object

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetTables:
    """name: what an engine is told to load. embedding and head: (V, D), in the dtype of the target's file."""

    name: str
    architectures: tuple[str, ...]
    embedding: Tensor
    head: Tensor


def target_settings(folder: Path) -> dict[str, Any]:
    """Return the config of the target's language model; one nested in text_config is that of a model with vision."""
    data = read_object(folder / CONFIG)
    return data.get("text_config") or data


def has_weights(folder: Path) -> bool:
    """Return whether the target's weights are there too; for many questions its config.json is enough."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def read_tables(folder: Path, name: str) -> TargetTables:
    """Return the tables of a target in Hugging Face format; a tied head is the embedding.

    Raises DFlashError for a folder without them.
    """
    config = read_object(folder / CONFIG)
    embedding = _read_tensor(folder, EMBEDDING)
    if embedding is None:
        raise DFlashError(f"has no {EMBEDDING}", where=str(folder), fix="Name a target in Hugging Face format.")
    head = _read_tensor(folder, HEAD)
    if head is None and not config.get("tie_word_embeddings"):
        raise DFlashError(f"has no {HEAD}, and it is not tied", where=str(folder), fix="Copy the target again.")
    names = config.get("architectures") or []
    return TargetTables(name, tuple(map(str, names)), embedding, embedding.clone() if head is None else head)


def _read_tensor(folder: Path, name: str) -> Tensor | None:
    """Return one tensor of a model, reading nothing else of it; None where there is none of that name."""
    file = folder / WEIGHTS
    if (folder / INDEX).is_file():
        place = (read_object(folder / INDEX).get("weight_map") or {}).get(name)
        if place is None:
            return None
        file = folder / str(place)
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name) if name in opened.keys() else None  # noqa: SIM118, not a dict
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DFlashError(f"cannot be read ({reason})", where=str(file), fix="Copy the target again.") from None


def differing_rows(mine: Tensor, theirs: Tensor) -> int:
    """Return how many rows of two tables (V, D) differ; a table of another shape differs in all."""
    if mine.shape != theirs.shape:
        return mine.shape[0]
    wide = torch.promote_types(mine.dtype, theirs.dtype)
    return int((mine.to(wide) != theirs.to(wide)).any(dim=1).sum())
