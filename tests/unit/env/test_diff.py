"""Two runs of which one thing differs at a time; the texts are those that a person reads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from env.diff import GROUPS, compare, main, read_run

COMMIT, OTHER_COMMIT = "406ce70c4c8db6be2bb8c7dff9a26e97c9714855", "d3419210b1f1b0b6f7b7a1c1f6c1f3a2e7d54c11"
HASHES = [letter * 64 for letter in "abcdef"]
DEVICE = {"name": "NVIDIA H200", "capability": "9.0", "memory_mib": "143771"}

FINGERPRINT: dict[str, Any] = {
    "git": {"commit": COMMIT, "dirty": False},
    "image": {
        "commit": COMMIT,
        "dirty": False,
        "tag": "dflash:0f3c9a1b",
        "lock_sha256": HASHES[0],
        "base": f"sha256:{HASHES[1]}",
        "torch": "2.11.0",
    },
    "source_sha256": HASHES[2],
    "lock_sha256": {"dev.txt": HASHES[3], "runtime.txt": HASHES[0]},
    "python": "3.11.7",
    "platform": "Linux-6.8.0-52-generic-x86_64-with-glibc2.36",
    "cpu": {"model": "AMD EPYC 9554", "count": 128, "usable": 16},
    "memory_bytes": 25276063744,
    "packages": {"nvidia-cudnn-cu13": "9.19.0.56", "numpy": "2.4.6", "torch": "2.11.0", "triton": "3.6.0"},
    "gpus": {"driver": "580.65.06", "devices": [DEVICE]},
    "variables": {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "8"},
}
CONFIG: dict[str, Any] = {
    "name": "mine",
    "seed": 0,
    "target": {"source": "smollm2-135m-instruct", "revision": None, "dtype": "float32"},
    "data": {"train": [{"source": "wiki", "count": 200}], "buckets": [128], "features": "cached"},
    "train": {"steps": 500, "learning_rate": 0.003},
    "topology": {"targets": ["cpu"], "drafters": ["cpu", "cpu"]},
}
CACHE: dict[str, Any] = {
    "inputs": {"mine.jsonl": HASHES[4]},
    "target": {"name": "smollm2-135m-instruct", "identity": HASHES[5]},
    "answers": {"folder": "somewhere/data/answers-0123456789ab", "num_samples": 200, "num_tokens": 15000},
    "features": {"mode": "cached", "folder": "somewhere/data/features-0123456789ab", "layer_ids": [2, 8, 15, 21, 27]},
    "compile": {"folder": "somewhere/compile/1a2b", "graphs": 4},
    "finished": "2026-01-02 03:04:05 UTC",
    "seconds": 151.3,
}
FILES = {"fingerprint.json": FINGERPRINT, "config.yaml": CONFIG, "cache.json": CACHE}


def write_run(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        text = yaml.safe_dump(content, sort_keys=False) if name == "config.yaml" else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def changed(*changes: tuple[str, str, Any]) -> dict[str, Any]:
    """Return FILES with (file, dotted place, new value) put in; a place that ends in "-" is removed."""
    files = copy.deepcopy(FILES)
    for name, place, value in changes:
        node: Any = files[name]
        *parents, last = place.split("/")
        for part in parents:
            node = node[int(part) if isinstance(node, list) else part]
        if last.endswith("-"):
            del node[last[:-1]]
        else:
            node[last] = value
    return files


@pytest.fixture
def lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return lines(files): what the command prints about a run of FILES and one of `files`, without its first line."""

    def said(files: dict[str, Any], first: dict[str, Any] = FILES) -> list[str]:
        runs = write_run(tmp_path / "runs/mine-1", first), write_run(tmp_path / "runs/mine-2", files)
        assert main([str(run) for run in runs]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0] == "mine-1 -> mine-2"
        return out[1:]

    return said


