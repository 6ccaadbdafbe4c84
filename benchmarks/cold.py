"""Cold starts: a training by drafter threads with an empty compile cache, again and again, behind the gate and without.

    python -m benchmarks.cold [--starts 20] [--gate on|off|both] [--gpus N] [--drafters N] [--json FILE]

Each start is a process of its own that trains a few steps (benchmarks/many_runs.py: SmolLM2's width, one drafter layer,
features online). All its threads find nothing compiled. Counted: those that crashed, gave no result in time, ran a
drafter's body as plain Python, or compiled after the warm-up. Steps are not CUDA graphs here: without the gate two
threads would record at once, which CUDA refuses, and that is not what is asked.

Exit code 4 when a start behind the gate did not go well, 2 when the GPUs are not there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.header import check_record, header
from benchmarks.many_runs import Arrangement, Laboratory, devices, once
from dflash.errors import DFlashError
from pipeline.runs import read_manifest

LIMIT_SECONDS = 120.0
"""Of one start, if not said otherwise."""
DRAFTERS = 3


@dataclass
class Counts:
    """What starts with the gate, or without it, came to."""

    gate: bool
    starts: int = 0
    well: int = 0
    crashed: int = 0
    hung: int = 0
    eager: int = 0
    late: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each start: process, loading, compilation, training."""
    said: list[str] = field(default_factory=list)
    """Last lines of those that ended badly, without repeats."""

    def add(self, failed: str, manifest: dict[str, Any], seconds: float) -> None:
        """Count a start that `failed`, by Laboratory.start's word for it, or left a manifest."""
        found = {
            "crashed": failed.startswith("ended"),
            "hung": failed.startswith("no result"),
            "eager": bool(manifest.get("eager_bodies")),
            "late": bool(manifest.get("compiles_after_warmup")),
        }
        for what, happened in found.items():
            setattr(self, what, getattr(self, what) + happened)
        self.starts += 1
        self.well += not any(found.values())
        self.seconds.append(round(seconds, 1))
        if failed and failed not in self.said:
            self.said.append(failed)


def start_cold(laboratory: Laboratory, arrangement: Arrangement, counts: Counts) -> None:
    """Start once and count it. Answers are made once, for all; what is compiled is not kept."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cold-", dir=laboratory.folder) as folder:
        cache = Path(folder)
        for kind in ("data", "models"):
            (laboratory.folder / "cache" / kind).mkdir(parents=True, exist_ok=True)
            (cache / kind).symlink_to(laboratory.folder / "cache" / kind)
        name = f"name=cold-{'gate' if counts.gate else 'none'}-{counts.starts}"
        size, flags = laboratory.size, () if counts.gate else ("--no-gate",)
        failed, run = laboratory.start([*arrangement.overrides(size), *size.cold, name], cache, *flags)
    counts.add(failed, read_manifest(run / "train.json") or {}, time.perf_counter() - begin)


def sharing(device: str, count: int, drafters: int) -> Arrangement:
    """Return `drafters` threads dealt over `count` GPUs, each of which has a target."""
    names = devices(device, count)
    return Arrangement("cold", once(names), tuple(names[i % count] for i in range(drafters)), "threads", drafters)


def table(found: Sequence[Counts]) -> list[str]:
    """Return a line for the starts with the gate and one for those without."""
    names = ("starts", "well", "crashed", "hung", "eager", "late")
    lines = [f"{'cold starts':18} " + " ".join(f"{name:>8}" for name in (*names, "seconds each"))]
    for counts in found:
        cells = [f"{getattr(counts, name):>8}" for name in names]
        seconds = f"{min(counts.seconds):.0f} to {max(counts.seconds):.0f}" if counts.seconds else "-"
        lines.append(f"{'behind the gate' if counts.gate else 'without it':18} {' '.join(cells)} {seconds:>12}")
    return lines


def faults(found: Sequence[Counts]) -> list[str]:
    """Return a sentence for starts behind the gate that did not go well."""
    return [
        f"{counts.starts - counts.well} of {counts.starts} cold starts behind the gate did not go well: "
        + ("; ".join(counts.said) or "plain Python, or a late compile")
        for counts in found
        if counts.gate and counts.well < counts.starts
    ]


def checked(options: argparse.Namespace) -> tuple[str, int]:
    """Return the device's kind and how many of it. Raises DFlashError for what is not there."""
    gpus, device = torch.cuda.device_count(), options.device
    count: int = options.gpus or (options.drafters if device == "cpu" else max(1, min(gpus, options.drafters)))
    if options.gpus < 0:
        raise DFlashError("has to be above 0", where="--gpus", fix="Leave it out.")
    if device == "cuda" and gpus < count:
        raise DFlashError(f"{count} GPUs are needed, {gpus} of them here", where="--gpus", fix="Try --device cpu.")
    if options.drafters < max(2, count):
        what = f"{options.drafters} drafters on {count} of {device}"
        raise DFlashError(what, where="--drafters", fix="Take 2 or more, and as many as GPUs: one thread has no race.")
    if options.starts < 1 or options.limit <= 0:
        raise DFlashError("has to be above 0", where="--starts, --limit", fix="Leave it out.")
    check_record(options.json)
    return device, count


def run(device: str, count: int, options: argparse.Namespace, command: str) -> int:
    """Start everything, print a line after each and the table last, keep the record, and return the exit code."""
    about = header(command, torch.device("cuda:0" if device == "cuda" else "cpu"))
    kinds = {"on": (True,), "off": (False,), "both": (True, False)}[options.gate]
    found = [Counts(gate) for gate in kinds]
    arrangement = sharing(device, count, options.drafters)
    with tempfile.TemporaryDirectory(prefix="dflash-cold-") as folder:
        laboratory = Laboratory(Path(folder), device, options.drafters, options.limit)
        for counts in found:
            for number in range(options.starts):
                start_cold(laboratory, arrangement, counts)
                print(f"{number + 1} of {options.starts}: {table([counts])[1]}", flush=True)
                if options.json:  # after each: who ends a long benchmark keeps what there is
                    record = {"drafters": options.drafters, "count": count, "counts": [asdict(c) for c in found]}
                    text = json.dumps({**about, **record, "faults": faults(found)}, indent=2)
                    options.json.write_text(text + "\n", encoding="utf-8")
    for fault in (said := faults(found)):
        print(fault, file=sys.stderr, flush=True)
    print("\n".join([f"{about['device']} x {count}, {options.drafters} drafter threads", *table(found)]), flush=True)
    return 4 if said else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=20, help="of each kind; default %(default)s")
    parser.add_argument("--gate", choices=("on", "off", "both"), default="both")
    parser.add_argument("--gpus", type=int, default=0, help="default: one for each drafter, or all that are here")
    parser.add_argument("--drafters", type=int, default=DRAFTERS, help="threads; default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try the script")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of one start; default %(default)s")
    parser.add_argument("--json", type=Path, help="also write the results to this file, after each start")
    options = parser.parse_args(arguments)
    try:
        device, count = checked(options)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    words = shlex.join(sys.argv[1:] if arguments is None else arguments)
    return run(device, count, options, f"python -m benchmarks.cold {words}")


if __name__ == "__main__":
    sys.exit(main())
