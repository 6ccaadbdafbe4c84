"""The ranks of benchmarks/exchange.py: what each measures, and how they are started and ended."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.flops import CPU_CASES, CUDA_CASES, REFERENCE, Case
from benchmarks.header import ROOT
from benchmarks.peaks import Stopwatch
from dflash.model import DFlashDraftModel
from pipeline.config import TrainConfig
from pipeline.optim import MasterAdamW, Partners
from pipeline.processes import RankExchange
from pipeline.ranks import AGENT_STORE, FAILED, RankLost, Ranks, said
from pipeline.replica import DTYPES
from pipeline.sharded import Shard, ShardedExchange

COMMAND = (sys.executable, "-m", "benchmarks.exchange_ranks")
ARMS = ("all-reduce", "whole", "sharded")
CASES = {
    "reference": REFERENCE,
    "smollm2": next(replace(case, name="smollm2") for case in CUDA_CASES if case.target == "smollm2"),
    "tiny": replace(CPU_CASES[0], name="tiny"),
}
UNTIMED, TIMED = 3, 10
LEARNING_RATE = 1e-4
POLL_SECONDS, GRACE_SECONDS = 0.05, 2.0
"""The grace: one that was killed may be seen later than those that fail for want of it."""


class Marked:
    """A sharded optimizer's partners, with a mark before and after the weights' way."""

    def __init__(self, partners: Partners, watch: Stopwatch) -> None:
        self.complete, self._spread, self._watch = partners.complete, partners.spread, watch

    def spread(self) -> None:
        self._watch.mark()
        self._spread()
        self._watch.mark()


def drafter_of(case: Case, device: torch.device) -> DFlashDraftModel:
    """Return the case's drafter with random weights, the same in every process."""
    torch.manual_seed(0)
    with device:
        return DFlashDraftModel(case.drafter()).to(DTYPES[case.precision])


def fill(gradients: Sequence[Tensor], step: int, rank: int) -> None:
    """Fill a rank's gradients of a step."""
    generator = torch.Generator(gradients[0].device).manual_seed(1000 * step + rank)
    for gradient in gradients:
        gradient.normal_(generator=generator)


def digest(weights: Sequence[Tensor]) -> str:
    """Return the sha256 of all bytes."""
    found = hashlib.sha256()
    for weight in weights:
        found.update(weight.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


def parameters_of(case: Case) -> list[Tensor]:
    """Return the drafter's parameters, without memory."""
    with torch.device("meta"):
        return list(DFlashDraftModel(case.drafter()).parameters())


def measured(name: str, case: Case, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Return what an arm gave on this rank: seconds between the marks of each timed step, peak, digest."""
    watch, sums, world = Stopwatch(device), torch.ones(2, device=device), torch.tensor(float(ranks.world)).to(device)
    if name == "all-reduce":
        flat = [torch.empty(sum(p.numel() for p in parameters_of(case)), device=device)]
        return timed(ranks.rank, watch, device, lambda: flat, lambda: dist.all_reduce(flat[0]))
    model, shard = drafter_of(case, device), Shard(ranks.rank, ranks.world)
    kept = shard.keeps([p.numel() for p in model.parameters()]) if name == "sharded" else None
    optimizer = MasterAdamW(model, TrainConfig(steps=UNTIMED + TIMED), keeps=kept)
    replica: Any = SimpleNamespace(name=f"drafter-{ranks.rank}", device=device, optimizer=optimizer)
    exchange = RankExchange(ranks, replica) if kept is None else ShardedExchange(ranks, replica, shard)
    if isinstance(exchange, ShardedExchange):
        optimizer.partners = Marked(exchange, watch)
    work = (lambda: exchange.total(0, sums)), (lambda: optimizer.step(LEARNING_RATE, world))
    found = timed(ranks.rank, watch, device, lambda: optimizer.gradients, *work)
    return {**found, "digest": digest(optimizer.working)}


def timed(
    rank: int,
    watch: Stopwatch,
    device: torch.device,
    gradients: Callable[[], Sequence[Tensor]],
    *work: Callable[[], object],
) -> dict[str, Any]:
    """Return the seconds between the marks of each timed step, one before and one after each piece of work, and the
    peak of torch's memory; None on the CPU."""
    cuda, steps = device.type == "cuda", UNTIMED + TIMED
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        if cuda:
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))  # on the CPU: all are here
        fill(gradients(), step, rank)
        watch.mark()
        for piece in work:
            piece()
            watch.mark()
    seconds = watch.seconds()
    marks = (len(seconds) + 1) // steps
    cut = [seconds[step * marks : (step + 1) * marks - 1] for step in range(UNTIMED, steps)]
    return {"seconds": cut, "peak": torch.cuda.max_memory_allocated() if cuda else None}


def as_rank(case: Case, kind: str) -> int:
    """Measure all arms as one of the ranks, tell the parent by its store, and return the exit code."""
    ranks = Ranks()
    device = torch.device(kind, ranks.local) if kind == "cuda" else torch.device(kind)
    try:
        ranks.join(device)
        found = {}
        for name in ARMS:
            found[name] = measured(name, case, ranks, device)
            gc.collect()
            torch.cuda.empty_cache()  # nothing without a GPU
        ranks.put("found", found)
        ranks.leave()
    except Exception as error:
        ranks.failed(1, " ".join(f"{type(error).__name__}: {error}".split())[:300])
        return 1
    return 0


# -- in their parent ---------------------------------------------------------------------------------------------------


def in_ranks(world: int, case: str, kind: str, limit: float) -> list[dict[str, Any]]:
    """Return what each rank found, by arm. Raises RankLost when one failed or all took more than `limit` seconds; none
    is left then."""
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    environ = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environ |= {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), AGENT_STORE: "True"}
    environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        ranks = list[subprocess.Popen[str]]()
        try:
            for rank, output in enumerate(outputs):
                own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [*COMMAND, case, kind]
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=output, text=True))
            codes = _ended(ranks, limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise RankLost(_cause(store, codes, outputs))
        if None in codes:
            raise RankLost(f"no result in {limit:g} s", where="--limit")
        return [said(store, f"found/{rank}") for rank in range(world)]


def _ended(ranks: Sequence[subprocess.Popen[str]], limit: float) -> list[int | None]:
    """Return the ranks' exit codes when all ended, one failed and the others had time to, or the limit is over: None of
    those that still run."""
    ends, failed = time.monotonic() + limit, False
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < ends:
        if any(codes) and not failed:
            ends, failed = min(ends, time.monotonic() + GRACE_SECONDS), True
        time.sleep(POLL_SECONDS)
    return codes


def _cause(store: dist.Store, codes: Sequence[int | None], outputs: Sequence[IO[str]]) -> str:
    """Return which rank ended the others: one that was killed (not by SIGABRT, with which NCCL ends what lost a
    partner), else the first that said why, else any by its last line."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and code != -signal.SIGABRT:
            return f"rank {rank} was killed by signal {-code}"
    if told := said(store, FAILED):
        return f"rank {told['rank']}: {told['text']}"
    rank = next(rank for rank, code in enumerate(codes) if code)
    outputs[rank].seek(0)
    lines = [" ".join(line.split()) for line in outputs[rank] if line.strip()]
    return f"rank {rank} ended with {codes[rank]}: {(lines or ['it said nothing'])[-1][:300]}"


if __name__ == "__main__":
    os._exit(as_rank(CASES[sys.argv[1]], sys.argv[2]))  # at once: NCCL's threads may wait for ranks that are gone
