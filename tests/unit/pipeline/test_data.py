from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from pipeline import data
from pipeline.data import (
    FeatureShards,
    ShardWriter,
    building,
    check_files,
    data_key,
    published,
    read_data_manifest,
    read_samples,
    write_data_manifest,
    write_samples,
)
from pipeline.errors import DataError
from pipeline.rendering import Sample, make_sample

LENGTHS = (3, 5, 1, 4, 2)


def _features(folder: Path, per_shard: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Publish features of LENGTHS tokens and width 6 to `folder`, and return them."""
    made = [torch.randn(length, 6).to(dtype) for length in LENGTHS]
    with published(folder) as temporary:
        writer = ShardWriter(temporary, per_shard)
        for features in made:
            writer.add(features)
        writer.flush()
        write_data_manifest(temporary, {"places": writer.places})
    return made


def _open(folder: Path) -> FeatureShards:
    manifest = read_data_manifest(folder)
    assert manifest is not None
    check_files(folder, manifest)
    return FeatureShards(folder, manifest)


def test_the_key_is_that_of_the_values_and_not_of_their_order() -> None:
    assert data_key({"a": 1, "b": [2]}) == data_key({"b": [2], "a": 1})
    assert data_key({"a": 1, "b": [2]}) != data_key({"a": 1, "b": [3]})
    assert len(data_key({})) == 12


def test_a_published_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "answers-1"
    with published(folder) as temporary:
        (temporary / "train.jsonl").write_text("x")
        assert not folder.exists()
    assert [p.name for p in folder.iterdir()] == ["train.jsonl"]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "answers-1"
    with pytest.raises(KeyboardInterrupt), published(folder) as temporary:
        (temporary / "train.jsonl").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_folder_that_was_there_and_a_success_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "answers-1"
    with published(folder) as temporary:
        (temporary / "old").write_text("old")
    with pytest.raises(OSError), published(folder) as temporary:
        (temporary / "new").write_text("half")
        raise OSError("disk full")
    assert [p.name for p in folder.iterdir()] == ["old"]
    with published(folder) as temporary:
        (temporary / "new").write_text("whole")
    assert [p.name for p in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_second_maker_waits_until_the_first_has_made_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "answers-1"
    found: list[bool] = []

    def second() -> None:
        with building(folder):
            found.append(folder.exists())

    with building(folder):
        waiting = threading.Thread(target=second, daemon=True)
        waiting.start()
        waiting.join(timeout=1.5)
        assert waiting.is_alive()
        assert capsys.readouterr().out == "another run is making answers-1; waiting for it\n"
        with published(folder) as temporary:
            (temporary / "train.jsonl").write_text("x")
    waiting.join(timeout=20)
    assert found == [True]


def test_the_lock_is_given_back_when_making_the_folder_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError), building(tmp_path / "answers-1"):
        raise OSError("disk full")
    with building(tmp_path / "answers-1"):
        pass


def test_a_folder_is_complete_only_with_a_manifest_and_files_of_the_recorded_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "features-1"
    assert read_data_manifest(folder) is None
    _features(folder, per_shard=2)
    assert read_data_manifest(folder) is not None
    shard = folder / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert read_data_manifest(folder) is None
    shard.unlink()
    assert read_data_manifest(folder) is None
    shard.write_bytes(content)
    assert read_data_manifest(folder) is not None
    (folder / "manifest.json").write_text('{"files": ')
    assert read_data_manifest(folder) is None


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "train.jsonl"])
def test_a_file_of_the_right_size_with_one_changed_byte_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "all"
    with published(folder) as temporary:
        writer = ShardWriter(temporary, 1)
        for _ in range(2):
            writer.add(torch.randn(3, 4))
        write_samples(temporary / "train.jsonl", [make_sample("a", [7, 8], [9])])
        write_data_manifest(temporary, {"places": writer.places})
    manifest = read_data_manifest(folder)
    assert manifest is not None
    check_files(folder, manifest)

    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    assert read_data_manifest(folder) == manifest  # sizes alone do not tell
    with pytest.raises(DataError) as caught:
        check_files(folder, manifest)
    assert str(caught.value).startswith(f"{folder / name}: is missing or damaged. Rebuild it")

    # With the guard off the damage would be read.
    monkeypatch.setattr(data, "sha256_file", lambda path: manifest["files"][path.name]["sha256"])
    check_files(folder, manifest)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "features-1"
    _features(folder, per_shard=2)
    manifest = read_data_manifest(folder)
    assert manifest is not None
    (folder / "shard-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"shard-00002\.safetensors: is missing or damaged"):
        check_files(folder, manifest)


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    samples = [
        make_sample("wiki/1", [5, 6, 7], [8, 9]),
        make_sample("prompt only", [5, 6], []),
        Sample(id="two answers \u00e9\n", input_ids=[1, 2, 3, 4, 5], loss_mask=[True, False, True, True, False]),
        Sample(id="all", input_ids=[1, 2], loss_mask=[True, True]),
    ]
    path = tmp_path / "train.jsonl"
    write_samples(path, samples)
    assert read_samples(path) == samples
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"id": "wiki/1", "input_ids": [5, 6, 7, 8, 9], "supervised": [[3, 5]]}
    assert json.loads(lines[2])["supervised"] == [[0, 1], [2, 4]]


@pytest.mark.parametrize(("per_shard", "num_shards"), [(1, 5), (2, 3), (5, 1), (64, 1)])
def test_features_come_back_from_whichever_shard_they_are_in(tmp_path: Path, per_shard: int, num_shards: int) -> None:
    folder = tmp_path / "features-1"
    made = _features(folder, per_shard)
    assert len(list(folder.glob("*.safetensors"))) == num_shards
    shards = _open(folder)
    for index in (4, 0, 2, 1, 3, 0):
        assert torch.equal(shards(index), made[index])


def test_features_keep_their_dtype(tmp_path: Path) -> None:
    folder = tmp_path / "features-1"
    made = _features(folder, 2, torch.bfloat16)
    shards = _open(folder)
    assert shards(3).dtype == torch.bfloat16
    assert torch.equal(shards(3), made[3])
