"""`python -m pipeline rank`: one process of a training, started by `invoke train` or, on several hosts, by torchrun."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pipeline.errors import ConfigError
from pipeline.ranks import MANIFEST, Ranks, is_secondary
from pipeline.runs import Run, lock_run
from pipeline.stages import run_stages
from pipeline.train import train_as

Explain = Callable[[BaseException], tuple[int | None, str]]
"""An error's exit code, None for one that is our own fault, and the line that a person reads."""


def work(run: Run, *, started_by_train: bool, source_hash: str, explain: Explain) -> int:
    """Train as this rank and return the exit code; say why it failed, here and to the others."""
    ranks = Ranks()
    try:
        check_place(run, ranks)
        if started_by_train:
            manifest = train_as(run, ranks)
            if ranks.leads:
                ranks.store.set(MANIFEST, json.dumps(manifest))
        else:
            _with_torchrun(run, ranks, source_hash)
        return 0
    except BaseException as error:
        code, text = explain(error)
        if is_secondary(error):
            if not started_by_train:
                ranks.say(text)
            return 1
        ranks.failed(1 if code is None else code, text)
        if code is None:
            traceback.print_exc()
        elif not started_by_train:
            ranks.say(text)
        return 1 if code is None else code


def _with_torchrun(run: Run, ranks: Ranks, source_hash: str) -> None:
    """Rank 0 keeps the run's folder as `train --stage train` does, which may find the stage finished."""
    if not ranks.leads:
        if ranks.shared("begin", None):
            train_as(run, ranks)
        return
    began = False

    def stage(run: Run) -> dict[str, Any]:
        nonlocal began
        began = True
        ranks.shared("begin", True)
        return train_as(run, ranks)

    with lock_run(run):
        run_stages(
            run,
            {"train": stage},
            only="train",
            start_from=None,
            force=False,
            source_hash=source_hash,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if not began:
        ranks.shared("begin", False)


def check_place(run: Run, ranks: Ranks) -> None:
    """Raise ConfigError when the processes are not those that the run's configuration speaks of."""
    topology, train = run.config.topology, run.config.train
    if topology.workers != "processes":
        raise ConfigError(f"is {topology.workers}", where="topology.workers", fix="A rank trains a run of processes.")
    if ranks.local_world != len(topology.drafters):
        raise ConfigError(
            f"{ranks.local_world} ranks on this host, topology.drafters names {len(topology.drafters)} devices",
            where=f"rank {ranks.rank}",
            fix="Start as many on each host: torchrun --nproc-per-node.",
        )
    pieces = train.batch_size // train.micro_batch
    if pieces % ranks.world:
        raise ConfigError(
            f"train.batch_size / train.micro_batch = {pieces} micro-batches do not divide among {ranks.world} ranks",
            where=f"rank {ranks.rank}",
            fix="Start another number of hosts; the order of samples does not depend on it.",
        )
