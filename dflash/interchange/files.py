"""Files in and folders out: JSON objects, weights in one file or several, and folders published by rename."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.checkpoint import WEIGHTS, refuse_mask_embedding
from dflash.errors import DFlashError

INDEX = "model.safetensors.index.json"
NOTE = "interchange.json"
"""In every folder that import or export wrote: where it comes from. Its presence allows writing the folder again."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DFlashError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DFlashError(
            f"cannot be read ({error.strerror})", where=str(path), fix="Name a folder with config.json and weights."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DFlashError(f"is not JSON ({error})", where=str(path), fix="Copy or export the drafter again.") from None
    if not isinstance(value, dict):
        raise DFlashError("is not a JSON object", where=str(path), fix="Copy or export the drafter again.")
    return value


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file, or of the one set of weights in a folder, in the file's dtypes.

    A folder may hold model.safetensors, shards with an index, or a single .pt, .pth or .bin file.
    """
    if place.is_file():
        return _read_file(place)
    refuse_mask_embedding(place)
    if (place / INDEX).is_file():
        return _read_shards(place)
    if (place / WEIGHTS).is_file():
        return _read_file(place / WEIGHTS)
    pickles = sorted(file for file in place.glob("*") if file.suffix in (".pt", ".pth", ".bin") and file.is_file())
    if len(pickles) != 1:
        found = f"{len(pickles)} of them" if pickles else "none"
        raise DFlashError(
            f"has no {WEIGHTS}, and of .pt, .pth and .bin files {found}", where=str(place), fix="Name the weights file."
        )
    return _read_file(pickles[0])


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) and Path(v).name == v for v in places.values()):
        raise DFlashError(
            "weight_map does not name a file of this folder for each tensor", where=str(index), fix="Copy it again."
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        shard = _read_file(folder / name)
        twice = shard.keys() & tensors.keys()
        if twice:
            raise DFlashError(
                f"has {min(twice)}, which another shard has too", where=str(folder / name), fix="Copy it."
            )
        tensors |= shard
    lost = places.keys() - tensors.keys()
    if lost:
        raise DFlashError(
            f"{len(lost)} tensors of the index are in no shard, first {min(lost)}",
            where=str(index),
            fix="Copy all shards again.",
        )
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _unwrap(torch.load(path, map_location="cpu", weights_only=True), path)
    except FileNotFoundError:
        raise DFlashError("no such file", where=str(path), fix="Copy all weights of the drafter.") from None
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DFlashError(f"cannot be read ({reason})", where=str(path), fix="Copy or export it again.") from None


def _unwrap(value: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled training state, which may hold them one level down."""
    for key in ("model", "state_dict", "draft_model"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    tensors = {str(k): v for k, v in value.items() if isinstance(v, Tensor)} if isinstance(value, dict) else {}
    if not tensors:
        raise DFlashError("holds no named tensors", where=str(path), fix="Save the drafter's state_dict.")
    return tensors


def check_dtypes(tensors: Mapping[str, Tensor], where: str) -> torch.dtype:
    """Return the widest dtype of the tensors. Raises DFlashError for one that is no plain float, as quantised ones."""
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DFlashError(f"tensor {name} is {kind}", where=where, fix="Export it in float16, bfloat16 or float32.")
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors in their own dtypes; each gets memory of its own, as the format wants."""
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path, {"format": "pt"})


def check_out(out: Path, source: Path | None = None) -> None:
    """Raise DFlashError unless `out` is free: absent, an empty folder, or one that import or export wrote before."""
    if source is not None and out.resolve() == source.resolve():
        raise DFlashError("is the folder that is read", where=str(out), fix="Choose another --out.")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise DFlashError("is no folder", where=str(out), fix="Choose another --out.")
    if out.is_dir() and any(out.iterdir()) and not (out / NOTE).is_file():
        raise DFlashError(
            f"is not empty and not an earlier export ({NOTE} is not there)", where=str(out), fix="Choose another --out."
        )


def publish(out: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `out`, then put it in `out`'s place; a failure leaves `out` as it was."""
    out = out.absolute()
    temporary = out.with_name(f".{out.name}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        old = out.with_name(f".{out.name}-{os.getpid()}.old")
        if out.exists():
            out.rename(old)
        try:
            temporary.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
