"""Files that a reader sees as they were or as they are, never half of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env.files import atomic_write_json, atomic_write_text, sha256_file


def test_a_failed_write_leaves_the_old_file_and_no_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    atomic_write_json(path, {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "half \ud800 written")  # a lone surrogate cannot be encoded
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_sha256_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_file(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
