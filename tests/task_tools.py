"""A small copy of the project whose pipeline only reports how it was started, to try tasks.py with the real invoke."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_PIPELINE = """
import signal, sys, time
print("argv", *sys.argv[1:], flush=True)
if "wait=1" in sys.argv:
    got = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: got.append(number))
    print("waiting", flush=True)
    end = time.monotonic() + 30
    while not got and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)  # a second delivery of the same signal would arrive now
    print("saved after", *map(int, got), flush=True)
    sys.exit(5)
sys.exit(next((int(a.removeprefix("exit=")) for a in sys.argv if a.startswith("exit=")), 0))
"""


def make_project(folder: Path, repository: Path) -> Path:
    """Make the copy in `folder`; its lock is empty."""
    shutil.copytree(repository / "env", folder / "env", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "tasks.py", folder)
    (folder / "pipeline").mkdir()
    (folder / "pipeline/__main__.py").write_text(_PIPELINE)
    (folder / "lockfiles").mkdir()
    (folder / "lockfiles/runtime.txt").write_text("")
    return folder


def environ(**variables: str) -> dict[str, str]:
    """Return this process's variables without ours, as inside the image unless `variables` say otherwise."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DFLASH_")}
    return {**clean, "DFLASH_IN_IMAGE": "1", **variables}


def invoke(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", *arguments]
    return subprocess.run(command, cwd=project, env=environ(**variables), capture_output=True, text=True, timeout=120)
