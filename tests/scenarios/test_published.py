"""A drafter that another project wrote: imported, trained on, verified, exported and imported again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash.checkpoint import load_drafter, read_config
from dflash.config import DrafterConfig
from pipeline.__main__ import main
from pipeline.cache import load_cached
from pipeline.drafter import drafter_config
from pipeline.errors import ConfigError, DataError
from pipeline.inputs import check_inputs
from pipeline.metrics import read
from pipeline.runs import Run
from pipeline.targets import load_target, resolve_target
from tests import foreign_drafters as foreign
from tests.scenarios.conftest import MakeBench
from tests.tiny import tiny_target
from tests.tiny_run import TinyRun, write_prompts

TRAINED = ("cache", "train")
LEARNING = ("train.steps=24", "train.learning_rate=0.01")
"""Of this file's target a drafter gets most tokens right after them."""
GAIN = "verify.min_tau_gain=0.25"
NO_SHAPE = ("drafter.num_layers=2", "drafter.target_layer_ids=[1, 3]")
"""The bench's configuration describes another drafter; with these it says what foreign_drafters.py makes."""


@pytest.fixture(scope="module")
def shared_bench(make_bench: MakeBench) -> TinyRun:
    """One whose target can be learned, on prompts of one kind, so that a drafter passes the gates on what it gained.

    Of the usual target's next token nothing is learned in so few steps: an untrained drafter that guesses one token of
    44 by chance beats the trained one.
    """
    made = make_bench()
    tiny_target(made.folder, initializer_range=0.05)
    write_prompts(made.folder / "other.jsonl", (f"Tell me about {i}." for i in range(40, 50)))
    return made


def _target(bench: TinyRun) -> Any:
    folder = resolve_target(bench.config().target, bench.folder / "m", bench.folder / "p")
    return load_target(folder, torch.float32, "cpu")


def _imported(bench: TinyRun, source: Path, out: Path, *options: str) -> Path:
    assert main(["import", str(source), "--out", str(out), "--target", str(bench.target), *options]) == 0
    return out


def _zlab(bench: TinyRun, folder: Path) -> Path:
    return foreign.write(folder, foreign.zlab_config(**foreign.MIXED), foreign.body(torch.bfloat16))


def _speculators(bench: TinyRun, folder: Path) -> Path:
    embedding = _target(bench).get_input_embeddings().weight
    config = foreign.speculators_config(aux_hidden_state_layer_ids=[2, 3])  # the last layer has no tap there
    return foreign.write(folder, config, foreign.body() | foreign.own_head(embedding))


@pytest.mark.parametrize("make", [_zlab, _speculators])
def test_a_foreign_drafter_is_trained_on_verified_and_exported_again(bench: TinyRun, tmp_path: Path, make: Any) -> None:
    theirs = _imported(bench, make(bench, tmp_path / "theirs"), tmp_path / "imported")
    start = load_drafter(theirs)
    taps = f"drafter.target_layer_ids={list(start.config.target_layer_ids)}"
    run: Run = bench.go(f"train.init_from={theirs}", *NO_SHAPE, taps, *LEARNING, GAIN)
    losses = [record["loss"] for record in read(run.metrics_path)]
    assert losses[-1] < losses[0]

    trained = load_drafter(run.drafter_dir)
    assert {**vars(trained.config), "dtype": ""} == {**vars(start.config), "dtype": ""}
    moved = [
        not torch.equal(a.float(), b.float()) for a, b in zip(trained.parameters(), start.parameters(), strict=True)
    ]
    assert all(moved)

    out = tmp_path / "out"
    to = "zlab" if make is _zlab else "speculators"
    assert main(["export", str(run.folder), "--to", to, "--out", str(out)]) == 0
    names = set(load_file(out / "model.safetensors"))
    assert names >= set(foreign.body())
    again = _imported(bench, out, tmp_path / "again")
    assert read_config(again) == trained.config
    expected, found = load_file(run.drafter_dir / "model.safetensors"), load_file(again / "model.safetensors")
    assert expected.keys() == found.keys() and all(torch.equal(t, found[name]) for name, t in expected.items())


def _config(bench: TinyRun, *overrides: str) -> DrafterConfig:
    config = bench.config(*overrides)
    return drafter_config(config, resolve_target(config.target, bench.folder / "m", bench.folder / "p"))


def test_the_file_decides_the_shape_and_every_disagreement_is_named(bench: TinyRun, tmp_path: Path) -> None:
    theirs = _imported(bench, _zlab(bench, tmp_path / "theirs"), tmp_path / "imported")
    start = f"train.init_from={theirs}"
    found = _config(bench, start, *NO_SHAPE)
    assert found == read_config(theirs)
    assert (found.rope_theta, found.layer_types[0], found.is_causal) == (1e6, "sliding_attention", None)
    with pytest.raises(ConfigError) as caught:
        _config(bench, start, "drafter.num_layers=3", "drafter.sliding_window=9", "drafter.target_layer_ids=[1, 3]")
    assert str(caught.value) == (
        f"train.init_from: {theirs}: has num_hidden_layers 2, this run 3; has sliding_window 8, this run 9. "
        "Change the run's drafter section."
    )
    with pytest.raises(ConfigError, match=r"has mask_token_id 300, this run 301"):
        _config(bench, start, *NO_SHAPE, "drafter.mask_token_id=301")