F, C, D = "fingerprint.json", "config.yaml", "cache.json"
FACTORS = [
    (F, "source_sha256", "9" * 64, "source: hash of the Python files cccccccccccc -> 999999999999"),
    (F, "git/commit", OTHER_COMMIT, "source: commit 406ce70c4c8d -> d3419210b1f1"),
    (F, "git/dirty", True, "source: uncommitted changes false -> true"),
    (F, "git", None, "source: repository {commit: 406ce70c4c8d, dirty: false} -> none"),
    (F, "image/commit", OTHER_COMMIT, "image: commit 406ce70c4c8d -> d3419210b1f1"),
    (F, "image/tag", "dflash:77aa", "image: tag dflash:0f3c9a1b -> dflash:77aa"),
    (F, "image/base", f"sha256:{'9' * 64}", "image: base bbbbbbbbbbbb -> 999999999999"),
    (F, "image/torch", "2.15.0", "image: torch 2.11.0 -> 2.15.0"),
    (F, "lock_sha256/runtime.txt", "9" * 64, "lock: lockfiles/runtime.txt aaaaaaaaaaaa -> 999999999999"),
    (F, "lock_sha256/next.txt", "9" * 64, "lock: lockfiles/next.txt not there -> 999999999999"),
    (F, "packages/torch", "2.15.0", "lock: torch 2.11.0 -> 2.15.0"),
    (F, "packages/triton-", None, "lock: triton 3.6.0 -> not installed"),
    (F, "packages/flash-attn", "2.8.1", "lock: flash-attn not installed -> 2.8.1"),
    (F, "python", "3.12.1", "lock: Python 3.11.7 -> 3.12.1"),
    (F, "gpus/driver", "590.1", "gpu: driver 580.65.06 -> 590.1"),
    (
        F,
        "gpus/devices",
        [DEVICE, DEVICE],
        "gpu: GPUs 1 x NVIDIA H200 (9.0, 143771 MiB) -> 2 x NVIDIA H200 (9.0, 143771 MiB)",
    ),
    (
        F,
        "gpus/devices/0/capability",
        "10.0",
        "gpu: GPUs 1 x NVIDIA H200 (9.0, 143771 MiB) -> 1 x NVIDIA H200 (10.0, 143771 MiB)",
    ),
    (
        F,
        "gpus",
        None,
        "gpu: GPUs {driver: 580.65.06, devices: 1 x NVIDIA H200 (9.0, 143771 MiB)} -> none",
    ),
    (F, "platform", "Linux-6.1", "machine: platform Linux-6.8.0-52-generic-x86_64-with-glibc2.36 -> Linux-6.1"),
    (F, "cpu/model", "Xeon", "machine: cpu.model AMD EPYC 9554 -> Xeon"),
    (F, "cpu/usable", 2, "machine: cpu.usable 16 -> 2"),
    (F, "memory_bytes", 25276063745, "machine: memory_bytes 25276063744 -> 25276063745"),
    (F, "variables/CUDA_VISIBLE_DEVICES", "1", "variables: CUDA_VISIBLE_DEVICES 0 -> 1"),
    (F, "variables/TORCH_LOGS", "a\nb", 'variables: TORCH_LOGS unset -> "a\\nb"'),
    (F, "a_later_fact", {"x": 1}, "other: a_later_fact none -> {x: 1}"),
    (C, "seed", 1, "config: seed 0 -> 1"),
    (C, "train/steps", 1000, "config: train.steps 500 -> 1000"),
    (C, "target/revision", "abc", "config: target.revision none -> abc"),
    (C, "data/train/0/count", 300, "config: data.train.0.count 200 -> 300"),
    (C, "data/buckets", [128, 256], "config: data.buckets [128] -> [128, 256]"),
    (C, "train/gamma", 2.5, "config: train.gamma not there -> 2.5"),
    (C, "topology/drafters", ["cpu"], 'config: topology.drafters ["cpu", "cpu"] -> ["cpu"]'),
    (D, "inputs/mine.jsonl", "9" * 64, "data: contents of mine.jsonl eeeeeeeeeeee -> 999999999999"),
    (D, "target/identity", "9" * 64, "target: files of the target ffffffffffff -> 999999999999"),
    (
        D,
        "answers",
        {"folder": "data/answers-99", "num_samples": 9, "num_tokens": 9},
        "data: the target's answers answers-0123456789ab -> answers-99",
    ),
    (D, "answers/num_tokens", 15007, "data: under the same key, num_tokens of the answers 15000 -> 15007"),
    (D, "features/folder", None, "data: features features-0123456789ab -> none"),
]


@pytest.mark.parametrize(("file", "place", "value", "sentence"), FACTORS, ids=[f"{f[0]}:{f[1]}" for f in FACTORS])
def test_one_factor_gives_one_sentence_with_both_values(
    lines: Callable[..., list[str]], file: str, place: str, value: Any, sentence: str
) -> None:
    assert lines(changed((file, place, value))) == [sentence]


def test_equal_runs_have_no_difference(lines: Callable[..., list[str]]) -> None:
    assert lines(FILES) == ["no difference"]


def test_places_times_and_counters_are_no_differences(lines: Callable[..., list[str]]) -> None:
    """Paths are not part of what a run is (vllm PR 47573)."""
    moved = changed(
        (D, "answers/folder", "elsewhere/answers-0123456789ab"),
        (D, "features/folder", "elsewhere/features-0123456789ab"),
        (D, "compile", {"folder": "elsewhere", "graphs": 0}),
        (D, "finished", "2026-02-02 03:04:05 UTC"),
    )
    assert lines(moved) == ["no difference"]


def test_what_is_likeliest_to_move_the_results_comes_first(lines: Callable[..., list[str]]) -> None:
    files = changed(
        (F, "cpu/usable", 2),
        (F, "packages/numpy", "2.5.0"),
        (F, "packages/torch", "2.15.0"),
        (F, "git/commit", OTHER_COMMIT),
        (F, "source_sha256", "9" * 64),
        (F, "gpus/driver", "590.1"),
        (F, "variables/OMP_NUM_THREADS", "2"),
        (D, "target/identity", "9" * 64),
        (C, "name", "yours"),
        (C, "train/steps", 1000),
    )
    found = [line.split(" ")[:2] for line in lines(files)]
    assert found == [
        ["config:", "train.steps"],
        ["config:", "name"],
        ["target:", "files"],
        ["source:", "hash"],
        ["source:", "commit"],
        ["lock:", "torch"],
        ["lock:", "numpy"],
        ["variables:", "OMP_NUM_THREADS"],
        ["gpu:", "driver"],
        ["machine:", "cpu.usable"],
    ]
    assert [group for group in GROUPS if f"{group}:" in {f[0] for f in found}] == list(
        dict.fromkeys(f[0].removesuffix(":") for f in found)
    )


