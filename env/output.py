"""What another program prints."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def output_of(command: Sequence[str], *, timeout_seconds: float | None = None) -> str | None:
    """Return what a program prints, None when it is missing, fails, or does not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
