"""A drafter as a folder, config.json and model.safetensors, in the layout of the published z-lab drafters.

Strict both ways: engines ignore unknown tensors in silence (SGLang) or fall back to defaults (vLLM's layer ids), so a
wrong file must be stopped here. Head and embedding are the target's and never in the file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.config_json import from_json, to_json
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_drafter(folder: Path, config: DrafterConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a drafter's folder, published by rename; `weights` are cast to `dtype`. An older export is replaced.

    Raises DFlashError if the names are not exactly the drafter's.
    """
    config = replace(config, dtype=str(dtype).removeprefix("torch."))
    check_tensors(config, weights, str(folder))
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous().clone() for name, t in weights.items()}
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / CONFIG).write_text(json.dumps(to_json(config), indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def load_drafter(
    folder: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> DFlashDraftModel:
    """Return the drafter of a folder, in `dtype` (default: the file's widest).

    Raises DFlashError naming the file for a missing, unknown or misshapen tensor or key.
    """
    config = read_config(folder)
    refuse_mask_embedding(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise _no_such_file(error, folder / WEIGHTS) from None
    except (ValueError, SafetensorError) as error:
        raise _unreadable(error, folder / WEIGHTS) from None
    model = DFlashDraftModel(config)
    check_tensors(config, tensors, str(folder / WEIGHTS))
    model.load_state_dict(tensors)
    stored = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))  # norms may be wider
    return model.to(device=device, dtype=dtype or stored).eval()


def refuse_mask_embedding(folder: Path) -> None:
    """Raise DFlashError if a mask row of its own lies beside the weights (MiMo's drafters; vLLM takes it)."""
    path = folder / "mask_embedding.pt"
    if path.exists():
        fix = "Only drafters whose mask token is a row of the target's embedding are read."
        raise DFlashError("holds a mask embedding that is not the target's", where=str(path), fix=fix)


def read_config(folder: Path) -> DrafterConfig:
    """Return the configuration of a drafter's folder. Raises DFlashError naming the file and the key."""
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"{CONFIG} is not a JSON object")
    except FileNotFoundError as error:
        raise _no_such_file(error, path) from None
    except ValueError as error:
        raise _unreadable(error, path) from None
    try:
        return from_json(data)
    except DFlashError as error:
        raise DFlashError(error.what, where=f"{path}: {error.where}", fix=error.fix) from None


def _no_such_file(error: FileNotFoundError, path: Path) -> DFlashError:
    fix = "A drafter's folder holds config.json and model.safetensors."
    return DFlashError("no such file", where=str(error.filename or path), fix=fix)


def _unreadable(error: Exception, path: Path) -> DFlashError:
    return DFlashError(f"cannot be read ({error})", where=str(path), fix="Export the drafter again.")


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise DFlashError for the first missing, unknown or misshapen tensor of a drafter."""
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in DFlashDraftModel(config).named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise DFlashError(
            f"{len(missing)} tensors are missing, first {missing[0]}",
            where=where,
            fix="The config and the file do not belong together.",
        )
    if unknown:
        raise DFlashError(
            f"{len(unknown)} tensors are unknown, first {unknown[0]}",
            where=where,
            fix="Head, embedding and successor heads are not part of a plain drafter.",
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise DFlashError(
                f"{name} has shape {list(found[name])}, the config wants {list(shape)}",
                where=where,
                fix="The config and the file do not belong together.",
            )
