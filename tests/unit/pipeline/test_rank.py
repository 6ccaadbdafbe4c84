"""A rank that torchrun started: which store it takes, how it books an end, and what another attempt does about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.compile import GateAborted
from pipeline import rank as rank_module
from pipeline.__main__ import _explained
from pipeline.errors import ConfigError, Interrupted, PipelineError, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.interrupts import StopRequest
from pipeline.rank import work
from pipeline.ranks import RankLost, Ranks
from pipeline.runs import Run, lock_run
from tests.rank_tools import environ_of, free_port, store_server
from tests.tiny_run import tiny_config

Train = Callable[[Run, Ranks], dict[str, Any]]
SOURCE = "a" * 64


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run whose cache stage is finished."""
    made = Run(tmp_path / "run", tiny_config(topology={"drafters": ["cpu"], "workers": "processes"}))
    made.folder.mkdir()
    atomic_write_json(made.manifest_path("cache"), {"finished": "2026-01-01T00:00:00Z"})
    return made


@pytest.fixture
def attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that is rank 0 of an attempt by some torchruns, a rank each, with `train` for the training.

    It returns the exit code. The count of restarts is 0 each time, as on a host that never sees its own rank's end.
    """

    def go(train: Train, torchruns: str = "A", port: int = 0) -> int:
        world, there = len(torchruns), port or free_port()
        for name, value in environ_of(0, world, there, per_host=1, hosted=False).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(rank_module, "_starter", lambda host: [torchruns[0], 1, 100])
        monkeypatch.setattr(rank_module, "train_as", train)
        monkeypatch.setattr("pipeline.ranks.ENDING_SECONDS", 5.0 if port else 0.0)  # a world of more is not there

        def meet(rank: int) -> None:
            environ = environ_of(rank, world, there, per_host=1, hosted=False)
            Ranks(environ).put("starter", [torchruns[rank], 1, 100])

        others = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(1, world)]
        for other in others:
            other.start()
        code = work(run, started_by_train=False, source_hash=SOURCE, explain=_explained)
        for other in others:
            other.join(timeout=10)
        return code

    return go


def _raises(error: BaseException) -> Train:
    def train(run: Run, ranks: Ranks) -> dict[str, Any]:
        raise error

    return train


def _booked(run: Run) -> str:
    stages = json.loads(run.stages_path.read_text())["stages"]
    return str(next(entry["state"] for entry in stages if entry["name"] == "train"))


def _unwanted(run: Run, ranks: Ranks) -> dict[str, Any]:
    raise AssertionError("it trains again")


def _finishes(run: Run, ranks: Ranks) -> dict[str, Any]:
    return {"steps": 12}


def test_torchruns_own_store_is_refused_since_old_and_new_ranks_meet_in_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = store_server()
    for name, value in environ_of(0, 1, server.port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun"):
        work(run, started_by_train=False, source_hash=SOURCE, explain=_explained)
    assert server.num_keys() <= 1  # torch's own: the rank has not been in it


class _DiskFull(PipelineError):
    exit_code = 3


@pytest.mark.parametrize(
    "reason",
    [
        ConfigError("the data is gone"),
        _DiskFull("no space left"),
        VerificationFailed("the loss is nan", where="step 3", fix="Lower it."),
        Interrupted("stopped after step 4 of 12, saved", where="run", fix="invoke train again resumes there."),
    ],
    ids=lambda error: str(error.exit_code),
)
def test_an_end_for_a_reason_is_not_tried_again_by_the_same_torchruns_whatever_they_count_but_by_the_next_ones(
    reason: PipelineError, run: Run, attempt: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert attempt(_raises(reason), "AB") == reason.exit_code
    capsys.readouterr()
    for torchruns in ("AB", "BA"):  # torchrun may number the hosts anew
        assert attempt(_unwanted, torchruns) == reason.exit_code
        err = capsys.readouterr().err
        assert "train: started again after an end that another attempt would not change\n" in err
        assert err.endswith(f"{reason}\n")
    assert attempt(_finishes, "CD") == 0
    assert _booked(run) == "done"
    assert not list(run.folder.glob(".ended*"))


def test_ranks_that_were_lost_are_tried_again(attempt: Callable[..., int]) -> None:
    assert attempt(_raises(GateAborted("another rank is gone"))) == 1
    assert attempt(_raises(RankLost("rank 1 ended"))) == 1
    assert attempt(_finishes) == 0


@pytest.mark.parametrize("then", ["AC", "ABCD", "A"], ids=["replaced", "came", "went"])
def test_ranks_go_on_after_a_stop_when_other_hosts_are_there(then: str, attempt: Callable[..., int]) -> None:
    """Their own torchrun stops them when a host came; the torchrun of a host that is drained does, and all save."""
    assert attempt(_raises(Interrupted("stopped after step 4 of 12, saved")), "AB") == 5
    assert attempt(_finishes, then) == 0


def test_a_run_that_another_torchrun_works_on_keeps_no_reason_of_one_that_came_second(
    run: Run, attempt: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would end the other's ranks when they are started again."""
    reason = Interrupted("stopped after step 4 of 12, saved")
    assert attempt(_raises(reason)) == 5
    path = run.folder / ".ended.json"
    kept = path.read_bytes()
    with lock_run(run):
        assert attempt(_unwanted, "B") == 2
        assert "is working on this run" in capsys.readouterr().err
        assert path.read_bytes() == kept
    path.unlink()
    with lock_run(run):
        assert attempt(_unwanted, "B") == 2
    assert not path.exists()


