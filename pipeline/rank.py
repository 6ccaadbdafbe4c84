"""`python -m pipeline rank`: one process of a training, started by `invoke train` or, on several hosts, by torchrun."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from env.errors import EnvError
from pipeline.errors import ConfigError
from pipeline.files import atomic_write_json
from pipeline.ranks import AGENT_STORE, MANIFEST, REASONS, Ranks, is_secondary, same_error
from pipeline.runs import Run, lock_run, read_manifest
from pipeline.stages import run_stages
from pipeline.train import train_as

Explain = Callable[[BaseException], tuple[int | None, str]]
"""An error's exit code, None for one that is our own fault, and the line that a person reads."""
Starter = list[Any]
"""Who started a rank: host, process, when that began."""


def work(run: Run, *, started_by_train: bool, source_hash: str, explain: Explain) -> int:
    """Train as this rank and return the exit code; say why it failed, here and to the others.

    Raises ConfigError for torchrun's variables, and RankLost where there is no store.
    """
    if not started_by_train and os.environ.get(AGENT_STORE) == "True":
        raise ConfigError(
            "torchrun keeps one store for all attempts, in which ranks of an old and of a new one would meet",
            where="rank",
            fix="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun, with --rdzv-backend c10d.",
        )
    ranks = Ranks()
    well, held = False, ExitStack()
    starters: list[Starter] = []
    try:
        if not started_by_train:
            ranks.put("starter", _starter(ranks.host))
            if ranks.leads:
                held.enter_context(lock_run(run))
                starters = sorted(map(list, {tuple(one) for one in ranks.all("starter")}))
                _refuse_again(run, ranks, starters)
        check_build(ranks, source_hash)  # the others wait here until rank 0 has met all
        check_place(run, ranks)
        if started_by_train:
            manifest = train_as(run, ranks)
            if ranks.leads:
                ranks.store.set(MANIFEST, json.dumps(manifest))
        else:
            _with_torchrun(run, ranks, source_hash)
        well = True
        return 0
    except BaseException as error:
        code, text = explain(error)
        secondary = is_secondary(error)
        if secondary:
            ranks.lost(text)
        else:
            ranks.failed(1 if code is None else code, text)
        if code is None and not secondary:
            traceback.print_exc()
        elif secondary or not started_by_train:
            ranks.say(text)
        if starters:  # else the run may be another's
            _note_reason(run, ranks, starters)
        return 1 if secondary or code is None else code
    finally:
        held.close()
        if not started_by_train:
            ranks.end(well)


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


# -- torchrun starts ranks again, whatever they ended with -------------------------------------------------------------


def _starter(host: str) -> Starter:
    """Return this host, the process that started this rank, and when that began, in ticks as /proc counts them.

    In containers the process is always 1. Where there is no /proc the time is missing.
    """
    parent, began = os.getppid(), 0
    with suppress(OSError):
        began = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
    return [host, parent, began]


def _reason_path(run: Run) -> Path:
    return run.folder / ".ended.json"


def _note_reason(run: Run, ranks: Ranks, starters: list[Starter]) -> None:
    """Keep for the next attempt why this one ended, if it would end so again."""
    found = ranks.reason()
    if found and found["code"] in REASONS:
        with suppress(OSError):  # a full disk: then the next attempt finds that out itself
            atomic_write_json(_reason_path(run), {**found, "starters": starters})


def _refuse_again(run: Run, ranks: Ranks, starters: list[Starter]) -> None:
    """Raise what ended the attempt before, if that was a reason and the same torchruns start the ranks again.

    A new torchrun means another attempt, and so do hosts that came, went or were replaced. torchrun's own count does
    not tell: one that finds a host waiting before it sees its rank's end starts the ranks again uncounted.
    """
    path = _reason_path(run)
    found = read_manifest(path)
    if found and found.get("starters") == starters:
        ranks.say("train: started again after an end that another attempt would not change")
        raise same_error(found["code"], found["text"])
    path.unlink(missing_ok=True)


# -- what the ranks must have in common --------------------------------------------------------------------------------


def check_build(ranks: Ranks, source_hash: str) -> None:
    """Raise EnvError when this rank runs other code than rank 0: the sums hide it, whoever made them."""
    own = {"source": source_hash[:12], "torch": torch.__version__, "cuda": torch.version.cuda}
    first = ranks.shared("build", own)
    if differs := [f"{name} {own[name]} and not {first[name]}" for name in own if own[name] != first[name]]:
        raise EnvError(
            f"has {', '.join(differs)} as rank 0", where=f"rank {ranks.rank} on {ranks.host}", fix="Use one image."
        )


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
