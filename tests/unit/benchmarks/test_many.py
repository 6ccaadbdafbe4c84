"""One GPU against several: a whole comparison on the CPU with two workers, and what is said of one that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import many, many_runs
from benchmarks.many import efficiency, faults, record_of, table, words
from benchmarks.many_child import NoGate, random_answers
from benchmarks.many_runs import SIZES, Laboratory, Line, arrangements, descendants, kill_tree, waited
from dflash.compile import CompileGate
from pipeline.config import load_config
from pipeline.tiny_target import tiny_model
from tests.gate_tools import run_threads

NAMES = ["one", "one, few rows", "threads", "processes", "sharded"]


def _lines() -> list[Line]:
    """Return lines as a run that went well gives them: two drafters 1.8, 1.9 and 1.9 times as fast as one."""
    manifest = {"compiles_after_warmup": 0, "eager_bodies": 0, "replicas_equal": True, "sessions": []}
    flat = {"verdict": "pass", "value": "0 allocated, 0 reserved"}
    rates, losses = (1000.0, 900.0, 1800.0, 1900.0, 1900.0), ([4.0, 2.0], [5.0, 4.0], *[[4.0, 2.00001]] * 3)
    return [
        Line(
            name,
            drafters=1 if number < 2 else 2,
            gpus=1 if number < 2 else 2,
            rows=2 if number == 1 else 4,
            tokens_per_second=rates[number],
            waited={"drafters for others": 0.03},
            memory=flat,
            losses=losses[number],
            manifest=manifest,
        )
        for number, name in enumerate(NAMES)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_of_the_cpu_are_compared_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every arrangement trains; threads and processes to the same losses, one drafter within rounding."""
    path = tmp_path / "many.json"
    arguments = ["--device", "cpu", "--json", str(path), "--limit", "300"]
    code = many.main(arguments)
    out, error = capsys.readouterr()
    record = json.loads(path.read_text())
    assert (code, record["faults"]) == (0, []), error
    assert record["command"] == f"python -m benchmarks.many {' '.join(arguments)}" and record["count"] == 2
    assert [line["name"] for line in record["lines"]] == NAMES
    one, few, by_threads, by_processes, sharded = record["lines"]
    assert [line["rows"] for line in record["lines"]] == [4, 2, 4, 4, 4]
    assert (
        by_threads["losses"] == by_processes["losses"] == sharded["losses"]
        and len(by_threads["losses"]) == SIZES["cpu"].steps
    )
    assert by_threads["loss_difference"] < 1e-5 and few["losses"] != one["losses"]
    for line in (by_threads, by_processes, sharded):
        assert line["strong_efficiency"] == pytest.approx(
            line["tokens_per_second"] / one["tokens_per_second"] / 2, abs=1e-3
        )
        assert len(line["manifest"]["workers"]) == 2
    assert [len(line["manifest"]["targets"]) for line in record["lines"]] == [1, 1, 1, 2, 2]
    last = out.splitlines()[-5:]
    assert [line.split(" (")[0] for line in last] == NAMES
    assert "threads, strong scaling, the 4 rows of a step split: " in out


@pytest.mark.parametrize("device", SIZES)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_arrangement_is_a_configuration_that_runs_and_has_the_same_micro_batches(
    device: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_runs, "tiny_target", lambda folder, arch, **changes: folder / "target")
    laboratory, size = Laboratory(tmp_path, device, count, 1.0), SIZES[device]
    found = arrangements(device, count, True)
    assert [a.name for a in found] == [*NAMES, "apart"]
    for arrangement in found:
        for cold in ([], list(size.cold)):
            config = load_config(laboratory.config, [*arrangement.overrides(size), *cold])
            assert not (cold and config.recorded)  # without the gate they would be recorded at once
            assert config.train.micro_batch == size.rows and config.train.steps % config.train.log_every == 0
            assert config.train.batch_size == size.rows * (1 if arrangement.name == "one, few rows" else count)
    one, _, threads, processes, sharded, apart = found
    assert sharded == replace(processes, name="sharded", sharded=True)
    assert len(one.drafters) == 1 and len(threads.drafters) == len(processes.drafters) == count
    if device == "cuda":
        assert threads.targets == threads.drafters == processes.targets
        assert {*apart.targets, *apart.drafters} == set(threads.drafters) and not {*apart.targets} & {*apart.drafters}
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert (
        len(set(prompts)) == len(prompts) and max(map(len, prompts)) + many_runs.TEMPLATE_TOKENS <= size.prompt_tokens
    )