def test_an_end_before_all_ranks_met_is_no_reason_of_theirs(
    run: Run, attempt: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal, since torchrun itself sends one when another host's rank died as early."""

    def interrupted(self: Ranks, key: str) -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "all", interrupted)
        assert attempt(_unwanted) == 5
    assert not (run.folder / ".ended.json").exists()
    assert attempt(_finishes) == 0


def test_a_starter_is_known_by_its_time_where_its_number_is_another_ones_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "a) R 7 (b")  # /proc has the name in parentheses
    began = []
    for _ in range(2):
        with subprocess.Popen([program, "100"]) as process:
            monkeypatch.setattr(os, "getppid", lambda pid=process.pid: pid)
            time.sleep(0.1)
            found = rank_module._starter("here")
            process.kill()
        assert found[:2] == ["here", process.pid]
        began.append(found[2])
    ticks = os.sysconf("SC_CLK_TCK")
    assert 0.1 <= (began[1] - began[0]) / ticks < 60
    assert began[1] / ticks == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=60)
    monkeypatch.setattr(os, "getppid", lambda: 0)  # of another namespace
    assert rank_module._starter("here") == ["here", 0, 0]


def test_the_reason_that_is_kept_is_the_one_of_the_rank_that_failed_first(
    run: Run, attempt: Callable[..., int]
) -> None:
    def train(run: Run, ranks: Ranks) -> dict[str, Any]:
        other = Ranks(environ_of(1, 2, port, per_host=1, hosted=False))
        other.failed(3, "rank 1's disk is full.")
        other.store.set("ended/1", "1")
        raise GateAborted("another rank is gone")

    port = free_port()
    assert attempt(train, "AB", port) == 1
    kept = json.loads((run.folder / ".ended.json").read_text())
    assert (kept["code"], kept["rank"], kept["text"]) == (3, 1, "rank 1's disk is full.")
    assert kept["starters"] == [["A", 1, 100], ["B", 1, 100]]


def test_a_stop_that_another_rank_ended_first_is_booked_as_interrupted_before_that_rank_goes(
    run: Run, attempt: Callable[..., int]
) -> None:
    """Rank 0's main thread still waits for a target's thread; torchrun would end rank 0 as soon as rank 1 is gone."""
    port, booked = free_port(), []

    def second() -> None:
        ranks = Ranks(environ_of(1, 2, port, per_host=1, hosted=False))
        ranks.shared("begin", None)
        ranks.failed(5, "run: stopped after step 4 of 12, saved. Again.")
        ranks.end(well=False)
        booked.append(_booked(run))

    def train(run: Run, ranks: Ranks) -> dict[str, Any]:
        with StopRequest() as stop:
            for _ in range(100):  # a target's thread sleeps
                ranks.watch(stop)
                time.sleep(0.05)
        raise AssertionError("nothing was heard")

    other = threading.Thread(target=second)
    other.start()
    assert attempt(train, "AB", port) == 5
    other.join(timeout=10)
    assert booked == ["interrupted"]


def test_what_a_lost_partner_did_to_a_rank_is_printed_also_when_train_started_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = store_server()
    for name, value in environ_of(0, 1, server.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_module, "train_as", _raises(GateAborted("another rank is gone (NCCL error: far)")))
    assert work(run, started_by_train=True, source_hash=SOURCE, explain=_explained) == 1
    assert capsys.readouterr().err == "GateAborted: another rank is gone (NCCL error: far)\n"
    assert server.check(["lost"])
    told = json.loads(server.get("lost"))
    assert told["text"] == "GateAborted: another rank is gone (NCCL error: far)"
    assert not server.check(["failed"])
