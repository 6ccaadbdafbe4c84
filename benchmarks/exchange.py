"""What the end of a step costs between processes, a GPU each: adding up the gradients, and the optimizer.

    python -m benchmarks.exchange [--json FILE] [--ranks N] [--case reference] [--device cuda] [--limit SECONDS]

N processes (benchmarks/exchange_ranks.py) have the same drafter of random weights and gradients of their own, and end
the same steps in three ways. "all-reduce" is the yardstick: torch's, of as many float32 numbers in one tensor, and no
optimizer. "whole" is RankExchange, where every rank updates all weights; "sharded" is ShardedExchange, where each
updates some.

A step begins when all ranks are there, and filling the gradients hides the host's start. Times are the slowest rank's
of each step, and of ten steps the median. "update" is the optimizer's step; "spread" is the part of it that sends the
sharded ones' weights, with the wait for who updates last. MB is what a GPU sends in a step by formula: (N-1)/N of 8
bytes a parameter; of sharded, 4 and a working weight. GB/s and ratio, to all-reduce's time, are of exchange and spread
together; "predicted" is pipeline/plan's time for those, by an H200's link. GiB is the steps' peak by torch's account,
without NCCL's buffers, on the fullest GPU.

Exit code 4 when whole and sharded, or ranks, ended with other working weights; 1 when a rank failed or took too long.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.exchange_ranks import ARMS, CASES, in_ranks, parameters_of
from benchmarks.flops import Case
from benchmarks.header import ROOT, check_record, header
from dflash.errors import DFlashError
from pipeline.plan.costs import exchange_seconds
from pipeline.plan.gpus import GPUS
from pipeline.ranks import RankLost
from pipeline.replica import DTYPES

LIMIT_SECONDS = 300.0
STEP_RECORD = "benchmarks/records/2026-11-30-step-h200.json"
HEAD = ("", "exchange ms", "update ms", "spread ms", "both ms", "MB", "GB/s", "ratio", "predicted ms", "GiB")


@dataclass(frozen=True)
class Arm:
    """What one way gave. What it has not is None: the yardstick no update, all but sharded no spread, the CPU no
    prediction and no peak."""

    name: str
    ms_exchange: float
    ms_update: float | None
    ms_spread: float | None
    """A part of the update."""
    ms_sending: float
    """Exchange and spread."""
    ms_both: float
    """Exchange and update."""
    sent_bytes: int
    gb_per_second: float
    ratio: float
    """Of the sending to all-reduce's."""
    predicted_ms: float | None
    gib_peak: float | None
    digests: list[str]
    """sha256 of each rank's working weights after the last step; the yardstick has none."""


def sent_bytes(parameters: int, world: int, size: int) -> int:
    """Return what a GPU sends of `size` bytes a parameter: all but its own part."""
    return size * parameters * (world - 1) // world


def slowest_ms(ranks: Sequence[Sequence[Sequence[float]]], pick: Callable[[Sequence[float]], float]) -> float:
    """Return the median over steps of the slowest rank's milliseconds; `pick` takes them from a step's pieces."""
    return statistics.median(max(map(pick, step)) for step in zip(*ranks, strict=True)) * 1e3


def arms_of(found: Sequence[Mapping[str, Any]], case: Case, cuda: bool) -> list[Arm]:
    """Return the arms from what each rank found."""
    arms, world, parameters = list[Arm](), len(found), sum(p.numel() for p in parameters_of(case))
    for name in ARMS:
        own = [rank[name] for rank in found]
        seconds, peaks = [rank["seconds"] for rank in own], [rank["peak"] for rank in own]
        pieces, sharded = len(seconds[0][0]), name == "sharded"
        sent = sent_bytes(parameters, world, 4 + DTYPES[case.precision].itemsize if sharded else 4 + 4)
        sending = slowest_ms(seconds, lambda step: step[0] + sum(step[2:3]))
        predicted = exchange_seconds(case.drafter(), GPUS["h200"], world, sharded=sharded) * 1e3
        arms.append(
            Arm(
                name,
                ms_exchange=slowest_ms(seconds, lambda step: step[0]),
                ms_update=slowest_ms(seconds, lambda step: sum(step[1:])) if pieces > 1 else None,
                ms_spread=slowest_ms(seconds, lambda step: step[2]) if pieces > 2 else None,
                ms_sending=sending,
                ms_both=slowest_ms(seconds, sum),
                sent_bytes=sent,
                gb_per_second=sent / sending / 1e6,
                ratio=sending / (arms[0].ms_sending if arms else sending),
                predicted_ms=predicted if cuda else None,
                gib_peak=max(peaks) / 2**30 if cuda else None,
                digests=[rank["digest"] for rank in own if "digest" in rank],
            )
        )
    return arms