def test_a_drafter_of_another_target_is_refused(bench: TinyRun, tmp_path: Path) -> None:
    config = foreign.zlab_config(vocab_size=400)
    other = foreign.write(tmp_path / "other", config, foreign.body())
    with pytest.raises(ConfigError, match=r"has vocab_size 400, the target 320\. A drafter goes with"):
        _config(bench, f"train.init_from={other}", *NO_SHAPE)


def test_a_start_that_changed_since_the_cache_stage_is_refused(bench: TinyRun, tmp_path: Path) -> None:
    theirs = foreign.write(tmp_path / "theirs", foreign.zlab_config(), foreign.body())
    overrides = (f"train.init_from={theirs}", *NO_SHAPE, "train.steps=2")
    bench.go(*overrides, stages=("cache",))
    foreign.write(theirs, foreign.zlab_config(), foreign.body(seed=1))
    with pytest.raises(DataError, match="has changed since") as caught:
        check_inputs(bench.run(*overrides))
    assert f"{theirs}/model.safetensors" in str(caught.value)


CHANGES = {
    "train.loss=dpace": 'train.loss was "decay" when step-000002 was saved, the config gives "dpace"',
    "train.num_anchors=7": "train.num_anchors was 8 when step-000002 was saved, the config gives 7",
    "train.soft_weight=0.5": "train.soft_weight was 0.0 when step-000002 was saved, the config gives 0.5",
    "data.samples_per_row=2": "samples_per_row was 1 when step-000002 was saved, the config gives 2",
    "drafter.block_size=5": "block_size was 4 when step-000002 was saved, the config gives 5",
    "drafter.target_layer_ids=[0, 3]": "target_layer_ids was [0, 2] when step-000002 was saved, the config gives [0",
    "drafter.is_causal=true": "causal was false when step-000002 was saved, the config gives true",
}


def test_a_resume_refuses_what_changes_the_meaning_of_its_weights_and_names_both_values(bench: TinyRun) -> None:
    """Anatomy 2.10 and 6.23 (Automodel#2824: another mask id after a resume)."""
    base = ("train.steps=2", "topology.drafters=[cpu]")
    begun = bench.go(*base, stages=("cache", "train"))
    written = {token for sample in load_cached(begun).samples for token in sample.input_ids}
    unused = next(token for token in range(301, 320) if token not in written)
    mask = {f"drafter.mask_token_id={unused}": "mask_token_id was 300 when step-000002 was saved, the config gives 3"}
    for change, line in (CHANGES | mask).items():
        other = bench.go(*base, change, stages=("cache",))
        # A person who edits the YAML and keeps the checkpoints.
        shutil.copytree(begun.checkpoints_dir, other.checkpoints_dir, dirs_exist_ok=True)
        with pytest.raises(ConfigError) as caught:
            bench.go(*base, change, stages=("train",))
        assert line in str(caught.value), str(caught.value)


@pytest.mark.parametrize("head", ["dflash2", "markov"])
def test_a_head_is_trained_verified_exported_and_taken_up_again(
    bench: TinyRun, tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Added to a plain published drafter, which it leaves as it is at the start."""
    theirs = foreign.write(tmp_path / "theirs", foreign.zlab_config(), foreign.body())
    settings = (f"train.init_from={theirs}", *NO_SHAPE, f"drafter.head={head}", "drafter.head_rank=8", *LEARNING)
    run = bench.go(*settings, GAIN, "train.evaluate_every=12")
    manifest = json.loads(run.manifest_path("train").read_text())
    plain = bench.go(f"train.init_from={theirs}", *NO_SHAPE, "train.steps=1", stages=TRAINED)
    at_start = [json.loads(r.manifest_path("train").read_text())["sessions"][0]["tau_at_start"] for r in (run, plain)]
    assert at_start[0] == at_start[1] and manifest["compiles_after_warmup"] == 0
    drafter = load_drafter(run.drafter_dir)
    name = "candidate_selector.successor_codebook" if head == "dflash2" else "markov_head.markov_w2.weight"
    assert drafter.state_dict()[name].any()  # it began at zero

    out, again = tmp_path / "out", tmp_path / "again"
    assert main(["export", str(run.folder), "--to", "zlab", "--out", str(out)]) == 0
    assert main(["import", str(out), "--out", str(again)]) == 0
    assert read_config(again) == drafter.config
    kind = json.loads((out / "config.json").read_text())["architectures"]
    assert kind == ["DFlash2DraftModel" if head == "dflash2" else "DFlashDraftModel"]
    capsys.readouterr()
    assert main(["serve-command", str(run.folder)]) == 0
    assert ("DFlash2DraftModel" if head == "dflash2" else "no engine") in capsys.readouterr().err
    assert main(["export", str(run.folder), "--to", "speculators", "--out", str(tmp_path / "s")]) == 2
    assert "holds no drafter with" in capsys.readouterr().err
    assert main(["generate", "--run", str(run.folder), "--prompt", "Tell me about 3.", "--max-new-tokens", "6"]) == 0
    with pytest.raises(ConfigError, match=f"has head {head}, this run plain"):
        _config(bench, f"train.init_from={again}", *NO_SHAPE, "drafter.head=plain")