def test_scaling_is_said_in_words_and_in_the_table() -> None:
    lines = _lines()
    assert efficiency(lines[2], lines[0]) == 0.9 and efficiency(lines[3], lines[1]) == pytest.approx(
        1900 / 1800, abs=1e-4
    )
    assert faults(lines, "fp32") == []
    apart = replace(lines[2], name="apart", drafters=1)  # its other GPU has the target
    assert efficiency(apart, lines[0]) == 0.9 and efficiency(apart, lines[1]) is None
    said = words(lines)
    assert said[0] == (
        "threads, strong scaling, the 4 rows of a step split: 1.80 times the tokens/s of one, with 2: "
        "efficiency 0.90; the aim is 0.9 from 1 to 4"
    )
    assert said[1].startswith("threads, weak scaling, 2 rows a step for each drafter: 2.00 times")
    assert "processes: waited: drafters for others 3.0%" in said
    head, *rows = table(record_of(lines))
    assert head.split()[:4] == ["rows", "tokens/s", "strong", "weak"]
    assert " ".join(rows[2].split()) == "threads (2 drafters) 4 1,800 0.90 1.00 0 0 - flat - 5.0e-06"
    assert rows[0].split()[-1] == "-"


def _failed(line: Line) -> Line:
    return Line(line.name, line.drafters, line.gpus, line.rows, failed="no result in 120 s")


CHANGES: list[tuple[int, Callable[[Line], Line], str]] = [
    (2, _failed, "threads: no result in 120 s"),
    (0, _failed, "one: no result in 120 s"),
    (4, lambda line: replace(line, losses=[4.0, 2.0]), "threads and sharded gave different losses, and should"),
    (1, lambda line: replace(line, manifest=line.manifest | {"eager_bodies": 3}), "one, few rows: 3 eager bodies"),
    (2, lambda line: replace(line, manifest=line.manifest | {"compiles_after_warmup": 1}), "threads: 1 compiles after"),
    (2, lambda line: replace(line, manifest=line.manifest | {"replicas_equal": False}), "threads: the replicas ended"),
    (
        3,
        lambda line: replace(line, memory={"verdict": "fail", "value": "8 allocated"}),
        "processes: memory was not flat: 8",
    ),
]


@pytest.mark.parametrize(("number", "change", "said"), CHANGES, ids=[said for *_, said in CHANGES])
def test_what_a_run_would_refuse_is_one_sentence_and_the_table_still_stands(
    number: int, change: Callable[[Line], Line], said: str
) -> None:
    lines = _lines()
    lines[number] = change(lines[number])
    found = faults(lines, "fp32")
    assert found[0].startswith(said) and len(found) == (2 if "different losses" in said else 1)  # of each pair
    records = record_of(lines)
    assert json.loads(json.dumps(records)) and len(table(records)) == 6 and words(lines)
    if lines[number].failed:
        assert table(records)[number + 1].endswith("FAILED: no result in 120 s")


@pytest.mark.parametrize("losses", [[4.0, 2.1], [4.0], [4.0, float("nan")]])
def test_losses_that_are_not_one_drafters_are_a_fault(losses: list[float]) -> None:
    lines = _lines()
    lines[2:] = [replace(line, losses=losses) for line in lines[2:]]
    assert [text.split(":")[0] for text in faults(lines, "bf16")][:3] == NAMES[2:]


