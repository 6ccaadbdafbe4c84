"""The race laboratory, `invoke race [--json FILE]`: what threads and torch.compile do on this torch and this hardware,
without the gate and with it, as a table and as JSON that can be pasted into a bug report.

    python -m dflash.compile.lab --json race.json

Every run of a case is a process of its own with its own cold caches and a deadline. A process that passes its deadline
dumps the stack of every thread and is killed: that is a hang. The whole laboratory ends by --minutes whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RANDOM_RUNS = 3
DEADLINE_SECONDS = {"forced": 90.0, "random": 120.0}
ROOT = Path(__file__).resolve().parents[2]
_RESULT = "LAB-RESULT "
_CHILD = """
import faulthandler, runpy, sys
faulthandler.dump_traceback_later(float(sys.argv.pop(1)), exit=True)
runpy.run_module("dflash.compile.lab", run_name="__main__", alter_sys=True)
"""
"""The child's program: its clock starts before torch is imported, or a hang in there would leave no stacks."""
_BOOKS = threading.Lock()


@dataclass
class CaseResult:
    """The runs of one case in one mode; the last five are numbers of runs in which it was seen."""

    name: str
    schedule: str
    device: str
    gate: bool
    runs: int = 0
    crashed: int = 0
    hung: int = 0
    eager: int = 0
    wrong: int = 0
    died: int = 0
    """Processes that ended without a result, by a signal for example."""
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)

    def clean(self) -> bool:
        return self.runs > 0 and not (self.crashed or self.hung or self.eager or self.wrong or self.died)


