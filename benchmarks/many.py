"""Several GPUs: one drafter on one of them, and as many as there are, by threads and by processes. One table.

    python -m benchmarks.many [--json FILE] [--gpus N] [--apart]

Each line is a whole `train` (benchmarks/many_runs.py) with features online: every GPU has a target and a drafter. A
drafter takes micro-batches of the same size everywhere. Strong scaling: the rows of a step stay the same and are split,
N micro-batches of one drafter or one of each of N. Weak scaling: each drafter has one micro-batch a step, so N have N
times the rows. Efficiency is tokens/s over N times those of one GPU. The target, of SmolLM2's size, and its answers are
random, so losses say only whether the arrangements agree: threads, processes and processes that shard the optimizer bit
for bit, one drafter within rounding. Memory must be the same to the byte on each GPU between all lines after the
first tenth, also over a checkpoint; the table has all GPUs' added up.

--apart adds a line with drafters on some GPUs and targets on the others. benchmarks/cold.py is about starts.

Exit code 4 when an arrangement failed or gave what a run would refuse; 2 when the GPUs are not there.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.header import check_record, header
from benchmarks.many_runs import SIZES, Laboratory, Line, arrangements
from dflash.errors import DFlashError

LIMIT_SECONDS = 120.0
"""Of one arrangement, if not said otherwise."""
AIM = 0.9
"""Efficiency that the project wants from 1 to 4 drafters."""
LARGEST_DIFFERENCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Of a loss, over one drafter's: sums are rounded in another order, and training goes on from there."""
SAME_BITS = ("threads", "processes", "sharded")
"""Arrangements that add up the same gradients in the same order."""
HEAD = ("", "rows", "tokens/s", "strong", "weak", "built", "loaded", "warm-up s", "memory", "GiB", "losses")


def efficiency(line: Line, base: Line) -> float | None:
    """Return a line's tokens/s over those that its GPUs would have if each did as well as `base`, which has one; None
    when either failed, or when drafters have neither the same rows a step together nor each."""
    whole = line.gpus * base.tokens_per_second
    alike = line.rows in (base.rows, base.rows * line.drafters)
    return round(line.tokens_per_second / whole, 4) if whole and alike and not line.failed else None


def difference(line: Line, base: Line) -> float:
    """Return the largest difference of a loss, over the base's; infinity where they are not of the same steps, or one
    is no number."""
    if not line.losses or len(line.losses) != len(base.losses) or not all(map(math.isfinite, line.losses)):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(line.losses, base.losses, strict=True))


