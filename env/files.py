"""Writing files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def atomic_write_text(path: Path, text: str) -> None:
    """Write a temporary sibling, sync it to disk and rename it over `path`. A failure leaves `path` as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON by `atomic_write_text`. Keys keep their order."""
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")


def fsync_file(path: Path) -> None:
    """Make sure the content of a file that another library wrote is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Make renames inside the folder last through a power cut, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse to sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's content, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
