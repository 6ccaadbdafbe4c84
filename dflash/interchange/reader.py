"""Which project wrote a drafter, and the drafter: one function for every format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.checkpoint import CONFIG
from dflash.config import DrafterConfig
from dflash.config_json import MARKOV_KEY, from_json
from dflash.errors import DFlashError
from dflash.interchange.drafter import ForeignDrafter, body_tensors, checked, read_kept, read_note
from dflash.interchange.files import read_object, read_tensors
from dflash.interchange.heads import refuse_head_tensors
from dflash.interchange.readings import find_reading
from dflash.interchange.shapes import complete, complete_taps
from dflash.interchange.speculators import KIND, read_speculators
from dflash.interchange.target import TargetTables, differing_rows, has_weights, read_tables, target_settings
from dflash.interchange.torchspec import is_torchspec, rename, zlab_layout
from dflash.interchange.zlab import AUTOMODEL, canonical


def read_drafter(
    place: Path,
    *,
    reading: str = "",
    config_file: Path | None = None,
    target: Path | None = None,
) -> ForeignDrafter:
    """Return the drafter in a folder, or in one weights file, of whatever project.

    reading       what sliding layers mean where the file is silent, one of READINGS; "" for its writer's own
    config_file   config.json, where the weights come without one
    target        the target's folder: its config.json says what a drafter's leaves out, and its weights, if they are
                  there, are compared with an embedding that the drafter brings
    Raises DFlashError, naming file and key, for everything that would make it another drafter.
    """
    if reading:
        find_reading(reading)
    if not place.exists():
        raise DFlashError("no such folder", where=str(place), fix="Name a drafter's folder or weights file.")
    beside = place / CONFIG
    path = config_file or (beside if beside.is_file() else None)
    data = read_object(path) if path is not None else {}
    tensors = read_tensors(place)
    brings = any(name.endswith("embed_tokens.weight") for name in tensors)
    tables = read_tables(target, str(target)) if brings and target is not None and has_weights(target) else None
    settings = target_settings(target) if target is not None else None
    try:
        if KIND in data:
            found = read_speculators(data, tensors, reading=reading, target=settings, tables=tables, where=str(place))
        elif is_torchspec(data, tensors):
            found = _read_torchspec(data, tensors, reading, settings, tables, str(place))
        else:
            found = _read_zlab(data, tensors, reading, settings, str(place))
    except DFlashError as error:
        name = str(path or place)
        inside = error.where and error.where != str(place) and not error.where.startswith("--")
        raise DFlashError(
            error.what, where=f"{name}: {error.where}" if inside else error.where or str(place), fix=error.fix
        ) from None
    found = replace(found, notes=(*found.notes, *_mask_notes(found.config)))
    if place.is_dir() and found.format != "speculators":
        note = read_note(place)
        found = replace(found, kept=read_kept(place), target=str(note.get("target") or ""))
    return found


def _mask_notes(config: DrafterConfig) -> list[str]:
    """Return a warning if the mask token occurs in text; some trainers fall back to pad or EOS (Automodel#2461)."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.mask_token_id not in (*ends, config.pad_token_id):
        return []
    return [f"ITS MASK TOKEN {config.mask_token_id} IS PAD OR EOS, which texts contain; training on refuses it"]


def _read_zlab(
    data: dict[str, Any],
    tensors: Mapping[str, Tensor],
    reading: str,
    target: Mapping[str, Any] | None,
    where: str,
) -> ForeignDrafter:
    if not data:
        raise DFlashError("has no config.json", where=where, fix="Give --config.")
    body = body_tensors(tensors)
    inner = data.get("dflash_config")
    refuse_head_tensors(body, where, own_markov=isinstance(inner, dict) and bool(inner.get(MARKOV_KEY)))
    flat, notes = canonical(data, reading)
    notes += complete(flat, body, target)
    automodel = (data.get("architectures") or [""])[0] in AUTOMODEL
    use_swa = "use_swa" in (data.get("dflash_config") or {})
    kind = "Automodel" if automodel else "Model-Optimizer" if use_swa else "z-lab"
    return ForeignDrafter(kind, checked(from_json(flat), body, where), body, tuple(notes))


def _read_torchspec(
    data: dict[str, Any],
    tensors: Mapping[str, Tensor],
    reading: str,
    target: Mapping[str, Any] | None,
    tables: TargetTables | None,
    where: str,
) -> ForeignDrafter:
    renamed, embedding = rename(tensors)
    body = body_tensors(renamed)
    refuse_head_tensors(body, where)
    flat, notes = canonical(zlab_layout(data), reading)
    notes += complete(flat, body, target)
    notes += complete_taps(flat, body)
    if embedding is not None and tables is not None:
        count = differing_rows(embedding, tables.embedding)
        if count:
            notes.append(f"ITS EMBEDDING DIFFERS FROM THE TARGET'S IN {count} ROWS, and the target's is used here")
    elif embedding is not None:
        notes.append("its stored embedding is left out: the target's is used; give --target to compare them")
    return ForeignDrafter("TorchSpec", checked(from_json(flat), body, where), body, tuple(notes))
