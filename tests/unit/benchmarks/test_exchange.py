"""The end of a step between processes: a whole run of two ranks of the CPU, what is reckoned from it, what fails it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import exchange, exchange_ranks
from benchmarks.exchange import Arm, arms_of, faults, sent_bytes, share_of_step, table
from benchmarks.exchange_ranks import ARMS, CASES, LEARNING_RATE, TIMED, UNTIMED, digest, drafter_of, fill, in_ranks
from benchmarks.header import ROOT
from pipeline.config import TrainConfig
from pipeline.optim import MasterAdamW
from pipeline.plan.costs import exchange_seconds, kept_share
from pipeline.plan.gpus import GPUS
from pipeline.ranks import RankLost

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PARAMETERS = sum(p.numel() for p in drafter_of(CASES["tiny"], CPU).parameters())
RANK = "import os, signal, sys, time\nfrom benchmarks import exchange_ranks as ranks\n"
FEW_STEPS = "ranks.UNTIMED, ranks.TIMED = 0, 1\n"
GO = "\nos._exit(ranks.as_rank(ranks.CASES[sys.argv[1]], sys.argv[2]))"


def _ranks_run(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let ranks run `script`, whose arguments are the case and the device's kind."""
    monkeypatch.setattr(exchange_ranks, "COMMAND", (sys.executable, "-c", script))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _after_all_steps(world: int) -> tuple[str, str]:
    """Return the digests of the weights before and after the steps, by one process that adds up all gradients."""
    model = drafter_of(CASES["tiny"], CPU)
    optimizer, before = MasterAdamW(model, TrainConfig(steps=1)), digest(list(model.parameters()))
    for step in range(UNTIMED + TIMED):
        parts = [[torch.empty_like(p) for p in model.parameters()] for _ in range(world)]
        for rank, part in enumerate(parts):
            fill(part, step, rank)
        for gradient, *given in zip(optimizer.gradients, *parts, strict=True):
            gradient.copy_(sum(given[1:], start=given[0]))
        optimizer.step(LEARNING_RATE, torch.tensor(float(world)))
    return before, digest(optimizer.working)


def _found(world: int = 3, *, peak: int | None = None) -> list[dict[str, Any]]:
    """Return what ranks find: three steps' pieces in seconds, the last rank's exchange and the first's spread slow."""
    found = []
    for rank in range(world):
        slow = 0.001 if rank == world - 1 else 0.0
        steps = [[0.010 + slow + 0.1 * step] for step in range(3)]
        whole = [[0.020 + slow + 0.1 * step, 0.005] for step in range(3)]
        sharded = [[0.008 + slow, 0.001, 0.004 if rank == 0 else 0.002, 0.0005] for _ in range(3)]
        arms = zip(ARMS, (steps, whole, sharded), strict=True)
        found.append({name: {"seconds": seconds, "peak": peak, "digest": "same"} for name, seconds in arms})
        del found[-1]["all-reduce"]["digest"]
    return found


