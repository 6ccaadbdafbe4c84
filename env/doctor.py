"""Is this environment the one that the lock describes, and can this machine run it? `python -m env.doctor`, or
`invoke doctor`.

Runs with the runtime's Python. Exit 0 when there is no error, 3 otherwise; one line per finding. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from env.caches import CacheDirs
from env.errors import EnvError
from env.files import atomic_write_json
from env.findings import Finding
from env.gpus import check_gpus
from env.importpath import START_PATH, check_shadowing, check_start_hooks
from env.installed import BUILD_TOOLS, check_files, compare_with_lock, find_distributions
from env.locks import parse_lock
from env.machine import check_clock, check_compilers, check_user, current_user_has_name
from env.storage import check_disk, check_file_systems, check_shared_memory, check_temporary
from env.variables import check_variables


def preflight(
    root: Path,
    *,
    lock: Path | None = None,
    caches: CacheDirs | None = None,
    environ: Mapping[str, str] | None = None,
    strict: bool = False,
) -> list[Finding]:
    """Return everything that is not as it should be, errors first; an empty list means fit.

    lock     default lockfiles/runtime.txt of the root; names in lockfiles/dev.txt are never strangers
    strict   what a run of ours survives, but not everything that is run here, is an error too (shared memory)
    """
    variables = os.environ if environ is None else environ
    with ThreadPoolExecutor(max_workers=2) as pool:  # child processes, while this one reads the installed files
        gpus = pool.submit(check_gpus, variables)
        compilers = pool.submit(check_compilers, variables, Path(sysconfig.get_path("include")))
        findings = [
            *check_lock(root, lock or root / "lockfiles" / "runtime.txt"),
            *check_variables(variables),
            *check_machine(root, variables, caches or CacheDirs.from_environment(root, variables)),
        ]
        findings += compilers.result()
        report = gpus.result()
    findings += report.findings
    if sys.platform == "linux":
        findings += check_shared_memory(Path("/dev/shm"), num_gpus=report.num_gpus, strict=strict)
    return sorted(findings, key=lambda finding: finding.level != "error")


def check_lock(root: Path, lock: Path, path: list[str] | None = None) -> list[Finding]:
    """Return how what can be imported from `path` (default: START_PATH) differs from the lock, file by file.

    Raises EnvError for a lock that is missing or is none.
    """
    if not lock.is_file():
        raise EnvError("no such lock", where=str(lock), fix="lockfiles/runtime.txt is the usual one.")
    path = list(START_PATH) if path is None else path
    dev = root / "lockfiles" / "dev.txt"
    found = find_distributions(path)
    pins, tools = parse_lock(lock), parse_lock(dev) if dev.is_file() else {}
    hashes = frozenset(re.findall(r"sha256:([0-9a-f]{64})", lock.read_text(encoding="utf-8")))
    allowed = {name: found[name][0] for name in {*pins, *tools, *BUILD_TOOLS} if name in found}
    return [
        *compare_with_lock(found, pins, lock_name=lock.name, lock_hashes=hashes, also_allowed=tools),
        *check_shadowing(found, pins, path),
        *check_start_hooks(allowed, path=path),
        *check_files(found, pins),
    ]


def check_machine(root: Path, environ: Mapping[str, str], caches: CacheDirs) -> list[Finding]:
    """Return what is wrong with the places, the user and the clock of this machine."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mountinfo = ""  # not Linux
    return [
        *check_user(environ, has_name=current_user_has_name(), uid=os.getuid()),
        *check_disk(caches),
        *check_temporary(environ),
        *check_file_systems(caches, mountinfo, in_image=environ.get("DFLASH_IN_IMAGE") == "1"),
        *check_clock(time.time(), root / "lockfiles" / "runtime.txt"),
    ]


def write_json(findings: list[Finding], path: Path) -> None:
    """Write the findings to a file, complete or not at all. Raises EnvError."""
    try:
        atomic_write_json(path, [asdict(finding) for finding in findings])
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise EnvError(what, where=str(path), fix="Give --json a file in a folder that is there.") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.doctor", description="Compare this environment with the lock.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the findings to FILE")
    parser.add_argument(
        "--lock", metavar="FILE", type=Path, help="lock to compare with (default lockfiles/runtime.txt)"
    )
    options = parser.parse_args(argv)
    root = Path(__file__).resolve().parent.parent
    try:
        findings = preflight(root, lock=options.lock, strict=True)
        for finding in findings:
            print(finding, file=sys.stderr if finding.level == "error" else sys.stdout)
        errors = sum(finding.level == "error" for finding in findings)
        print(f"doctor: {errors} errors, {len(findings) - errors} warnings")
        if options.json:
            write_json(findings, options.json)
    except EnvError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 3 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