def test_an_arrangement_that_fails_is_a_line_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(self: Laboratory, arrangement: Any) -> Line:
        measured.append(arrangement.name)
        line = _lines()[NAMES.index(arrangement.name)]
        return _failed(line) if line.name == "threads" else line

    monkeypatch.setattr(Laboratory, "measure", measure)
    path = tmp_path / "many.json"
    assert many.main(["--device", "cpu", "--json", str(path)]) == 4
    out, error = capsys.readouterr()
    assert measured == NAMES
    assert error.splitlines()[-1] == "threads: no result in 120 s"
    assert out.splitlines()[-1].startswith("sharded (2 drafters)")
    assert json.loads(path.read_text())["lines"][2]["failed"] == "no result in 120 s"


def test_a_run_past_its_limit_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True).wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", script, "import time; time.sleep(100)"])
    found: list[int] = []
    for _ in range(200):
        found = descendants(child.pid)
        if found:
            break
        time.sleep(0.05)
    kill_tree(child)
    assert len(found) == 1
    for _ in range(100):  # whoever adopted it reaps it
        state = Path(f"/proc/{found[0]}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(found[0], 9)
        pytest.fail("it lives on")


def test_what_ends_badly_or_not_at_all_is_told_from_its_last_line_or_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_runs, "tiny_target", lambda folder, arch, **changes: folder / "target")
    laboratory = Laboratory(tmp_path, "cpu", 2, 250.0)
    given = ["name=none", "topology.drafters=[cpu]"]
    failed, run = laboratory.start(given, tmp_path / "cache")
    assert (
        failed.startswith("ended with 1: pipeline.errors.ConfigError: target.source: folder ")
        and run.name[:5] == "none-"
    )
    laboratory.limit = 0.1
    assert laboratory.start(given, tmp_path / "cache")[0] == "no result in 0 s"


def test_without_the_gate_threads_warm_up_at_the_same_time_and_late_compiles_are_counted() -> None:
    meeting = threading.Barrier(2)
    gate = NoGate(workers=2, backend="aot_eager")
    bodies = [gate.compile(lambda x, n=n: x * n, name=f"drafter-{n}") for n in range(2)]

    def work(index: int) -> None:
        with gate.worker(f"drafter-{index}"):
            gate.warm_up(lambda: [meeting.wait(20)].clear())  # behind a gate one waits for ever
            while not gate.sealed:
                time.sleep(0.01)
            if index == 0:
                with gate.step():
                    bodies[0](torch.ones(3))

    try:
        assert run_threads(work, 2) == [None, None]
        assert gate.report()["compiles_after_warmup"] == 1
    finally:
        gate.close()
    assert isinstance(gate, CompileGate)


def test_answers_are_random_tokens_without_specials_and_mask() -> None:
    model = tiny_model()
    found = random_answers(model, None, [[1]] * 50, max_new_tokens=16, batch_size=4)
    assert {len(answer) for answer in found} == set(range(8, 17))
    tokens = {token for answer in found for token in answer}
    assert min(tokens) >= 5 and max(tokens) < model.config.vocab_size - 1 and len(tokens) > 200


def test_waits_are_means_over_threads_of_a_kind() -> None:
    shares = {"drafter-0": {"others": 0.1, "features": 0.0}, "drafter-1": {"others": 0.3, "features": 0.0}}
    assert waited({**shares, "target-0": {"room": 0.5}}) == {
        "drafters for others": 0.2,
        "drafters for features": 0.0,
        "targets for room": 0.5,
    }


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--gpus", "4"], 2, "--gpus: 4 GPUs are needed, 2 of them here."),
        ([], 1, "--gpus: 2 GPUs are needed, 1 of them here."),
        ([], 0, "--gpus: 2 GPUs are needed, 0 of them here."),
        (["--gpus", "1"], 8, "--gpus: 1 is too few to compare one drafter with."),
        (["--device", "cpu", "--json", "nowhere/out.json"], 0, "--json: nowhere/out.json is in no folder that exists."),
        (["--device", "cpu", "--limit", "-1"], 0, "--limit: has to be above 0."),
    ],
)
def test_what_cannot_be_run_here_is_one_line_and_exit_2(
    arguments: list[str], gpus: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert many.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1