def run_once(name: str, gated: bool, device: str, seed: int, deadline: float, result: CaseResult) -> None:
    """Run a case in a child process and add what happened to `result`; safe to call from several threads."""
    command = [sys.executable, "-c", _CHILD, str(deadline)]
    command += ["--child", name, "--device", device, "--seed", str(seed)]
    command += ["--gated"] if gated else []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash-race-") as folder:
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        environ = {
            **os.environ,
            **places,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        child = subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = child.communicate(timeout=deadline + 15)
            hung = "Timeout (" in err  # faulthandler's dump, after which the child ends itself
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            hung = True
    with _BOOKS:
        _book(result, out, err, hung, child.returncode)
        result.seconds = round(result.seconds + time.monotonic() - begin, 1)


def _book(result: CaseResult, out: str, err: str, hung: bool, returncode: int) -> None:
    result.runs += 1
    found: dict[str, Any] | None = None
    for line in out.splitlines():
        if line.startswith(_RESULT):
            found = json.loads(line.removeprefix(_RESULT))
    if found is not None:
        for key in ("crashed", "eager", "wrong"):
            setattr(result, key, getattr(result, key) + bool(found[key]))
        _keep(result, found["details"])
    elif hung:
        result.hung += 1
        _keep(result, ["stacks of all threads when the deadline passed:", *_stacks(err)])
    else:
        result.died += 1
        _keep(result, [f"ended with code {returncode}", *err.strip().splitlines()[-2:]])


def _keep(result: CaseResult, lines: Sequence[str]) -> None:
    """Keep the details of the first run that has any: later ones say the same."""
    if not result.details:
        result.details = list(lines)[:80]


def _stacks(err: str) -> list[str]:
    """Return faulthandler's dump, the innermost twelve frames of each thread, without paths of this machine."""
    kept: list[str] = []
    frames = 0
    for line in err[err.find("Timeout (") :].splitlines():
        frames = 0 if line.startswith(("Thread", "Current thread")) else frames + 1
        if frames <= 12:
            short = line.split("site-packages/")[-1] if "site-packages/" in line else line.strip()
            kept.append(short.replace(f"{ROOT}{os.sep}", ""))
    return kept


def run_laboratory(
    names: Sequence[str],
    devices: Sequence[str],
    *,
    random_runs: int = RANDOM_RUNS,
    jobs: int = 1,
    minutes: float = 25.0,
    layers: Sequence[bool] = (False, True),
    first_seed: int = 0,
    say: Any = print,
) -> list[CaseResult]:
    """Return a result for every case, device and layer (False: no gate); what the time did not reach has runs = 0.

    jobs   runs of one case at a time; `seconds` of a result stays the sum over its runs
    """
    from dflash.compile.lab_cases import CASES

    end = time.monotonic() + minutes * 60
    results = []
    for name in names:
        case = CASES[name]
        for device in devices:
            if device not in case.devices:
                continue
            for gated in layers:
                result = CaseResult(name, case.schedule, device, gated)
                seeds = range(first_seed, first_seed + (random_runs if case.schedule == "random" else 1))
                with ThreadPoolExecutor(jobs) as pool:

                    def run(seed: int, result: CaseResult = result, schedule: str = case.schedule) -> None:
                        deadline = min(DEADLINE_SECONDS[schedule], end - time.monotonic())
                        if deadline > 5:
                            run_once(result.name, result.gate, result.device, seed, deadline, result)

                    list(pool.map(run, seeds))
                results.append(result)
                say(_row(result))
    return results


def _row(result: CaseResult) -> str:
    counts = "  ".join(f"{getattr(result, key):>7}" for key in ("runs", "crashed", "hung", "eager", "wrong", "died"))
    mode = "gate" if result.gate else "none"
    return f"{result.name:<16} {result.schedule:<7} {result.device:<5} {mode:<5} {counts}  {result.seconds:>7.1f} s"


HEADER = (
    f"{'case':<16} {'sched.':<7} {'where':<5} {'layer':<5} "
    + "  ".join(f"{key:>7}" for key in ("runs", "crashed", "hung", "eager", "wrong", "died"))
    + f"  {'time':>9}"
)


def machine() -> dict[str, str]:
    """Return what a bug report needs to know about this machine."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "gpu": gpu,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="invoke race", description="Threads and torch.compile, with and without the gate."
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--case", action="append", help="run only this case; may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="run only on this device")
    parser.add_argument("--runs", type=int, default=RANDOM_RUNS, help="runs of each random case")
    parser.add_argument("--jobs", type=int, default=1, help="runs of one case at a time")
    parser.add_argument("--layer", choices=("none", "gate", "both"), default="both", help="with or without the gate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first random run")
    parser.add_argument("--minutes", type=float, default=25.0, help="end after this time whatever happens")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--gated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return _child(options)
    from dflash.compile.lab_cases import CASES, available

    names = options.case or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"--case: there is no case {unknown[0]!r}. Cases: {', '.join(CASES)}.", file=sys.stderr)
        return 2
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()), HEADER, sep="\n", flush=True)
    devices = available([options.device] if options.device else ["cpu", "cuda"])
    if not devices:
        print("--device: torch sees no such device here. Leave the option out.", file=sys.stderr)
        return 2
    results = run_laboratory(
        names,
        devices,
        random_runs=options.runs,
        jobs=max(1, options.jobs),
        minutes=options.minutes,
        layers={"none": [False], "gate": [True], "both": [False, True]}[options.layer],
        first_seed=options.seed,
        say=lambda line: print(line, flush=True),
    )
    for result in results:
        if result.details and not result.gate:
            print(f"\n{result.name} on {result.device}, without the gate:", *result.details[:40], sep="\n  ")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "cases": [asdict(r) for r in results]}, indent=2) + "\n")
    faults = [r for r in results if r.gate and not r.clean()]
    for result in faults:
        print(f"\nWITH the gate: {result.name} on {result.device} was not clean.", *result.details[:40], sep="\n  ")
    total = sum(result.gate for result in results)
    print(f"\n{total - len(faults)} of {total} cases are clean behind the gate.")
    return 4 if faults else 0


def _child(options: argparse.Namespace) -> int:
    """Run one case here, in a process that _CHILD began and whose deadline it set."""
    import faulthandler

    from dflash.compile.lab_cases import run_case

    outcome = run_case(options.child, options.gated, options.device, options.seed)
    faulthandler.cancel_dump_traceback_later()
    print(_RESULT + json.dumps(asdict(outcome)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # daemon threads may still be inside torch; nothing of theirs matters


if __name__ == "__main__":
    sys.exit(main())
