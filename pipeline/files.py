"""What the stages do with files: written as env/files.py does, named as people name them."""

from __future__ import annotations

from pathlib import Path

from env.files import atomic_write_json, atomic_write_text, fsync_file, fsync_folder, sha256_file

__all__ = ["atomic_write_json", "atomic_write_text", "expand_user", "fsync_file", "fsync_folder", "sha256_file"]


def expand_user(text: str) -> Path:
    """Return the path with ~ and ~name replaced; as it stands where no such user is known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)