def test_what_the_image_repeats_is_told_once(lines: Callable[..., list[str]]) -> None:
    files = changed(
        (F, "git/commit", OTHER_COMMIT),
        (F, "image/commit", OTHER_COMMIT),
        (F, "packages/torch", "2.15.0"),
        (F, "image/torch", "2.15.0"),
        (F, "lock_sha256/runtime.txt", "9" * 64),
        (F, "image/lock_sha256", "9" * 64),
    )
    assert [line.split(" ")[0] for line in lines(files)] == ["source:", "lock:", "lock:"]


def test_a_run_in_the_image_and_one_outside_differ_in_the_image_only(lines: Callable[..., list[str]]) -> None:
    (line,) = lines(changed((F, "image", None)))
    assert line.startswith("image: description {commit: 406ce70c4c8d, dirty: false, tag: dflash:0f3c9a1b, ")
    assert line.endswith("} -> none")


def test_false_is_not_zero_and_a_word_is_not_a_number(lines: Callable[..., list[str]]) -> None:
    files = changed((C, "seed", False), (C, "train/steps", "500"))
    assert lines(files) == ["config: seed 0 -> false", 'config: train.steps 500 -> "500"']


def test_what_is_not_compared_is_said(tmp_path: Path, lines: Callable[..., list[str]]) -> None:
    fresh = {name: content for name, content in FILES.items() if name != "cache.json"}
    assert lines(fresh) == [
        "no difference",
        "note: mine-2 has not finished its cache stage: data and target are not compared",
    ]
    (tmp_path / "runs/mine-1/fingerprints.jsonl").write_text("{}\n{}\n")
    found = read_run("mine-1", tmp_path / "runs")
    assert found.earlier_starts == 2


def test_earlier_environments_of_a_resumed_run_are_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "mine-1", FILES)
    (run / "fingerprints.jsonl").write_text("{}\n")
    assert main([str(run), str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine-1 -> mine-1",
        "no difference",
        "note: mine-1 was started elsewhere once before (fingerprints.jsonl); the last is compared",
    ]


def test_json_holds_the_whole_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a", FILES), write_run(tmp_path / "b", changed((F, "git/commit", OTHER_COMMIT)))]
    assert main([*map(str, runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "runs": ["a", "b"],
        "differences": [{"group": "source", "what": "commit", "first": COMMIT, "second": OTHER_COMMIT}],
        "notes": [],
    }


@pytest.mark.parametrize("link", [True, False], ids=["link", "text file"])
def test_a_run_is_named_by_folder_by_id_or_as_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], link: bool
) -> None:
    run = write_run(tmp_path / "runs/mine-1", FILES)
    latest = tmp_path / "runs/latest"
    if link:
        latest.symlink_to("mine-1", target_is_directory=True)
    else:
        latest.write_text("mine-1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    for name in (str(run), "mine-1", "latest", "runs/latest", "runs/mine-1/"):
        assert main([name, "mine-1"]) == 0
        assert capsys.readouterr().out == "mine-1 -> mine-1\nno difference\n", name


def test_a_run_that_is_not_there_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path))
    assert main(["latest", "latest"]) == 2
    fault = "latest: no such run (a folder with a config.yaml)."
    assert capsys.readouterr().err == f"{fault} There is no run yet; invoke train makes one.\n"
    write_run(tmp_path / "mine-1", FILES)
    assert main(["mine-1", "latest"]) == 2
    assert capsys.readouterr() == ("", f"{fault} Runs here: mine-1.\n")


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        (F, None, "is not there"),
        (F, '{"git": ', "cannot be read"),
        (F, "[]", "holds no mapping"),
        (C, "a: [", "cannot be read"),
        (D, "\x00", "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, fault: str
) -> None:
    good, bad = write_run(tmp_path / "good", FILES), write_run(tmp_path / "bad", FILES)
    assert main([str(good), str(bad)]) == 0
    capsys.readouterr()
    (bad / file).unlink()
    if content is not None:
        (bad / file).write_text(content)
    assert main([str(good), str(bad)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"{bad / file}: {fault}")


def test_a_cache_manifest_of_another_shape_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    shutil.copytree(write_run(tmp_path / "a", FILES), tmp_path / "b")
    (tmp_path / "b/cache.json").write_text(json.dumps({"answers": "gone", "target": [], "features": None}))
    found = compare(read_run("a", tmp_path), read_run("b", tmp_path))
    assert {difference.group for difference in found} == {"target", "data"}
