"""Is this environment the one that the lock describes, and can it compile? `python -m env.doctor`, or `invoke doctor`.

Runs with the runtime's Python. Exit 0 when there is no error, 3 otherwise; one line per finding. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from env.caches import OWNED_VARIABLES, CacheDirs
from env.errors import EnvError
from env.installed import Finding, check_files, compare_with_lock, find_distributions
from env.locks import parse_lock

MIN_FREE_BYTES = {"cache": 1 << 30, "runs": 1 << 30}
"""Bytes: the quickstart's converted target, prompts and features take about 0.7 GB of the cache."""
_SWITCHES_OFF = {
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "a failed compile runs eagerly in silence",
    "TRITON_INTERPRET": "Triton kernels run in an interpreter",
}
_WATCHED_PREFIXES = ("TORCH", "PYTORCH", "TRITON")
_WATCHED_NAMES = ("LD_PRELOAD", "PYTHONPATH")


def preflight(
    root: Path,
    *,
    lock: Path | None = None,
    caches: CacheDirs | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Return everything that is not as it should be, errors first; an empty list means fit.

    lock   default lockfiles/runtime.txt of the root; names in lockfiles/dev.txt are never strangers
    """
    variables = os.environ if environ is None else environ
    findings = [
        *check_lock(root, lock or root / "lockfiles" / "runtime.txt"),
        *check_variables(variables),
        *check_compiler(variables, Path(sysconfig.get_path("include"))),
        *check_disk(caches or CacheDirs.from_environment(root, variables)),
    ]
    return sorted(findings, key=lambda finding: finding.level != "error")


def check_lock(root: Path, lock: Path, path: list[str] | None = None) -> list[Finding]:
    """Return how the distributions on `path` (default: sys.path) differ from the lock, torch's files included.

    Raises EnvError for a lock that is missing or is none.
    """
    if not lock.is_file():
        raise EnvError("no such lock", where=str(lock), fix="lockfiles/runtime.txt is the usual one.")
    dev = root / "lockfiles" / "dev.txt"
    found = find_distributions(path)
    allowed = parse_lock(dev) if dev.is_file() else ()
    return [*compare_with_lock(found, parse_lock(lock), lock_name=lock.name, also_allowed=allowed), *check_files(found)]


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return leftover variables that change what torch, Triton or the loader do; those that we overwrite do not."""
    findings = []
    for name in sorted(environ):
        value = environ[name]
        if not value or name in OWNED_VARIABLES or not (name.startswith(_WATCHED_PREFIXES) or name in _WATCHED_NAMES):
            continue
        if name in _SWITCHES_OFF and value != "0":
            what = f"is {value!r}: {_SWITCHES_OFF[name]}"
            findings.append(Finding(level="error", what=what, where=name, fix=f"Run: unset {name}"))
        else:
            what = f"is set to {value[:80]!r} and can change the run"
            findings.append(
                Finding(level="warning", what=what, where=name, fix=f"Unless it is meant, run: unset {name}")
            )
    return findings


def check_compiler(environ: Mapping[str, str], include: Path) -> list[Finding]:
    """Return what is missing of the compilers and the Python headers that Inductor and Triton need at run time.

    include   the folder of this interpreter's Python.h
    """
    findings = []
    cxx, default = environ.get("CXX"), "clang++" if sys.platform == "darwin" else "g++"
    if shutil.which(cxx or default, path=environ.get("PATH", os.defpath)) is None:
        what = f"CXX names {cxx}, which is not there" if cxx else f"no C++ compiler ({default})"
        fix = "On Debian: apt-get install g++; elsewhere set CXX to one."
        findings.append(Finding(level="error", what=what, where="PATH", fix=fix))
    if not (include / "Python.h").is_file():
        fix = "On Debian: apt-get install python3-dev, for the Python that runs this."
        findings.append(Finding(level="error", what="no Python.h", where=str(include), fix=fix))
    return findings


def check_disk(caches: CacheDirs, minimum: Mapping[str, int] | None = None) -> list[Finding]:
    """Return the places that cannot be written or have less than `minimum` bytes free (default MIN_FREE_BYTES)."""
    findings = []
    needs = MIN_FREE_BYTES if minimum is None else minimum
    for name, variable, place in (("cache", "DFLASH_CACHE", caches.root), ("runs", "DFLASH_RUNS", caches.runs)):
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            fix = f"Set {variable} to a folder that is."
            findings.append(Finding(level="error", what="is not a writable folder", where=str(existing), fix=fix))
            continue
        free = shutil.disk_usage(existing).free
        if free < needs[name]:
            what = f"{free / 2**30:.1f} GiB free, {needs[name] / 2**30:.1f} GiB needed for {name}"
            fix = f"Free some, or set {variable} to another disk."
            findings.append(Finding(level="error", what=what, where=str(existing), fix=fix))
    return findings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.doctor", description="Compare this environment with the lock.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the findings to FILE")
    parser.add_argument(
        "--lock", metavar="FILE", type=Path, help="lock to compare with (default lockfiles/runtime.txt)"
    )
    options = parser.parse_args(argv)
    root = Path(__file__).resolve().parent.parent
    try:
        findings = preflight(root, lock=options.lock)
    except EnvError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(
            json.dumps([asdict(finding) for finding in findings], indent=2) + "\n", encoding="utf-8"
        )
    for finding in findings:
        print(finding, file=sys.stderr if finding.level == "error" else sys.stdout)
    errors = sum(finding.level == "error" for finding in findings)
    print(f"doctor: {errors} errors, {len(findings) - errors} warnings")
    return 3 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