def _arms() -> list[Arm]:
    return arms_of(_found(), CASES["tiny"], cuda=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_the_cpu_end_all_steps_with_the_weights_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "exchange.json"
    arguments = ["--device", "cpu", "--json", str(path)]
    code = exchange.main(arguments)
    out, error = capsys.readouterr()
    assert code == 0, error
    record = json.loads(path.read_text())
    assert record["command"] == f"python -m benchmarks.exchange {' '.join(arguments)}" and record["faults"] == []
    assert (record["ranks"], record["case"]["name"], record["case"]["precision"]) == (2, "tiny", "fp32")
    assert [arm["name"] for arm in record["arms"]] == list(ARMS)
    yardstick, whole, sharded = record["arms"]
    before, after = _after_all_steps(2)
    assert before != after and whole["digests"] == sharded["digests"] == [after] * 2 and yardstick["digests"] == []
    assert [arm["sent_bytes"] for arm in record["arms"]] == [
        PARAMETERS * 8 // 2
    ] * 3  # a float32 weight is sent as such
    for arm in record["arms"]:
        sending = arm["ms_exchange"] + (arm["ms_spread"] or 0.0)
        assert 0 < arm["ms_exchange"] <= arm["ms_sending"] <= arm["ms_both"] and math.isfinite(sending)
        assert arm["gb_per_second"] == pytest.approx(arm["sent_bytes"] / arm["ms_sending"] / 1e6)
        assert arm["ratio"] == pytest.approx(arm["ms_sending"] / yardstick["ms_sending"])
        assert arm["predicted_ms"] is None and arm["gib_peak"] is None
    assert yardstick["ms_update"] is None and whole["ms_spread"] is None
    assert 0 < sharded["ms_spread"] < sharded["ms_update"]
    lines = out.splitlines()
    assert lines[0] == f"whole and sharded ended with the same weights on all ranks: {after[:16]}"
    assert lines[1].startswith("tiny, ") and [line.split()[0] for line in lines[-3:]] == list(ARMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_exchange_that_loses_weights_ends_the_command_with_4_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank keeps its own share only: what it did not update is as before the step."""
    _ranks_run(monkeypatch, RANK + FEW_STEPS + "ranks.ShardedExchange.spread = lambda self: None" + GO)
    assert exchange.main(["--device", "cpu"]) == 4
    out, error = capsys.readouterr()
    assert error == "sharded: the ranks ended with different weights\n"
    assert out.splitlines()[-1].startswith("sharded ") and "the same weights" not in out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dies", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by signal 9.\n"),
        ("raise MemoryError('no room\\nat all')", "rank 1: MemoryError: no room at all.\n"),
    ],
    ids=["killed", "raised"],
)
def test_a_rank_that_dies_between_its_steps_ends_the_command_with_one_line(
    dies: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the other waits for it in a collective: which then fails, and is not what is told."""
    patch = f"""
own = ranks.fill
def fill(gradients, step, rank):
    if rank == 1 and step == 2 and len(gradients) > 1:
        {dies}
    own(gradients, step, rank)
ranks.fill = fill
"""
    _ranks_run(monkeypatch, RANK + patch + GO)
    assert exchange.main(["--device", "cpu", "--limit", "200"]) == 1
    out, error = capsys.readouterr()
    assert (out, error) == ("", said)


@pytest.mark.parametrize(
    ("script", "limit", "said"),
    [
        ("os.kill(os.getpid(), 9) if rank else time.sleep(100)", 60.0, "rank 1 was killed by signal 9."),
        ("time.sleep(0.5 * (rank != 1)); os.kill(os.getpid(), 6 + 3 * rank)", 60.0, "rank 1 was killed by signal 9."),
        ("print('a'); sys.exit('two  words') if rank else time.sleep(100)", 60.0, "rank 1 ended with 1: two words."),
        ("sys.exit(3) if rank == 0 else time.sleep(100)", 60.0, "rank 0 ended with 3: it said nothing."),
        ("time.sleep(100)", 1.0, "--limit: no result in 1 s."),
    ],
)
def test_ranks_that_fail_or_hang_are_all_killed(
    script: str, limit: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close()"
    no_core = "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    rank = "rank = int(os.environ['RANK'])"
    _ranks_run(monkeypatch, f"import os, resource, sys, time; {no_core}; {rank}; {here}; {script}")
    monkeypatch.setattr(exchange_ranks, "GRACE_SECONDS", 1.0)
    begin = time.monotonic()
    with pytest.raises(RankLost) as failure:
        in_ranks(2, "tiny", "cpu", limit)
    assert str(failure.value) == said and time.monotonic() - begin < 50
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert limit < 60 or started  # a slow machine may need the second to start them
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_get_what_torchrun_would_tell_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_USE_AGENT_STORE GLOO_SOCKET_IFNAME"
    says = f"print(*[os.environ[name] for name in {names.split()}], *sys.argv[1:]); sys.exit(1)"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    _ranks_run(monkeypatch, f"import os, sys, time; time.sleep(100 * (os.environ['RANK'] != '2')); {says}")
    monkeypatch.setattr(exchange_ranks, "GRACE_SECONDS", 0.1)
    with pytest.raises(RankLost, match="rank 2 ended with 1: 2 2 3 3 localhost True lo smollm2 cuda"):
        in_ranks(3, "smollm2", "cuda", 60.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(RankLost, match="rank 2 ended with 1: 2 2 3 3 localhost True eth7 tiny cpu"):
        in_ranks(3, "tiny", "cpu", 60.0)


def test_times_are_medians_of_the_slowest_rank_of_each_step() -> None:
    yardstick, whole, sharded = _arms()
    assert yardstick.ms_exchange == yardstick.ms_both == pytest.approx(111) and yardstick.ms_update is None
    assert (whole.ms_exchange, whole.ms_update, whole.ms_both) == pytest.approx((121, 5, 126))
    assert whole.ms_spread is None and whole.ms_sending == whole.ms_exchange
    assert (sharded.ms_exchange, sharded.ms_update, sharded.ms_spread) == pytest.approx((9, 5.5, 4))
    assert (sharded.ms_sending, sharded.ms_both) == pytest.approx((12, 13.5))  # the first rank's and the last one's
    assert [arm.ratio for arm in (yardstick, whole, sharded)] == pytest.approx([1, 121 / 111, 12 / 111])
    assert sharded.gb_per_second == pytest.approx(sharded.sent_bytes / 12e-3 / 1e9)


def test_bytes_and_predictions_are_those_of_the_formula() -> None:
    assert [sent_bytes(1000, world, 8) for world in (2, 4, 8)] == [4000, 6000, 7000]
    case = replace(CASES["tiny"], precision="bf16")
    arms = arms_of(_found(4, peak=3 * 2**30), case, cuda=True)
    assert [arm.sent_bytes for arm in arms] == [sent_bytes(PARAMETERS, 4, size) for size in (8, 8, 6)]
    whole, sharded = (exchange_seconds(case.drafter(), GPUS["h200"], 4, sharded=s) * 1e3 for s in (False, True))
    assert [arm.predicted_ms for arm in arms] == [whole, whole, sharded]
    uneven = 4 * kept_share(case.drafter(), 4)  # 1 where all four keep as much; all wait for the one that keeps most
    assert 1 < uneven < 1.1 and sharded == pytest.approx(whole * (4 * uneven + 2) / 8)
    assert [arm.gib_peak for arm in arms] == [3.0] * 3


def test_weights_that_differ_are_one_line() -> None:
    yardstick, whole, sharded = _arms()
    assert faults([yardstick, whole, sharded]) == []
    other = replace(sharded, digests=["other"] * 3)
    said = "whole and sharded ended with different weights, and should give the same bits"
    assert faults([yardstick, whole, other]) == [said]
    for number, arm in ((1, whole), (2, sharded)):
        arms = [yardstick, whole, sharded]
        arms[number] = replace(arm, digests=["same", "same", "other"])
        assert faults(arms) == [f"{arm.name}: the ranks ended with different weights"]


def test_a_digest_is_of_every_bit() -> None:
    weights = [torch.ones(3, 2, dtype=torch.bfloat16), torch.zeros(1)]
    before = digest(weights)
    assert before == digest([weight.clone() for weight in weights])
    weights[1] = -weights[1]  # equal to 0, and another bit
    assert digest(weights) != before


def test_gradients_differ_by_rank_and_step_and_are_the_same_each_time() -> None:
    found = []
    for step, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        found.append([torch.empty(5), torch.empty(2, 3)])
        fill(found[-1], step, rank)
    first, other_rank, other_step, again = (torch.cat([g.flatten() for g in given]) for given in found)
    assert torch.equal(first, again)
    assert not (first == other_rank).any() and not (first == other_step).any() and not (first[:5] == first[5:10]).any()


def test_the_table_has_a_line_for_each_arm_and_says_what_is_missing() -> None:
    head, *lines = table(_arms())
    assert [line.split()[0] for line in lines] == list(ARMS) and len({len(line) for line in (head, *lines)}) == 1
    assert lines[0].split()[1:5] == ["111.00", "-", "-", "111.00"] and lines[0].split()[-3:] == ["1.00", "-", "-"]
    assert lines[2].split()[1:5] == ["9.00", "5.50", "4.00", "13.50"]


def test_the_share_of_a_step_is_said_where_its_record_is_there(tmp_path: Path) -> None:
    arms = _arms()
    ms = 115.02809524536133
    said = share_of_step(arms, ROOT / exchange.STEP_RECORD)
    assert said.startswith(
        f"exchange and spread are {121 / ms:.0%} (whole) and {12 / ms:.0%} (sharded) of the 115.0 ms"
    )
    for number, text in enumerate(
        ("", "{", "[]", '{"rows": [{"case": {"name": "other"}}]}', '{"rows": [{"case": 1}]}')
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        assert share_of_step(arms, path) == ""
    assert share_of_step(arms, tmp_path / "none.json") == ""


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--ranks", "4"], 2, "--ranks: 4 GPUs are needed, 2 of them here."),
        ([], 1, "--ranks: 2 GPUs are needed, 1 of them here."),
        ([], 0, "--ranks: 2 GPUs are needed, 0 of them here."),
        (["--ranks", "1"], 8, "--ranks: 1 is too few to exchange anything."),
        (["--device", "cpu", "--ranks", "0"], 0, "--ranks: 0 is too few to exchange anything."),
        (["--device", "cpu", "--case", "huge"], 0, "--case: 'huge' is none of reference, smollm2, tiny."),
        (["--device", "cpu", "--json", "nowhere/out.json"], 0, "--json: nowhere/out.json is in no folder that exists."),
        (["--device", "cpu", "--limit", "0"], 0, "--limit: 0 s is no time."),
    ],
)
def test_what_cannot_be_run_here_is_one_line_and_exit_2(
    arguments: list[str], gpus: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert exchange.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


@pytest.mark.parametrize(("device", "case", "world"), [("cuda", "reference", 8), ("cpu", "tiny", 2)])
def test_all_gpus_and_the_reference_case_are_taken_unless_said_otherwise(
    device: str, case: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    started: list[Any] = []

    def in_ranks(*given: Any) -> Any:
        started.append(given)
        raise RankLost("seen enough")

    monkeypatch.setattr(exchange, "in_ranks", in_ranks)
    assert exchange.main(["--device", device]) == 1
    assert started == [(world, case, device, exchange.LIMIT_SECONDS)]
