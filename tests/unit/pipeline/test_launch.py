"""`train` with processes on one host: what ended the ranks is what ends the command, and a signal reaches them once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeline import launch as launch_module
from pipeline.errors import Interrupted, VerificationFailed
from pipeline.launch import _cause, launch
from pipeline.ranks import FAILED, LOST, RankLost
from pipeline.runs import Run
from tests.rank_tools import store_server
from tests.tiny_run import tiny_config

# Stands for `python -m pipeline`; the last argument of a rank's command line is --started-by-train.
_RANK = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
assert sys.argv[1:] == ["rank", "run", "--started-by-train"], sys.argv
assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["WORLD_SIZE"] == "2"
assert os.getpgid(0) != {group}
{body}
"""
_WITH_RANKS = """
from pipeline.ranks import Ranks
ranks = Ranks()
"""


def _launch(tmp_path: Path, body: str) -> dict[str, object]:
    script = tmp_path / "rank.py"
    script.write_text(_RANK.format(group=os.getpgid(0), body=body))
    run = Run(Path("run"), tiny_config(topology={"drafters": ["cpu", "cpu"], "workers": "processes"}))
    path = f"import runpy, sys; sys.argv = sys.argv[0:1] + sys.argv[2:]; runpy.run_path({str(script)!r})"
    return launch(run, [sys.executable, "-c", path, "-"])


@pytest.mark.slow
def test_the_manifest_is_the_one_that_rank_0_gives(tmp_path: Path) -> None:
    body = _WITH_RANKS + 'ranks.leads and ranks.store.set("manifest", json.dumps({"steps": 3}))'
    assert _launch(tmp_path, body) == {"steps": 3}


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "GRACE_SECONDS", 0.5)
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(100)"
    begin = time.monotonic()
    with pytest.raises(RankLost) as caught:
        _launch(tmp_path, body)
    assert str(caught.value).startswith("rank 1: was killed by SIGKILL. The same command goes on from the last checkp")
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_what_a_rank_says_of_its_end_is_the_commands_with_its_code(tmp_path: Path) -> None:
    """Also when the other, which only lost its partner, ends first."""
    said = 'rank == 1 and ranks.failed(4, "step 3: the loss is nan. Lower it.")'
    body = f"{_WITH_RANKS}{said}\ntime.sleep(rank)\nsys.exit(4 if rank else 1)"
    with pytest.raises(VerificationFailed, match=r"^step 3: the loss is nan\. Lower it\.$"):
        _launch(tmp_path, body)


def test_a_rank_that_is_seen_killed_after_those_that_it_left_is_still_the_one_that_is_named(tmp_path: Path) -> None:
    """One that dumps its core ends later than its partner."""
    body = "time.sleep(rank)\nos.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(1)"
    with pytest.raises(RankLost, match="rank 1: was killed by SIGKILL"):
        _launch(tmp_path, body)


def test_one_that_nccl_ended_since_it_lost_a_partner_does_not_hide_the_partner(tmp_path: Path) -> None:
    body = "os.kill(os.getpid(), signal.SIGKILL if rank else signal.SIGABRT)"
    with pytest.raises(RankLost, match="rank 1: was killed by SIGKILL"):
        _launch(tmp_path, body)


def _tell(store: dist.Store, key: str, code: int, text: str) -> None:
    store.set(key, json.dumps({"rank": 0, "host": "here", "code": code, "text": text}))


def test_a_killed_rank_goes_before_what_its_partners_say_of_it_but_not_before_a_reason() -> None:
    store = store_server()
    assert str(_cause(store, 1, 1)) == "rank 1: ended with 1. Its lines above say why."
    _tell(store, LOST, 1, "GateAborted: another rank is gone, or the way to it (NCCL error)")
    said = "rank 0: GateAborted: another rank is gone, or the way to it (NCCL error)."
    assert str(_cause(store, 1, 1)) == said  # NCCL's own failures look so as well: it may be all there is
    assert str(_cause(store, 1, -9)).startswith("rank 1: was killed by SIGKILL. The same command")
    assert str(_cause(store, 1, -40)).startswith("rank 1: was killed by signal 40. The same")  # real-time, no name
    _tell(store, FAILED, 1, "RuntimeError: connectFullMesh failed")
    assert str(_cause(store, 1, 1)) == "rank 0: RuntimeError: connectFullMesh failed."
    killed = str(_cause(store, 1, -9))
    assert killed.startswith("rank 1: was killed by SIGKILL (rank 0 said: RuntimeError: connectFullMesh failed). The")
    _tell(store, FAILED, 4, "step 3: the loss is nan. Lower it.")
    cause = _cause(store, 1, -6)
    assert (str(cause), cause.exit_code) == ("step 3: the loss is nan. Lower it.", 4)


def test_a_rank_that_says_nothing_is_named_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="ended with 7") as caught:
        _launch(tmp_path, "sys.exit(7 if rank else 0)")
    assert str(caught.value) == "rank 1: ended with 7. Its lines above say why."


@pytest.mark.slow
def test_a_signal_is_passed_on_by_the_store_and_waits_for_what_the_ranks_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        _WITH_RANKS
        + """
while not ranks.store.check(["stop"]):
    time.sleep(0.05)
time.sleep(1)
ranks.failed(5, "run: stopped after step 4 of 6, saved. Again.")
sys.exit(5)
"""
    )
    supervise = launch_module._supervise

    def signalled(*given: Any) -> tuple[int, int] | None:
        signal.raise_signal(signal.SIGTERM)  # its handler is there: one that comes too early or late would end pytest
        return supervise(*given)

    monkeypatch.setattr(launch_module, "_supervise", signalled)
    with pytest.raises(Interrupted) as caught:
        _launch(tmp_path, body)
    assert str(caught.value) == "run: stopped after step 4 of 6, saved. Again."
