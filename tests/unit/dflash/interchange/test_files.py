"""Weights in, folders out: nothing half-written, nothing overwritten that is not ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash.errors import DFlashError
from dflash.interchange.files import NOTE, check_out, publish, read_object, read_tensors


def test_a_failing_write_leaves_the_earlier_export_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def writes(name: str, text: str) -> Callable[[Path], None]:
        def fill(folder: Path) -> None:
            (folder / name).write_text(text)

        return fill

    def fails(folder: Path) -> None:
        (folder / "a").write_text("second")
        raise OSError("disk full")

    publish(out, writes("a", "first"))

    with pytest.raises(OSError, match="disk full"):
        publish(out, fails)
    assert (out / "a").read_text() == "first"
    publish(out, writes("b", "third"))
    assert [file.name for file in out.iterdir()] == ["b"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_only_an_absent_an_empty_or_an_earlier_folder_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_out(out)
    out.mkdir()
    check_out(out)
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(DFlashError, match="is not empty and not an earlier export"):
        check_out(out)
    (out / NOTE).write_text("{}")
    check_out(out)
    with pytest.raises(DFlashError, match="is the folder that is read"):
        check_out(out, tmp_path / "x" / ".." / "out")
    with pytest.raises(DFlashError, match="is no folder"):
        check_out(out / "thesis.txt")
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(DFlashError, match="is no folder"):
        check_out(tmp_path / "link")


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "is not JSON"), ("[1]", "is not a JSON object"), (None, "cannot be read")],
)
def test_a_bad_config_file_is_named(tmp_path: Path, text: str | None, what: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DFlashError, match=what) as caught:
        read_object(path)
    assert caught.value.where == str(path)


def test_a_truncated_weights_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DFlashError, match=r"model\.safetensors: cannot be read") as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_or_with_too_many_says_so(tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match=r"and of .pt, .pth and .bin files none"):
        read_tensors(tmp_path)
    for name in ("a.pt", "b.bin"):
        torch.save({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(DFlashError, match="files 2 of them"):
        read_tensors(tmp_path)
    assert read_tensors(tmp_path / "a.pt").keys() == {"x"}


@pytest.mark.parametrize(
    ("places", "what"),
    [
        ({"a": "../outside.safetensors"}, "does not name a file of this folder"),
        ({"a": 3}, "does not name a file of this folder"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "1 tensors of the index are in no shard, first b"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "two.safetensors: has a, which another shard has too"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, places: dict[str, object], what: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(DFlashError, match=what):
        read_tensors(tmp_path)
