"""The benchmark of a step: a real one on the CPU, and what fails it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import flops, step
from benchmarks.flops import CUDA_CASES, REFERENCE, Case, allowed_pairs, chosen_cases, step_flops
from benchmarks.peaks import Peaks
from pipeline.batches import MicroBatch

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PEAKS = Peaks(matmul_flops=1e10, copy_bytes=1e10, matmul="made up")
SMALL = Case("small", "tiny", 2, 64, 6, 4, num_layers=1, precision="fp32")


def batches_of(case: Case, count: int = 1) -> list[MicroBatch]:
    place: Any = SimpleNamespace(config=step.run_config(case, CPU), drafter=case.drafter(), device=CPU)
    return step.make_batches(case, place, count)


@pytest.fixture(scope="module")
def row() -> step.Row:
    return step.run_case(SMALL, CPU, PEAKS)[0]


def test_a_step_on_the_cpu_compiles_nothing_more_and_is_a_share_of_the_peak(row: step.Row) -> None:
    assert (row.compiles_after_warmup, row.jitted_after_warmup, step.faults(row)) == (0, (), [])
    assert len(row.all_ms) == step.TIMED and min(row.all_ms) <= row.ms_forward_backward <= max(row.all_ms)
    assert row.mfu == pytest.approx(row.tflop * 1e12 / (row.ms_forward_backward / 1e3) / PEAKS.matmul_flops)
    assert row.memory_constant is None and row.gib_forward_backward is None


def test_a_rows_operations_are_those_of_its_own_batches(row: step.Row) -> None:
    timed = batches_of(SMALL, step.UNTIMED + step.TIMED)[step.UNTIMED :]
    num_rows = round(sum(len(b.rows.index_R) for b in timed) / len(timed))
    pairs = sum(allowed_pairs(b.anchors_bN, SMALL.block_size) for b in timed) / len(timed)
    counted = step_flops(SMALL.drafter(), sequences=2, context_len=64, num_anchors=6, num_rows=num_rows, pairs=pairs)
    assert (row.rows, row.tflop) == (num_rows, pytest.approx(counted.total / 1e12))


def test_batches_have_sorted_anchors_of_their_own_and_nearly_every_slot_supervised() -> None:
    first, second = batches_of(replace(SMALL, context_len=512, num_anchors=64), 2)
    assert torch.equal(first.anchors_bN, first.anchors_bN.sort(dim=1).values)
    assert not torch.equal(first.anchors_bN, second.anchors_bN)
    assert 0.95 * 2 * 64 * 3 < len(first.rows.index_R) <= 2 * 64 * 3


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str, cases: tuple[Case, ...] = (SMALL,)) -> int:
    monkeypatch.setattr(flops, "CPU_CASES", cases)
    monkeypatch.setattr(step, "measure_peaks", lambda device: PEAKS)
    return step.main(["--device", "cpu", *arguments])


def test_a_shape_that_was_not_declared_ends_the_benchmark_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, stranger = step.make_batches, batches_of(replace(SMALL, num_anchors=7))

    def with_a_stranger(case: Case, replica: Any, count: int) -> list[MicroBatch]:
        return [*make(case, replica, count - 1), *stranger]

    monkeypatch.setattr(step, "make_batches", with_a_stranger)
    assert bench(monkeypatch) == 4
    error = capsys.readouterr().err
    assert error.startswith("small: bench would compile after the warm-up for ") and error.count("\n") == 1


def test_a_triton_kernel_that_is_compiled_after_the_warm_up_is_named() -> None:
    knobs = pytest.importorskip("triton").knobs
    before = knobs.runtime.jit_post_compile_hook
    with step.jitted_kernels() as names:
        knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="_statistics"), key="k")
    assert names == ["_statistics"] and knobs.runtime.jit_post_compile_hook is before


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, ""),
        ({"memory_constant": True}, 0, ""),
        ({"compiles_after_warmup": 2}, 4, "small: 2 compiles after the warm-up\n"),
        ({"jitted_after_warmup": ("b", "a", "b")}, 4, "small: 3 Triton kernels after the warm-up: a, b\n"),
        ({"memory_constant": False}, 4, "small: memory was not the same after each of the 8 timed steps\n"),
    ],
)
def test_a_compile_or_growing_memory_is_one_line_and_exit_4(
    row: step.Row,
    change: dict[str, Any],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step, "run_case", lambda *given, **how: (replace(row, **change), ""))
    assert bench(monkeypatch) == code
    assert capsys.readouterr().err == said


def test_the_record_says_what_was_measured_where_and_how(
    row: step.Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "run_case", lambda case, *given, **how: (replace(row, case=case), ""))
    other = replace(SMALL, name="other")
    path = tmp_path / "out.json"
    assert bench(monkeypatch, "--json", str(path), cases=(SMALL, other)) == 0
    record = json.loads(path.read_text())
    assert record["command"] == f"python -m benchmarks.step --device cpu --json {path}"
    assert record["torch"] == torch.__version__ and record["peaks"]["matmul_flops"] == 1e10
    assert {"date", "git", "device"} <= set(record)
    assert [r["case"]["name"] for r in record["rows"]] == ["small", "other"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["case", "small", "other"]
    assert len({len(line) for line in lines[1:]}) == 1, "the columns do not stand under their headings"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "reference"], "--sizes: reference on cpu would take hours"),
        (["--case", "huge"], "--case: 'huge' is none of small"),
        (["--profile"], "--profile: the CPU has no kernels to show"),
        (["--json", "nowhere/out.json"], "--json: nowhere/out.json is in no folder that exists"),
    ],
)
def test_what_the_cpu_cannot_do_is_one_line_and_exit_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


def test_a_gpu_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert step.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("--device: torch sees no GPU here")


def test_sizes_choose_among_a_gpus_cases() -> None:
    cuda = torch.device("cuda:0")
    assert chosen_cases(cuda, "reference", []) == [REFERENCE]
    assert chosen_cases(cuda, "", []) == chosen_cases(cuda, "all", []) == list(CUDA_CASES)
    small = chosen_cases(cuda, "small", [])
    assert small and {case.target for case in small} == {"smollm2"}
    assert chosen_cases(cuda, "", ["smollm2 3072", "reference"])[1] == REFERENCE
