"""The front door: tasks.py in a small copy of the project whose pipeline only reports how it was started."""

from __future__ import annotations

import hashlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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

_IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    shutil.copytree(repository / "env", tmp_path / "env", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "tasks.py", tmp_path)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/__main__.py").write_text(_PIPELINE)
    (tmp_path / "lockfiles").mkdir()
    (tmp_path / "lockfiles/runtime.txt").write_text("")
    return tmp_path


def _environ(**variables: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DFLASH_")}
    return {**clean, "DFLASH_IN_IMAGE": "1", **variables}


def _invoke(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", *arguments]
    return subprocess.run(command, cwd=project, env=_environ(**variables), capture_output=True, text=True, timeout=60)


def test_the_list_of_tasks_says_what_each_is_for(project: Path) -> None:
    listing = _invoke(project, "--list").stdout
    lines = [line.split(None, 1) for line in listing.splitlines() if line.startswith("  ") and line[2] != " "]
    names = {"train", "generate", "test", "doctor", "fingerprint", "lint", "typecheck", "lock", "race"}
    assert {parts[0] for parts in lines} == names and all(len(parts) == 2 for parts in lines)


def test_train_hands_its_options_to_the_pipeline(project: Path) -> None:
    options = ["--stage", "train", "--from-stage", "cache", "--force", "--debug", "--set", "a.b=1", "--set", "c.d=x y"]
    done = _invoke(project, "train", "--config", "configs/ci.yaml", *options)
    wanted = "argv train --config configs/ci.yaml --stage train --from cache --force --debug a.b=1 c.d=x y\n"
    assert (done.stdout, done.returncode) == (wanted, 0)
    assert _invoke(project, "train").stdout == "argv train --config configs/quickstart.yaml\n"


def test_generate_hands_its_options_to_the_pipeline(project: Path) -> None:
    done = _invoke(project, "generate", "--prompt", "Why is it so?", "--max-new-tokens", "9")
    assert done.stdout == "argv generate --run runs/latest --prompt Why is it so? --max-new-tokens 9\n"


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_the_pipelines_exit_code_is_the_tasks(project: Path, code: int) -> None:
    done = _invoke(project, "train", "--set", f"exit={code}")
    assert done.returncode == code and "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_invoke_lets_the_pipeline_save(project: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "invoke", "train", "--set", "wait=1"]
    with subprocess.Popen(command, cwd=project, env=_environ(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "waiting\n":
            assert process.poll() is None
        process.send_signal(number)
        assert process.stdout.read() == f"saved after {number.value}\n"
        assert process.wait(timeout=30) == 5


def test_ctrl_c_in_a_terminal_reaches_the_pipeline_exactly_once(project: Path) -> None:
    leader, follower = pty.openpty()
    script = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, "
    )
    command = [sys.executable, "-c", script + "[sys.executable, '-m', 'invoke', 'train', '--set', 'wait=1'])"]
    process = subprocess.Popen(command, cwd=project, env=_environ(), stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    deadline = time.monotonic() + 60
    while b"waiting" not in shown:
        assert time.monotonic() < deadline
        shown += os.read(leader, 1000)
    os.write(leader, b"\x03")
    assert process.wait(timeout=60) == 5
    shown += os.read(leader, 1000)
    os.close(leader)
    assert b"saved after 2\r\n" in shown


def test_an_unfit_environment_is_one_line_and_exit_3(project: Path) -> None:
    (project / "lockfiles/runtime.txt").unlink()
    done = _invoke(project, "train", DFLASH_IN_IMAGE="0")
    assert done.returncode == 3
    assert done.stderr == f"{project}/lockfiles/runtime.txt: no such lock. Run: invoke lock\n"


@pytest.mark.parametrize("engine", [None, "podman"])
def test_the_way_it_runs_is_said_in_one_line(project: Path, engine: str | None) -> None:
    (project / "bin").mkdir()
    if engine:
        (project / "bin" / engine).write_text("#!/bin/sh\n")
        (project / "bin" / engine).chmod(0o755)
    # An environment that is there already: this Python under the name that the empty lock gives.
    digest = hashlib.sha256(b"").hexdigest()[:12]
    shown = f".cache/venv-{sys.version_info.major}.{sys.version_info.minor}-{digest}"
    (project / shown / "bin").mkdir(parents=True)
    (project / shown / "bin/python").symlink_to(sys.executable)
    done = _invoke(project, "train", DFLASH_IN_IMAGE="0", PATH=str(project / "bin"))
    first = done.stdout.splitlines()[0]
    if engine:
        assert first == f"Found podman, but no image of this commit is built: using the locked environment {shown}"
    else:
        wanted = f"No container engine (docker, podman, buildah) on this host: using the locked environment {shown}"
        assert first == wanted
    assert done.stdout.splitlines()[1:] == ["argv train --config configs/quickstart.yaml"]