def faults(arms: Sequence[Arm]) -> list[str]:
    """Return a line when working weights that should have the same bits have not."""
    _, whole, sharded = arms
    lines = [f"{arm.name}: the ranks ended with different weights" for arm in arms[1:] if len(set(arm.digests)) != 1]
    if not lines and whole.digests != sharded.digests:
        lines.append("whole and sharded ended with different weights, and should give the same bits")
    return lines


def share_of_step(arms: Sequence[Arm], record: Path) -> str:
    """Return what the sending is beside the reference case's forward and backward, in a sentence; "" when `record` does
    not hold it."""
    try:
        rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
        ms = next(float(row["ms_forward_backward"]) for row in rows if row["case"]["name"] == "reference")
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return ""
    shares = " and ".join(f"{arm.ms_sending / ms:.0%} ({arm.name})" for arm in arms[1:])
    return (
        f"exchange and spread are {shares} of the {ms:.1f} ms of a micro-batch's forward and backward ({STEP_RECORD})"
    )


def table(arms: Sequence[Arm]) -> list[str]:
    """Return the table's lines."""

    def number(value: float | None, places: int) -> str:
        return "-" if value is None else f"{value:,.{places}f}"

    def line(first: str, rest: Sequence[str]) -> str:
        return f"{first:12} " + " ".join(
            f"{cell:>{max(7, len(name))}}" for cell, name in zip(rest, HEAD[1:], strict=True)
        )

    lines = [line(HEAD[0], HEAD[1:])]
    for arm in arms:
        times = (arm.ms_exchange, arm.ms_update, arm.ms_spread, arm.ms_both)
        cells = [*(number(ms, 2) for ms in times), number(arm.sent_bytes / 1e6, 1), number(arm.gb_per_second, 1)]
        cells += [number(arm.ratio, 2), number(arm.predicted_ms, 2), number(arm.gib_peak, 2)]
        lines.append(line(arm.name, cells))
    return lines


def run(case: Case, device: str, world: int, options: argparse.Namespace, command: str) -> int:
    """Start the ranks, print sentences and then the table, write the record, and return the exit code."""
    try:
        found = in_ranks(world, case.name, device, options.limit)
    except RankLost as error:
        print(error, file=sys.stderr)
        return error.exit_code
    arms = arms_of(found, case, device == "cuda")
    lines = faults(arms)
    about = header(command, torch.device("cuda:0" if device == "cuda" else "cpu"))
    if options.json:
        result = {**about, "ranks": world, "case": asdict(case), "arms": [asdict(arm) for arm in arms], "faults": lines}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    said = [] if lines else [f"whole and sharded ended with the same weights on all ranks: {arms[1].digests[0][:16]}"]
    if device == "cuda" and case.name == "reference":
        said += filter(None, [share_of_step(arms, ROOT / STEP_RECORD)])
    print("\n".join([*said, f"{case.name}, {about['device']} x {world}", *table(arms)]), flush=True)
    return 4 if lines else 0


def checked(options: argparse.Namespace) -> tuple[Case, str, int]:
    """Return the case, the device's kind and the number of ranks. Raises DFlashError for what is not there."""
    device, gpus = options.device, torch.cuda.device_count()
    cuda = device == "cuda"
    world = options.ranks if options.ranks is not None else max(2, gpus) if cuda else 2
    if world < 2:
        raise DFlashError(f"{world} is too few to exchange anything", where="--ranks", fix="Take 2 or more.")
    if cuda and gpus < world:
        what = f"{world} GPUs are needed, {gpus} of them here"
        raise DFlashError(what, where="--ranks", fix="Ask for fewer, 2 at least, or try it with --device cpu.")
    name = options.case or ("reference" if cuda else "tiny")
    if name not in CASES:
        raise DFlashError(f"{name!r} is none of {', '.join(CASES)}", where="--case", fix="Choose one.")
    check_record(options.json)
    if not options.limit > 0:
        raise DFlashError(f"{options.limit:g} s is no time", where="--limit", fix="Leave it out.")
    return CASES[name], device, world


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--ranks", type=int, help="default: a rank for every GPU that is here; of the CPU 2")
    parser.add_argument("--case", default="", help=f"{', '.join(CASES)}; default: the first, of the CPU the last")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try the script")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for all; default %(default)s")
    options = parser.parse_args(arguments)
    try:
        case, device, world = checked(options)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    words = shlex.join(sys.argv[1:] if arguments is None else arguments)
    return run(case, device, world, options, f"python -m benchmarks.exchange {words}")


if __name__ == "__main__":
    sys.exit(main())
