"""Running a program in the foreground so that it can save its work when it is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SENT_BY_A_PROCESS = (0, -6)
"""si_code SI_USER (kill) and SI_TKILL; a terminal's Ctrl-C carries SI_KERNEL."""


def run_foreground(command: list[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> int:
    """Run `command`, wait for it, and return its exit code (128 + n when signal n ended it).

    The program gets every stop signal once: Ctrl-C reaches it from the terminal, because it stays in the foreground
    process group, and what is sent to this process alone is passed on. This process outlives it in either case.
    """
    early: list[int] = []
    previous = {number: signal.signal(number, lambda number, frame: early.append(number)) for number in _STOP}
    try:
        with subprocess.Popen(command, cwd=cwd, env=env) as process:
            return _wait(process, early)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], early: list[int]) -> int:
    if not hasattr(signal, "sigtimedwait"):  # macOS cannot tell who sent a signal
        while process.poll() is None:
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                _forward(process, early, from_terminal=sys.stdin is not None and sys.stdin.isatty())
        return _exit_code(process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, signal.SIGCHLD})
    try:
        # Between Popen and the mask the handlers collected; who sent those is unknown, and Ctrl-C is the likely one.
        _forward(process, early, from_terminal=True)
        while process.poll() is None:
            info = signal.sigtimedwait({*_STOP, signal.SIGCHLD}, 0.5)
            if info is not None and info.si_signo != signal.SIGCHLD and info.si_code in _SENT_BY_A_PROCESS:
                _forward(process, [info.si_signo], from_terminal=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _exit_code(process)


def _forward(process: subprocess.Popen[bytes], numbers: list[int], *, from_terminal: bool) -> None:
    while numbers:
        number = numbers.pop(0)
        if not (from_terminal and number in (signal.SIGINT, signal.SIGHUP)) and process.poll() is None:
            os.kill(process.pid, number)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