def record_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the lines for JSON, with what they say beside each other. The first two are the bases."""
    strong, weak, *_ = lines
    records = []
    for line in lines:
        own = asdict(line)
        manifest = own.pop("manifest")
        built, loaded = line.compiled
        known = ("workers", "targets", "replicas_equal", "compiles_after_warmup", "eager_bodies", "training")
        split = line not in (strong, weak)
        own |= {
            "strong_efficiency": efficiency(line, strong) if split else None,
            "weak_efficiency": efficiency(line, weak) if split else None,
            "loss_difference": difference(line, strong) if split and line.losses and strong.losses else None,
            "built": built,
            "loaded": loaded,
            "warm_up_seconds": max((s["warmup_seconds"] for s in manifest.get("sessions", ())), default=None),
            "manifest": {name: manifest[name] for name in known if name in manifest},
        }
        records.append(own)
    return records


def faults(lines: Sequence[Line], precision: str) -> list[str]:
    """Return a sentence for everything that failed or that a run would refuse."""
    strong, _, *others = lines
    found = [f"{line.name}: {line.failed}" for line in lines if line.failed]
    for line in (line for line in lines if not line.failed):
        for key, what in (("compiles_after_warmup", "compiles after the warm-up"), ("eager_bodies", "eager bodies")):
            if line.manifest[key]:
                found.append(f"{line.name}: {line.manifest[key]} {what}")
        if not line.manifest["replicas_equal"]:
            found.append(f"{line.name}: the replicas ended different")
        if line.memory and line.memory["verdict"] != "pass":
            found.append(f"{line.name}: memory was not flat: {line.memory['value']}")
    limit = LARGEST_DIFFERENCE[precision]
    for line in (line for line in others if line.losses and strong.losses):
        if not difference(line, strong) <= limit:
            found.append(f"{line.name}: losses are {difference(line, strong):.2e} from one drafter's, above {limit:g}")
    by_name = {line.name: line.losses for line in others if line.losses}
    for one, other in combinations([name for name in SAME_BITS if name in by_name], 2):
        if by_name[one] != by_name[other]:
            found.append(f"{one} and {other} gave different losses, and should give the same bits")
    return found


def words(lines: Sequence[Line]) -> list[str]:
    """Return strong and weak scaling, and who waited, in sentences."""
    strong, weak, *others = lines
    said = []
    for line in (line for line in others if not line.failed):
        for what, base in (
            (f"strong scaling, the {line.rows} rows of a step split", strong),
            (f"weak scaling, {weak.rows} rows a step for each drafter", weak),
        ):
            if (found := efficiency(line, base)) is not None:
                aim = f"; the aim is {AIM} from 1 to 4" if line.gpus <= 4 else ""
                said.append(
                    f"{line.name}, {what}: {found * line.gpus:.2f} times the tokens/s of one, with {line.gpus}: "
                    f"efficiency {found:.2f}{aim}"
                )
    for line in (line for line in lines if not line.failed):
        said.append(f"{line.name}: waited: " + ", ".join(f"{who} {share:.1%}" for who, share in line.waited.items()))
    return said


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table's lines; an arrangement that failed is one that says so."""

    def cells(record: dict[str, Any]) -> list[str]:
        shares = [record["strong_efficiency"], record["weak_efficiency"]]
        gate, off = record["memory"], record["loss_difference"]
        return [
            str(record["rows"]),
            f"{record['tokens_per_second']:,.0f}",
            *("-" if share is None else f"{share:.2f}" for share in shares),
            str(record["built"]),
            str(record["loaded"]),
            "-" if record["warm_up_seconds"] is None else f"{record['warm_up_seconds']:.1f}",
            "-" if gate is None else "flat" if gate["verdict"] == "pass" else "CHANGED",
            "-" if record["allocated_gib"] is None else f"{record['allocated_gib']:.1f}",
            "-" if off is None else "equal" if off == 0 else f"{off:.1e}",
        ]

    lines = [f"{HEAD[0]:28} " + " ".join(f"{name:>9}" for name in HEAD[1:])]
    for record in records:
        name = f"{record['name']} ({record['drafters']} drafter{'s' if record['drafters'] > 1 else ''})"
        rest = f"FAILED: {record['failed']}" if record["failed"] else " ".join(f"{c:>9}" for c in cells(record))
        lines.append(f"{name:28} {rest}")
    return lines


def run(device: str, count: int, options: argparse.Namespace, command: str) -> int:
    """Run everything, print sentences and then the table, write the record, and return the exit code."""
    about = header(command, torch.device("cuda:0" if device == "cuda" else "cpu"))
    size, lines = SIZES[device], list[Line]()
    with tempfile.TemporaryDirectory(prefix="dflash-many-") as folder:
        laboratory = Laboratory(Path(folder), device, count, options.limit)
        for arrangement in arrangements(device, count, options.apart):
            line = laboratory.measure(arrangement)
            print(f"{line.name}: {line.failed or 'done'} ({line.seconds:.0f} s)", flush=True)
            lines.append(line)
    records, found = record_of(lines), faults(lines, size.precision)
    if options.json:
        result = {**about, "count": count, "size": asdict(size), "lines": records}
        options.json.write_text(json.dumps({**result, "faults": found}, indent=2) + "\n", encoding="utf-8")
    for fault in found:
        print(fault, file=sys.stderr, flush=True)
    print("\n".join([*words(lines), f"{about['device']} x {count}", *table(records)]), flush=True)
    return 4 if found else 0


def checked(options: argparse.Namespace) -> tuple[str, int]:
    """Return the device's kind and how many of it. Raises DFlashError for what is not there."""
    gpus, device = torch.cuda.device_count(), "cpu" if options.device == "cpu" else "cuda"
    count: int = options.gpus or (2 if device == "cpu" else gpus)
    if device == "cuda" and gpus < max(2, count):
        what = f"{max(2, count)} GPUs are needed, {gpus} of them here"
        raise DFlashError(what, where="--gpus", fix="Ask for fewer, 2 at least, or try it with --device cpu.")
    if count < 2:
        raise DFlashError(f"{count} is too few to compare one drafter with", where="--gpus", fix="Take 2 or more.")
    check_record(options.json)
    if options.limit <= 0:
        raise DFlashError("has to be above 0", where="--limit", fix="Leave it out.")
    return device, count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--gpus", type=int, default=0, help="default: all that are here; of the CPU 2 drafters")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try the script")
    parser.add_argument("--apart", action="store_true", help="also drafters on some GPUs, targets on the others")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of one run; default %(default)s")
    options = parser.parse_args(arguments)
    try:
        device, count = checked(options)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    return run(
        device,
        count,
        options,
        f"python -m benchmarks.many {shlex.join(sys.argv[1:] if arguments is None else arguments)}",
    )


if __name__ == "__main__":
    sys.exit(main())
