"""What the container starts: doctor, then the command. `docker run IMAGE train --config configs/quickstart.yaml`

    train, smoke, generate, ...       the pipeline's commands
    doctor, fingerprint, diff, race   the tools
    anything else                     a program, e.g. `docker run IMAGE python -c "import torch"`

A container that is not fit ends here with exit code 3 and every reason, before anything was computed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from env.doctor import preflight
from env.errors import EnvError

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = ("train", "generate", "export", "import", "serve-command", "smoke", "cache", "plan", "needs", "rank")
MODULES = {
    "doctor": "env.doctor",
    "fingerprint": "env.fingerprint",
    "diff": "env.diff",
    "race": "dflash.compile.lab",
}
_DOCTOR_ITSELF = ("doctor", "train", "smoke")
"""Commands that begin with doctor's checks themselves; needs asks about files only."""


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command of `arguments`, the first of which is a command of ours or a program."""
    first, rest = arguments[0], list(arguments[1:])
    if first in PIPELINE:
        return [sys.executable, "-m", "pipeline", first, *rest]
    if first in MODULES:
        return [sys.executable, "-m", MODULES[first], *rest]
    return [first, *rest]


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Replace this process by the command; return only when that is impossible (exit code 3)."""
    if home := os.environ.get("HOME"):
        with contextlib.suppress(OSError):  # doctor says in better words what is not writable
            Path(home).mkdir(parents=True, exist_ok=True)
    arguments = arguments or ["doctor"]
    try:
        findings = [] if arguments[0] in (*_DOCTOR_ITSELF, "needs") else preflight(root)
    except EnvError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for finding in findings:
        print(finding, file=sys.stderr, flush=True)
    if any(finding.level == "error" for finding in findings):
        print("The container is not fit; every reason is above.", file=sys.stderr)
        return EnvError.exit_code
    command = command_line(arguments)
    try:
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:  # ValueError: an empty name
        known = ", ".join([*PIPELINE, *MODULES])
        reason = getattr(error, "strerror", None) or "an empty name"
        print(f"{command[0]}: cannot be started ({reason}). Commands: {known}, or a program.", file=sys.stderr)
    return EnvError.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
