"""Three threads against one: a real comparison on the CPU, and what fails it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import threads
from benchmarks.threads import CASES, LARGEST_DIFFERENCE, compare, config_of, faults, largest_difference, samples_of

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "UNTIMED", 1)
        patch.setattr(threads, "TIMED", 2)
        return compare(CASES["cpu"], CPU)


def test_three_threads_and_one_give_the_same_gradient_and_compile_nothing_more(found: dict[str, Any]) -> None:
    """In float32 within rounding; replicas end equal."""
    assert faults(found) == []
    assert 0 < found["gradient_difference"] <= LARGEST_DIFFERENCE["fp32"]
    several, one = found["sides"]
    assert (several["threads"], several["sequences"], one["threads"], one["sequences"]) == (3, 2, 1, 6)
    assert found["throughput_ratio"] == pytest.approx(one["ms_step"] / several["ms_step"], rel=1e-3)
    assert list(several["waited_share"]) == ["drafter-0", "drafter-1", "drafter-2"]
    assert found["memory_ratio"] is None


def test_both_sides_train_on_the_same_rows_with_the_same_anchors() -> None:
    case = CASES["cpu"]
    several, one = (threads.Trial(case, count, CPU) for count in (3, 1))
    for step in range(2):
        parts = [several.batches[i][step] for i in range(3)]
        whole = one.batches[0][step]
        assert torch.equal(torch.cat([part.anchors_bN for part in parts]), whole.anchors_bN)
        assert torch.equal(torch.cat([part.tokens_bS for part in parts]), whole.tokens_bS)
        assert sum(int(part.rows.valid_R.sum()) for part in parts) == int(whole.rows.valid_R.sum()) > 0
    assert torch.equal(torch.cat(several.features), one.features[0])
    assert not torch.equal(one.batches[0][0].anchors_bN, one.batches[0][1].anchors_bN)
    first, *others = [replica.optimizer.masters for replica in (*several.replicas, *one.replicas)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_the_configuration_is_one_that_a_run_could_have() -> None:
    config = config_of(CASES["cuda"], 3, torch.device("cuda:0"))
    assert (config.train.batch_size, config.train.micro_batch, config.train.num_anchors) == (48, 16, 32)
    assert config.topology.drafters == ("cuda:0",) * 3
    lengths = {len(sample.input_ids) for sample in samples_of(CASES["cuda"])}
    assert len(lengths) > 20 and min(lengths) >= 192 and max(lengths) <= 384


def test_a_gradient_that_is_off_or_not_finite_is_seen() -> None:
    a, b = [torch.ones(3), torch.tensor([1.0, -2.0])], [torch.ones(3), torch.tensor([1.0, -2.5])]
    assert largest_difference(a, b) == pytest.approx(0.2)
    assert largest_difference([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gradient_difference": 2e-5}, "the averaged gradients differ by 2.00e-05, more than 1e-05"),
        ({"gradient_difference": float("nan")}, "the averaged gradients differ by nan"),
        ({"compiles_after_warmup": 2}, "3 threads: 2 compiles after the warm-up"),
        ({"replicas_equal": False}, "3 threads: the replicas ended different"),
    ],
)
def test_what_a_run_would_refuse_is_one_line_and_exit_4(
    found: dict[str, Any],
    change: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    several, one = found["sides"]
    changed = {**found, **change, "sides": [several | change, one]}
    monkeypatch.setattr(threads, "compare", lambda case, device: changed)
    path = tmp_path / "out.json"
    assert threads.main(["--device", "cpu", "--json", str(path)]) == 4
    out, error = capsys.readouterr()
    assert error.startswith(said) and error.count("\n") == 1
    assert out.startswith(" " * 24) and "3 x 2 sequences" in out and "threads over one: " in out
    assert json.loads(path.read_text())["faults"] == error.splitlines()


def test_a_whole_comparison_ends_with_a_record_and_exit_0(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "compare", lambda case, device: found)
    path = tmp_path / "out.json"
    assert threads.main(["--device", "cpu", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["command"] == f"python -m benchmarks.threads --device cpu --json {path}"
    assert record["sides"] == found["sides"] and {"date", "git", "device", "torch"} <= set(record)


def test_a_place_that_is_not_there_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert threads.main(["--json", "nowhere/out.json"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert threads.main(["--device", "cuda"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("--json: nowhere/out.json is in no folder") and second.startswith("--device: torch sees no")


def test_a_thread_that_fails_ends_the_comparison_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = threads.Trial(CASES["cpu"], 3, CPU)

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trial.replicas[1], "warm_up", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trial.run()
