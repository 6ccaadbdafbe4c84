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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.interrupts import StopRequest
from pipeline.ranks import FAILED, MANIFEST, STOP, RankLost, namespace, same_error
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
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    store = namespace(server, "0")
    environ = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
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
            first = _supervise(ranks, store, stop)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
    if first is not None:
        raise _cause(store, *first)
    manifest: dict[str, Any] = json.loads(store.get(MANIFEST))
    return manifest


def _supervise(
    ranks: Sequence[subprocess.Popen[bytes]], store: dist.Store, stop: StopRequest
) -> tuple[int, int] | None:
    """Wait until all ranks ended, or one did badly and the others had time to. Returns that one and its code."""
    told, first, ends = False, None, 0.0
    while any(process.poll() is None for process in ranks):
        if stop.requested and not told:
            store.set(STOP, "1")
            told = True
        if first is None:
            first = _first_failed(ranks)
            ends = time.monotonic() + GRACE_SECONDS
        elif time.monotonic() > ends:
            return first
        time.sleep(POLL_SECONDS)
    return first or _first_failed(ranks)


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Return a rank that ended badly, and its code; one that was killed before one that says that another is gone."""
    failed = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    return min(failed, key=lambda found: (found[1] >= 0, found[0])) if failed else None


def _cause(store: dist.Store, rank: int, code: int) -> BaseException:
    """Return what ended the ranks: what the first one that could say so said, else how `rank` ended."""
    if store.check([FAILED]):
        found: Mapping[str, Any] = json.loads(store.get(FAILED))
        text = found["text"] if found["code"] in (2, 3, 4, 5) else f"rank {found['rank']}: {found['text']}"
        return same_error(found["code"], text)
    if code < 0:
        name = signal.Signals(-code).name
        fix = "The same command goes on from the last checkpoint." + (
            " A kernel that is out of memory kills so." if name == "SIGKILL" else ""
        )
        return RankLost(f"was killed by {name}", where=f"rank {rank}", fix=fix)
    return RankLost(f"ended with {code}", where=f"rank {rank}", fix="Its lines above say why.")
