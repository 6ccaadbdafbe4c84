"""Checkpoints that are either complete or not there.

A save writes a hidden folder beside the others, a COMPLETE marker with every file's size and sha256 last, syncs, and
renames it to step-000500. Reading trusts a folder only when the marker is there and everything in it agrees.
(vllm-project/speculators PR 739, sgl-project/SpecForge PR 659, pytorch/torchtitan PR 315: a kill during a save left a
folder that resume trusted.)

One process saves into a folder at a time: the run's lock sees to it.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.errors import ConfigError, DataError
from pipeline.files import fsync_file, fsync_folder, sha256_file

MARKER = "COMPLETE"
STATE = "state.json"
_STEP = re.compile(r"step-(\d{6,})")
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    """By file stem ("weights", "optimizer"), then by name; on the CPU."""
    state: dict[str, Any]
    """What JSON can hold: counters, the data order's place, the contract."""


def save_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> Path:
    """Return root/step-<step>, published whole. A checkpoint of the same step is replaced.

    tensors  file stem -> tensors of <stem>.safetensors; any device, copied to the CPU by safetensors
    Raises OSError when the disk is full; nothing of the attempt stays then.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{step:06d}"
    folder = root / f"{_TEMPORARY}{final.name}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        for stem, named in tensors.items():
            _save_tensors(named, folder / f"{stem}.safetensors")
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        files = {}
        for path in sorted(folder.iterdir()):
            fsync_file(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        (folder / MARKER).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n", encoding="utf-8")
        fsync_file(folder / MARKER)
        fsync_folder(folder)
        _publish(folder, final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return final


def latest_checkpoint(root: Path, log: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is complete and matches its checksums, or None.

    Logs one line for each newer one that was passed over and why.
    """
    if not root.is_dir():
        return None
    _put_back_replaced(root)
    rejected: list[str] = []
    chosen: Path | None = None
    for folder in _steps(root):
        fault = _fault(folder)
        if fault is None:
            chosen = folder
            break
        rejected.append(f"{folder.name} {fault}.")
    then = f"Resuming from {chosen.name}." if chosen else "No other is left; starting from step 0."
    for line in rejected:
        log(f"{line} {then}")
    return chosen


def load_checkpoint(path: Path) -> Checkpoint:
    """Return what `save_checkpoint` was given. Raises DataError for a folder that is not a complete checkpoint."""
    fault = _fault(path, checksums=False)
    if fault is not None:
        raise DataError(fault, where=path.name, fix="Remove the folder; an earlier one is used then.")
    marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    stems = [Path(name).stem for name in marker["files"] if name.endswith(".safetensors")]
    try:
        tensors = {stem: load_file(path / f"{stem}.safetensors") for stem in stems}
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (SafetensorError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=path.name, fix="Remove the folder.") from None
    return Checkpoint(marker["step"], tensors, state)


def prune_checkpoints(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, older incomplete ones, and what dead saves left behind.

    The newest complete one always stays. Sizes are compared here, checksums are not: they would read everything again.
    """
    if not root.is_dir():
        return
    _put_back_replaced(root)
    for leftover in [*root.glob(f"{_TEMPORARY}*"), *root.glob(f"{_REPLACED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    complete = 0
    for folder in _steps(root):
        if complete >= max(keep, 1):
            _remove(folder)
        elif _fault(folder, checksums=False) is None:
            complete += 1


def check_contract(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for the first key, in order of name, whose value differs from the one saved in `where`.

    Both are nested mappings of what must not change across a resume.
    """
    before, now = _flat(saved), _flat(current)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key, _ABSENT) != now.get(key, _ABSENT):
            was = f"was {_shown(before[key])}" if key in before else "was not there"
            gives = f"gives {_shown(now[key])}" if key in now else "does not have it"
            raise ConfigError(
                f"{key} {was} when {where} was saved, the config {gives}", fix="Use a new run name or the old value."
            )


_ABSENT = object()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and (value or not prefix):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: list(value) if isinstance(value, tuple) else value}


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _save_tensors(named: Mapping[str, torch.Tensor], path: Path) -> None:
    whole = {}
    for name, tensor in named.items():
        tensor = tensor.detach().contiguous()
        # A view into a larger buffer would be refused by safetensors as shared memory.
        view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        whole[name] = tensor.clone() if view else tensor
    try:
        save_file(whole, path)
    except SafetensorError as error:
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from None
        raise


def _publish(folder: Path, final: Path) -> None:
    """Rename `folder` to `final`, setting aside what is there; `_put_back_replaced` mends a kill in between."""
    aside = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    folder.rename(final)
    fsync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _put_back_replaced(root: Path) -> None:
    for aside in root.glob(f"{_REPLACED}*"):
        original = root / aside.name.removeprefix(_REPLACED)
        if not original.exists():
            aside.rename(original)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; its marker goes first, so that a kill half way leaves an incomplete one."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _steps(root: Path) -> list[Path]:
    found = [path for path in root.iterdir() if path.is_dir() and _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _fault(folder: Path, *, checksums: bool = True) -> str | None:
    """Return why a checkpoint cannot be trusted, or None."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        step, files = int(marker["step"]), dict(marker["files"])
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"is incomplete (no {MARKER} marker)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"is damaged ({MARKER} cannot be read)"
    if folder.name != f"step-{step:06d}":
        return f"is damaged ({MARKER} is that of step {step})"
    if STATE not in expected:
        return f"is damaged ({MARKER} does not list {STATE})"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"is damaged ({name} is missing)"
        if path.stat().st_size != size:
            return f"is damaged ({name} has {path.stat().st_size} bytes instead of {size})"
        if checksums and sha256_file(path) != digest:
            return f"is damaged ({name} does not match its checksum)"
    return None
