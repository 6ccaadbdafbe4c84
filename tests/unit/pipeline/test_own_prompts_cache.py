"""`source: target` through the cache stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import cache
from pipeline.data import read_samples
from pipeline.inputs import local_sources
from pipeline.runs import read_manifest
from tests.tiny import EOS_ID
from tests.tiny_run import TinyRun
from tests.unit.pipeline.test_own_prompts import TOKENIZER, writing_model

OWN = ('data.train=[{"source": "target", "count": 8}]', "data.held_out=4")


def test_a_run_whose_target_writes_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written and answered by one model, loaded once; a run that only learns faster finds prompts and answers."""
    loads: list[Any] = []

    def load(*_: Any) -> Any:
        loads.append(writing_model(4))
        return loads[-1]

    monkeypatch.setattr(cache, "load_target", load)
    monkeypatch.setattr(cache, "compile_once", lambda *_: {})  # takes longer than all the rest
    bench = TinyRun.make(tmp_path)
    bench.use(monkeypatch)
    run = bench.go(*OWN, stages=("cache",))
    manifest = read_manifest(run.manifest_path("cache"))
    assert manifest is not None and manifest["own_prompts"]["kept"] == 12 and len(loads) == 1
    samples = read_samples(Path(manifest["answers"]["folder"]) / "train.jsonl")
    assert len(samples) == 8 and all(sample.id.startswith("target/") for sample in samples)
    assert all(any(sample.loss_mask) for sample in samples)
    assert EOS_ID in samples[0].input_ids and TOKENIZER.decode(samples[0].input_ids).count("<|im_start|>user") == 1

    again = bench.go(*OWN, "train.learning_rate=1.0e-3", stages=("cache",))
    other = read_manifest(again.manifest_path("cache"))
    assert other is not None and len(loads) == 1
    assert (other["own_prompts"], other["answers"]) == (manifest["own_prompts"], manifest["answers"])


def test_the_targets_own_prompts_are_no_path_to_mount(tmp_path: Path) -> None:
    bench = TinyRun.make(tmp_path)
    assert local_sources(bench.config(*OWN)) == sorted([str(bench.target), str(tmp_path / "other.jsonl")])
