"""Checkpoints are complete or not there. The kill during a save is in tests/scenarios/test_killed_save.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import checkpoints
from pipeline.checkpoints import (
    check_contract,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from pipeline.errors import ConfigError, DataError


def _save(root: Path, step: int, value: float | None = None) -> Path:
    filled = torch.full((3, 2), float(step) if value is None else value)
    return save_checkpoint(
        root, step, {"weights": {"w": filled}, "optimizer": {"w.exp_avg": filled * 2}}, {"step": step}
    )


def _latest(root: Path) -> tuple[str | None, list[str]]:
    lines: list[str] = []
    path = latest_checkpoint(root, lines.append)
    return (path.name if path else None), lines


def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    tensors = {
        "weights": {"w": torch.randn(4, 3), "b": torch.randn(2).to(torch.bfloat16)},
        "optimizer": {"step": torch.tensor(7)},
    }
    path = save_checkpoint(tmp_path, 500, tensors, {"epoch": 2, "seen": [1, 2]})
    assert path == tmp_path / "step-000500"
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state) == (500, {"epoch": 2, "seen": [1, 2]})
    assert loaded.tensors.keys() == tensors.keys()
    for stem, named in tensors.items():
        for name, tensor in named.items():
            assert loaded.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[stem][name], tensor)


def test_the_marker_lists_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    marker = json.loads((path / "COMPLETE").read_text())
    assert sorted(marker["files"]) == ["optimizer.safetensors", "state.json", "weights.safetensors"]
    assert marker["files"]["weights.safetensors"]["bytes"] == (path / "weights.safetensors").stat().st_size


def test_views_of_one_buffer_and_transposed_tensors_can_be_saved(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"a": flat[:6].view(2, 3), "b": flat[6:].view(2, 3), "t": torch.arange(6.0).view(2, 3).T}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"weights": tensors}, {}))
    assert all(torch.equal(loaded.tensors["weights"][name], tensor) for name, tensor in tensors.items())


def test_the_newest_step_is_taken_by_number(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 500):
        _save(tmp_path, step)
    assert _latest(tmp_path) == ("step-1000000", [])


def test_no_checkpoints_is_none(tmp_path: Path) -> None:
    assert _latest(tmp_path / "nowhere") == (None, [])
    assert _latest(tmp_path) == (None, [])


def test_a_folder_without_the_marker_is_passed_over_in_one_line(tmp_path: Path) -> None:
    _save(tmp_path, 400)
    (_save(tmp_path, 500) / "COMPLETE").unlink()
    name, lines = _latest(tmp_path)
    assert name == "step-000400"
    assert lines == ["step-000500 is incomplete (no COMPLETE marker). Resuming from step-000400."]


def test_one_byte_cut_off_a_weight_file_is_caught(tmp_path: Path) -> None:
    """speculators PR 739, SpecForge PR 659, torchtitan PR 315, returnn#1444 (bug-reports 45)."""
    _save(tmp_path, 400)
    weights = _save(tmp_path, 500) / "weights.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    name, lines = _latest(tmp_path)
    assert name == "step-000400"
    expected = f"step-000500 is damaged (weights.safetensors has {size - 1} bytes instead of {size})."
    assert lines == [f"{expected} Resuming from step-000400."]
    with pytest.raises(DataError, match="is damaged"):
        load_checkpoint(weights.parent)


def test_one_changed_byte_is_caught_by_the_checksum_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 400)
    weights = _save(tmp_path, 500) / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    name, lines = _latest(tmp_path)
    assert name == "step-000400"
    assert lines == [
        "step-000500 is damaged (weights.safetensors does not match its checksum). Resuming from step-000400."
    ]

    # With the guard off the damaged weights would be taken.
    digests = json.loads((weights.parent / "COMPLETE").read_text())["files"]
    monkeypatch.setattr(checkpoints, "sha256_file", lambda path: digests[path.name]["sha256"])
    assert _latest(tmp_path) == ("step-000500", [])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "COMPLETE cannot be read"),
        ("[]", "COMPLETE cannot be read"),
        ('{"step": 500}', "COMPLETE cannot be read"),
        ('{"step": 7, "files": {}}', "COMPLETE is that of step 7"),
        ('{"step": 500, "files": {}}', "COMPLETE does not list state.json"),
    ],
)
def test_a_marker_that_says_nothing_useful_is_not_trusted(tmp_path: Path, content: str, fault: str) -> None:
    (_save(tmp_path, 500) / "COMPLETE").write_text(content)
    name, lines = _latest(tmp_path)
    assert name is None
    assert lines == [f"step-000500 is damaged ({fault}). No other is left; starting from step 0."]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    _save(tmp_path, 500, 1.0)
    path = _save(tmp_path, 500, 2.0)
    assert load_checkpoint(path).tensors["weights"]["w"][0, 0] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-000500"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    _save(tmp_path, 500, 1.0).rename(tmp_path / ".replaced-step-000500")
    name, _ = _latest(tmp_path)
    assert name == "step-000500"
    assert load_checkpoint(tmp_path / "step-000500").tensors["weights"]["w"][0, 0] == 1.0


def test_a_save_that_fails_leaves_nothing_and_keeps_the_others(tmp_path: Path) -> None:
    _save(tmp_path, 400)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 500, {"weights": {"w": torch.ones(2)}}, {"not JSON": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000400"]


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise checkpoints.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        _save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_newest_and_removes_leftovers_of_dead_saves(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        _save(tmp_path, step)
    (tmp_path / ".tmp-step-000400-ab12cd34").mkdir()
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000200", "step-000300"]


def test_pruning_never_counts_an_incomplete_checkpoint_as_one_kept(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        _save(tmp_path, step)
    (tmp_path / "step-000300" / "COMPLETE").unlink()
    prune_checkpoints(tmp_path, keep=0)
    assert _latest(tmp_path)[0] == "step-000200"
    assert not (tmp_path / "step-000100").exists()


def test_the_contract_names_the_first_key_that_differs() -> None:
    saved = {"seed": 0, "drafter": {"block_size": 4, "target_layer_ids": [1, 2]}}
    current = {"seed": 0, "drafter": {"block_size": 8, "target_layer_ids": [1, 2]}}
    with pytest.raises(ConfigError) as caught:
        check_contract(saved, current, "step-000100")
    assert str(caught.value) == (
        "drafter.block_size was 4 when step-000100 was saved, the config gives 8. Use a new run name or the old value."
    )


def test_the_contract_notices_keys_that_came_or_went() -> None:
    with pytest.raises(ConfigError, match=r"a\.c was not there when x was saved, the config gives 1"):
        check_contract({"a": {"b": 0}}, {"a": {"b": 0, "c": 1}}, "x")
    with pytest.raises(ConfigError, match=r"a was null when x was saved, the config does not have it"):
        check_contract({"a": None}, {}, "x")


def test_the_contract_holds_across_the_json_it_was_saved_in() -> None:
    current: dict[str, object] = {"betas": (0.9, 0.95), "empty": {}, "layers": None}
    check_contract(json.loads(json.dumps(current)), current, "x")
