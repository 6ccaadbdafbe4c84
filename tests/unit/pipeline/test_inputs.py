"""A run is not taken for finished when a file it was made from has other content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.inputs import check_inputs, input_files
from pipeline.runs import Run, discard_run, is_new, latest_run, open_run
from tests.tiny_run import tiny_config


def made_of(path: Path, tmp_path: Path) -> Run:
    config = tiny_config(data={"train": [{"source": str(path), "count": 1}]})
    run = open_run(config, tmp_path / "runs", {})
    run.manifest_path("cache").write_text(json.dumps({"finished": "then", "inputs": input_files(config)}))
    return run


def test_a_prompts_file_that_changed_or_went_is_named_and_an_unchanged_one_passes(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    run = made_of(path, tmp_path)
    check_inputs(run)
    path.write_text('{"prompt": "Hello"}\n')
    with pytest.raises(DataError, match=r"train\.jsonl: has changed since .* read it"):
        check_inputs(run)
    path.unlink()
    with pytest.raises(DataError, match="is gone since"):
        check_inputs(run)


def test_a_run_that_never_began_goes_and_latest_names_the_one_before(tmp_path: Path) -> None:
    first = open_run(tiny_config(train={"steps": 3}), tmp_path, {})
    before = latest_run(tmp_path)
    second = open_run(tiny_config(train={"steps": 4}), tmp_path, {})
    assert latest_run(tmp_path) == second.id and is_new(second)
    discard_run(second, before)
    assert latest_run(tmp_path) == first.id
    assert not second.folder.exists() and first.folder.exists()
