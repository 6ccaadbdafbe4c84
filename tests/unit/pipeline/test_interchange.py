"""`python -m pipeline export`, `import` and `serve-command`: folders and runs in, folders and lines out, exit codes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint import load_drafter, save_drafter
from pipeline.__main__ import main
from pipeline.config import load_config
from pipeline.runs import open_run
from tests.drafters import random_drafter
from tests.foreign_drafters import MIXED, body, own_head, speculators_config, write, zlab_config
from tests.tiny import tiny_model, tiny_target

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a drafter of ours and its target; runs and cache are in it too, and it is the current one."""
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny_target(tmp_path)
    drafter = random_drafter(target_layer_ids=(0, 2))
    save_drafter(tmp_path / "ours", drafter.config, drafter.state_dict(), torch.bfloat16)
    return tmp_path


def _run(place: Path) -> str:
    """Make a finished run's folder with a drafter in it, and return its id."""
    config = load_config(QUICKSTART, [f"target.source={place / 'target-qwen3'}"])
    run = open_run(config, place / "runs", {})
    drafter = random_drafter(target_layer_ids=(0, 2), block_size=8)
    save_drafter(run.drafter_dir, drafter.config, drafter.state_dict(), torch.float32)
    return run.id


def test_a_folder_goes_to_speculators_and_comes_back_equal(place: Path, capsys: Capture) -> None:
    assert main(["export", "ours", "--to", "speculators", "--out", "theirs", "--target", "target-qwen3"]) == 0
    out = capsys.readouterr().out
    assert "ours: z-lab drafter, 2 layers, block of 4, taps 0, 2 of 4, mask token 3, bfloat16" in out
    assert "written to theirs in the format of speculators" in out
    data = json.loads((place / "theirs" / "config.json").read_text())
    assert data["speculators_config"]["verifier"]["name_or_path"] == str(place / "target-qwen3")
    assert main(["import", "theirs", "--out", "back"]) == 0
    out = capsys.readouterr().out
    assert "theirs: speculators drafter" in out and "train.init_from=back" in out
    first, last = load_drafter(place / "ours"), load_drafter(place / "back")
    assert first.config == last.config
    assert all(torch.equal(last.state_dict()[name], tensor) for name, tensor in first.state_dict().items())


def test_a_run_is_exported_with_its_own_target(place: Path) -> None:
    run = _run(place)
    assert main(["export", run, "--to", "speculators", "--out", "a"]) == 0
    assert main(["export", "runs/latest", "--to", "zlab", "--out", "b"]) == 0
    table = tiny_model().get_input_embeddings().weight
    assert torch.equal(load_file(place / "a" / "model.safetensors")["embed_tokens.weight"], table)
    note = json.loads((place / "b" / "interchange.json").read_text())
    assert (note["by"], note["target"]) == ("invoke export", str(place / "target-qwen3"))


def test_a_file_of_another_project_is_imported_and_says_what_was_read(place: Path, capsys: Capture) -> None:
    write(place / "theirs", zlab_config(**MIXED), body())
    assert main(["import", "theirs", "--out", "in", "--reading", "automodel", "--target", "target-qwen3"]) == 0
    out, err = capsys.readouterr()
    assert "note: the file does not say how a block sees itself; as automodel reads it: all layers bidirectional" in err
    assert "written to in; go on with it by train.init_from=in" in out
    assert load_drafter(place / "in").config.is_causal is False
    note = json.loads((place / "in" / "interchange.json").read_text())
    assert (note["format"], note["reading"]) == ("z-lab", "automodel")


