"""Stage 2 with topology.workers: processes on one host: starts a rank for each drafter, and ends when all have.

Not torchrun, which does the same for several hosts: it kills ranks that still save 30 s after a signal, and ends with 1
whatever they ended with. The ranks do not know the difference.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from pipeline.errors import PipelineError
from pipeline.interrupts import StopRequest
from pipeline.ranks import AGENT_STORE, FAILED, LOST, MANIFEST, REASONS, STOP, RankLost, said, same_error
from pipeline.runs import Run

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "pipeline")
POLL_SECONDS = 0.05
GRACE_SECONDS = 15.0
"""For the others to end by themselves when a rank ended badly; those that are left are killed."""


def launch(run: Run, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Return the manifest of a training by one process for each of topology.drafters on this host.

    SIGINT and SIGTERM are passed on by the store: all ranks then stop after the same step. Ranks are no part of this
    process's group, so a Ctrl-C reaches them once. Raises what ended the first of them that failed, with its code.
    """
    world = len(run.config.topology.drafters)
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    environ = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        AGENT_STORE: "True",
    }
    if sys.platform == "linux":
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it asks what address the host's name has
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with StopRequest() as stop:
            for rank in range(world):
                own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = [*command, "rank", str(run.folder), "--started-by-train"]
                ranks.append(subprocess.Popen(arguments, cwd=ROOT, env=own, start_new_session=True))
            failed = _supervise(ranks, store, stop)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
    if failed is not None:
        Console(stderr=True).show_cursor()  # which the bar of a killed rank leaves hidden
        raise _cause(store, *failed)
    manifest: dict[str, Any] = json.loads(store.get(MANIFEST))
    return manifest


def _supervise(
    ranks: Sequence[subprocess.Popen[bytes]], store: dist.Store, stop: StopRequest
) -> tuple[int, int] | None:
    """Wait until all ranks ended, or one did badly and the others had time to. Returns a bad one and its code: which is
    decided then, since one that was killed may be seen later than those it left, as one that dumps its core."""
    told, ends = False, 0.0
    while any(process.poll() is None for process in ranks):
        if stop.requested and not told:
            store.set(STOP, "1")
            told = True
        if not ends and _failed(ranks):
            ends = time.monotonic() + GRACE_SECONDS
        if ends and time.monotonic() > ends:
            break
        time.sleep(POLL_SECONDS)
    return _failed(ranks)


def _failed(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Return a rank that ended badly, and its code. Killed ones come first: those that they leave end badly as well,
    some by SIGABRT, with which NCCL ends a process that lost a partner."""
    found = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    return min(found, key=lambda one: (one[1] >= 0, one[1] == -signal.SIGABRT, one[0])) if found else None


def _cause(store: dist.Store, rank: int, code: int) -> PipelineError:
    """Return what ended the ranks: a reason that one told, else that `rank` was killed, else what the first that could
    say something said."""
    told, lost = said(store, FAILED), said(store, LOST)
    if told and told["code"] in REASONS:
        return same_error(told["code"], told["text"])
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:  # most real-time ones have none
            name = f"signal {-code}"
        also = f" (rank {told['rank']} said: {told['text']})" if told else ""
        fix = "The same command goes on from the last checkpoint." + (
            " A kernel that is out of memory kills so." if name == "SIGKILL" else ""
        )
        return RankLost(f"was killed by {name}{also}", where=f"rank {rank}", fix=fix)
    if found := told or lost:
        return same_error(found["code"], f"rank {found['rank']}: {found['text']}")
    return RankLost(f"ended with {code}", where=f"rank {rank}", fix="Its lines above say why.")
