"""Running uv, the package tool of lockfiles/host.txt, and saying in one line why it failed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from env.errors import EnvError

# Variables that would point uv at another interpreter or another environment than the one asked for.
_MISLEADING = {
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT_ENVIRONMENT"),
}
_NO_NETWORK = re.compile(r"network was disabled|connect error|dns error|error sending request|timed out", re.I)
_WANTED = (
    re.compile(r"Failed to download `([A-Za-z0-9._-]+)"),
    re.compile(r"Failed to fetch: \S*?/([A-Za-z0-9._-]+?)-\d[^/\s]*\.(?:whl|tar\.gz)"),
    re.compile(r"Failed to fetch: \S*/([A-Za-z0-9._-]+)/?(?:\s|$)"),
    re.compile(r"Because ([A-Za-z0-9._-]+) was not found"),
)


def find_uv() -> Path:
    """Return the uv program of the Python that runs this, else the one on PATH. Raises EnvError if there is none."""
    beside = Path(sys.executable).parent / "uv"
    if beside.is_file():
        return beside
    on_path = shutil.which("uv")
    if on_path is None:
        raise EnvError("uv is not installed", fix="Run: python3 -m pip install -r lockfiles/host.txt")
    return Path(on_path)


def run_uv(
    arguments: list[str], *, where: str, cwd: Path | None = None, uv: Path | None = None, echo: bool = False
) -> None:
    """Run uv and wait for it; with `echo`, pass its progress lines on to stderr as they come.

    where   what the message names when uv fails, e.g. "lockfiles/runtime.txt"
    Raises EnvError with the package that was wanted (no network) or uv's own reason.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _MISLEADING}
    command = [str(uv or find_uv()), *arguments]
    failure: list[str] = []
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if failure or line.startswith("error"):
                failure.append(line.strip())
            elif echo and not line.startswith((" + ", "Using Python")):  # the lock lists the packages
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode != 0:
        raise explain_failure("\n".join(failure) or f"uv ended with exit code {process.returncode}", where)


def explain_failure(text: str, where: str) -> EnvError:
    """Turn what uv printed from "error:" on into one line; addresses are left out, the package's name is kept."""
    package = next((match[1] for pattern in _WANTED if (match := pattern.search(text))), None)
    if "Hash mismatch" in text:
        return EnvError(
            f"the file of {package} that was downloaded has another sha256 than the lock",
            where=where,
            fix="Do not install it: the package index or a proxy serves another file than the one that was locked.",
        )
    if _NO_NETWORK.search(text):
        return EnvError(
            f"no network: the package {package or 'index'} was wanted and could not be downloaded",
            where=where,
            fix="Connect to a package index; UV_DEFAULT_INDEX names yours if you have a mirror.",
        )
    reason = re.sub(r"\w+://\S+", "<address>", " ".join(text.split()))
    reason = re.sub(r"^error: ", "", reason).replace(" cause: ", ": ")
    return EnvError(f"uv failed: {reason[:400]}", where=where, fix="Mend that and run again.")