def test_a_reduced_head_is_said_loudly_and_comes_back_on_export(place: Path, capsys: Capture) -> None:
    tensors = body() | own_head(tiny_model().get_input_embeddings().weight)
    write(place / "theirs", speculators_config(), tensors)
    assert main(["import", "theirs", "--out", "in", "--target", "target-qwen3"]) == 0
    assert "note: ITS OWN HEAD OF 40 OF 320 WORDS IS NOT USED HERE" in capsys.readouterr().err
    assert main(["export", "in", "--to", "speculators", "--out", "back"]) == 0
    assert "with the embedding and head of the file it was imported from" in capsys.readouterr().out
    found = load_file(place / "back" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert json.loads((place / "back" / "config.json").read_text()) == speculators_config()


def test_weights_alone_are_imported_with_a_config_file(place: Path) -> None:
    torch.save(body(), place / "draft.pt")
    (place / "c.json").write_text(json.dumps({k: v for k, v in zlab_config().items() if k != "head_dim"}))
    assert main(["import", "draft.pt", "--out", "in", "--config", "c.json"]) == 0
    assert load_drafter(place / "in").config.head_dim == 16


@pytest.mark.parametrize(
    ("engine", "count"), [("vllm", '"num_speculative_tokens": 7'), ("sglang", "--speculative-num-draft-tokens 8")]
)
def test_the_serving_command_of_a_run_names_target_and_drafter(
    place: Path, capsys: Capture, engine: str, count: str
) -> None:
    run = _run(place)
    assert main(["serve-command", run, "--engine", engine]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert count in out
    words = " ".join(shlex.split(out))
    assert str(place / "target-qwen3") in words and str(place / "runs" / run / "drafter") in words


def test_an_exported_folder_remembers_its_target_and_another_one_is_asked(place: Path, capsys: Capture) -> None:
    assert main(["serve-command", "ours"]) == 2
    assert capsys.readouterr().err == "ours: nothing here says what its target is. Name it with --target.\n"
    assert main(["serve-command", "ours", "--target", f"Qwen/Qwen3-8B@{'a' * 40}"]) == 0
    assert capsys.readouterr().out.endswith(f"--revision {'a' * 40}\n")
    assert main(["export", "ours", "--to", "zlab", "--out", "out", "--target", "target-qwen3"]) == 0
    capsys.readouterr()
    assert main(["serve-command", "out"]) == 0
    assert str(place / "target-qwen3") in capsys.readouterr().out


def test_what_an_engine_would_run_otherwise_is_refused_or_said(place: Path, capsys: Capture) -> None:
    shape = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "target_layer_ids": (0, 2)}
    settings: dict[str, dict[str, Any]] = {
        "both": shape | {"is_causal": False},
        "anchor": shape | {"is_causal": None, "window_reading": "anchor"},
    }
    for name, changes in settings.items():
        drafter = random_drafter(**changes)
        save_drafter(place / name, drafter.config, drafter.state_dict(), torch.float32)
    assert main(["serve-command", "both", "--engine", "sglang", "--target", "target-qwen3"]) == 2
    assert "layer 0 slides and is bidirectional" in capsys.readouterr().err
    assert main(["serve-command", "anchor", "--target", "target-qwen3"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("note: the window of 8 hangs on the anchor")
    assert out.startswith("vllm serve")
    assert main(["export", "anchor", "--to", "zlab", "--out", "out"]) == 0
    assert "note: its window hangs on the anchor, which this format cannot say" in capsys.readouterr().err


def test_a_folder_of_speculators_is_served_by_vllm_and_exported_for_sglang(place: Path, capsys: Capture) -> None:
    tensors = body() | own_head(tiny_model().get_input_embeddings().weight)
    write(place / "theirs", speculators_config(), tensors)
    assert main(["serve-command", "theirs", "--target", "target-qwen3"]) == 0
    assert main(["serve-command", "theirs", "--target", "target-qwen3", "--engine", "sglang"]) == 2
    assert "cannot read speculators' format" in capsys.readouterr().err
    assert main(["export", "theirs", "--to", "zlab", "--out", "x", "--target", "target-qwen3"]) == 0
    assert main(["serve-command", "x", "--engine", "sglang"]) == 0


def test_a_target_of_another_size_is_refused(place: Path, capsys: Capture) -> None:
    """Sizes mixed up by hand gave drafters that could not be served (anatomy 6.12, SpecForge#560)."""
    tiny_model(num_hidden_layers=6).save_pretrained(place / "deeper")
    assert main(["export", "ours", "--to", "speculators", "--out", "x", "--target", "deeper"]) == 2
    assert "--target: has 6 layers, the drafter's has 4. Name the true one." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["export", "ours", "--to", "gguf", "--out", "x"], "--to: 'gguf' is no format. One of zlab, speculators."),
        (["export", "ours", "--to", "speculators", "--out", "x"], "--to speculators: needs the target's embedding"),
        (["export", "ours", "--to", "zlab", "--out", "ours"], "ours: is the folder that is read."),
        (["export", "ours", "--to", "zlab", "--out", "target-qwen3"], "target-qwen3: is not empty and not an earlier"),
        (["export", "nowhere", "--to", "zlab", "--out", "x"], "nowhere: no such run"),
        (["export", "ours", "--to", "speculators", "--out", "x", "--target", "no/such"], "needs @ and the commit"),
        (["import", "nowhere", "--out", "x"], "nowhere: no such folder"),
        (["import", "target-qwen3", "--out", "x"], "architecture Qwen3ForCausalLM is not a DFlash drafter"),
        (["import", "ours", "--out", "x", "--reading", "mine"], "--reading: 'mine' is no reading"),
        (["import", "ours", "--out", "x", "--config", "gone.json"], "gone.json: cannot be read"),
        (["serve-command", "ours", "--target", "t", "--engine", "tgi"], "--engine: 'tgi' is no engine"),
        (["serve-command", "ours", "--target", "./gone"], "'./gone' is no named target and no folder here"),
    ],
)
def test_bad_input_is_exit_2_one_line_and_writes_nothing(
    place: Path, capsys: Capture, arguments: list[str], line: str
) -> None:
    before = sorted(place.rglob("*"))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err and err.count("\n") == 1
    assert sorted(path for path in place.rglob("*") if "cache" not in path.parts) == before


def test_an_earlier_export_is_replaced_and_a_failing_one_keeps_it(place: Path) -> None:
    arguments = ["--to", "zlab", "--out", "out"]
    assert main(["export", "ours", *arguments]) == 0
    first = load_file(place / "out" / "model.safetensors")
    broken = {name: t for name, t in body().items() if name != "norm.weight"}
    write(place / "broken", zlab_config(), broken)
    assert main(["export", "broken", *arguments]) == 2
    assert load_file(place / "out" / "model.safetensors").keys() == first.keys()
    write(place / "other", zlab_config(), body(seed=5))
    assert main(["export", "other", *arguments]) == 0
    assert torch.equal(load_file(place / "out" / "model.safetensors")["fc.weight"], body(seed=5)["fc.weight"])


def test_shards_of_a_large_target_are_enough_for_an_export(place: Path) -> None:
    folder = place / "target-qwen3"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
        places[name] = f"model-{number}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert main(["export", "ours", "--to", "speculators", "--out", "x", "--target", "target-qwen3"]) == 0
    found = load_file(place / "x" / "model.safetensors")
    assert torch.equal(found["embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], tensors["model.embed_tokens.weight"])  # a tied head
