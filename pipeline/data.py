"""Answers and features on disk: what the cache stage writes and training reads.

Both live in the cache under a key of everything they depend on, so two runs that differ in the learning rate share
them and one that differs in the chat template does not. A folder is complete when its manifest is there; it is
published by rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import DataError
from pipeline.files import atomic_write_json, sha256_file
from pipeline.rendering import Sample

MANIFEST = "manifest.json"


def data_key(factors: Mapping[str, Any]) -> str:
    """Return 12 hex digits of everything the data depends on."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Give an empty sibling to write into; when the block ends without an error it becomes `folder`."""
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Let one process at a time make `folder`; another waits, saying so, and then finds it made.

    The kernel drops the lock with its process. A file system that refuses locks costs double work only: what is
    published is whole either way.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(f"another run is making {folder.name}; waiting for it", flush=True)
        lock.acquire()
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def read_data_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete folder whose files have the recorded sizes, else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return manifest if whole else None


def write_data_manifest(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest last, with size and sha256 of every other file, and return it."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in sorted(folder.iterdir())}
    manifest = {**content, "files": files}
    atomic_write_json(folder / MANIFEST, manifest)
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise DataError for the first file that does not match its recorded sha256."""
    for name, entry in manifest["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != entry["sha256"]:
            raise DataError(
                "is missing or damaged", where=str(folder / name), fix="Rebuild it: invoke train --from-stage cache."
            )


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write one sample a line: id, input_ids, and the supervised spans as [start, end) pairs."""
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            spans: list[list[int]] = []
            for position, supervised in enumerate(sample.loss_mask):
                if supervised and spans and spans[-1][1] == position:
                    spans[-1][1] = position + 1
                elif supervised:
                    spans.append([position, position + 1])
            file.write(json.dumps({"id": sample.id, "input_ids": sample.input_ids, "supervised": spans}) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Return what write_samples wrote."""
    samples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        mask = [False] * len(record["input_ids"])
        for start, end in record["supervised"]:
            mask[start:end] = [True] * (end - start)
        samples.append(Sample(id=record["id"], input_ids=record["input_ids"], loss_mask=mask))
    return samples


def prompt_len(sample: Sample) -> int:
    """Return the tokens before the first that the target wrote; all of them where it wrote none."""
    return sample.loss_mask.index(True) if any(sample.loss_mask) else len(sample.input_ids)


class FeatureShards:
    """Cached target features, one row a token, in safetensors shards; opened lazily and read by sample."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._places: list[tuple[str, int, int]] = [tuple(place) for place in manifest["places"]]
        self._open: dict[str, Any] = {}

    def __call__(self, index: int) -> Tensor:
        """Return the features (T, C) of one sample."""
        name, start, end = self._places[index]
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt").__enter__()
        return self._open[name].get_slice("features")[start:end]


class ShardWriter:
    """Writes features of samples 0, 1, 2, ... in order and remembers where each one is."""

    def __init__(self, folder: Path, samples_per_shard: int) -> None:
        self._folder, self._per_shard = folder, samples_per_shard
        self._pending: list[Tensor] = []
        self.places: list[tuple[str, int, int]] = []

    def add(self, features_TC: Tensor) -> None:
        start = sum(len(t) for t in self._pending)
        name = f"shard-{(len(self.places)) // self._per_shard:05d}.safetensors"
        self.places.append((name, start, start + len(features_TC)))
        self._pending.append(features_TC.cpu())
        if len(self._pending) == self._per_shard:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            save_file({"features": torch.cat(self._pending)}, self._folder / self.places[-1][0])
            self._pending.clear()
