"""The front door: tasks.py inside the image and in the locked environment; test_tasks_image.py has the engines."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.task_tools import environ, invoke, make_project


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    return make_project(tmp_path, repository)


def test_the_list_of_tasks_says_what_each_is_for(project: Path) -> None:
    listing = invoke(project, "--list").stdout
    lines = [line.split(None, 1) for line in listing.splitlines() if line.startswith("  ") and line[2] != " "]
    names = {"train", "generate", "smoke", "build", "shell", "race", "test", "doctor", "fingerprint", "diff"}
    names |= {"clean", "cache", "lint", "typecheck", "lock", "export", "import", "serve-command", "bench", "plan"}
    assert {parts[0] for parts in lines} == names and all(len(parts) == 2 for parts in lines)


def test_train_hands_its_options_to_the_pipeline(project: Path) -> None:
    options = ["--stage", "train", "--from-stage", "cache", "--force", "--debug", "--set", "a.b=1", "--set", "c.d=x y"]
    done = invoke(project, "train", "--config", "configs/ci.yaml", *options)
    wanted = "argv train --config configs/ci.yaml --stage train --from cache --force --debug a.b=1 c.d=x y\n"
    assert (done.stdout, done.returncode) == (wanted, 0)
    assert invoke(project, "train").stdout == "argv train --config configs/quickstart.yaml\n"


def test_generate_hands_its_options_to_the_pipeline(project: Path) -> None:
    done = invoke(project, "generate", "--prompt", "Why is it so?", "--max-new-tokens", "9")
    assert done.stdout == "argv generate --run latest --prompt Why is it so? --max-new-tokens 9\n"
    sampling = ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--seed", "3", "--block-length", "adaptive"]
    done = invoke(project, "generate", "--prompt", "Why?", *sampling)
    wanted = f"argv generate --run latest --prompt Why? --max-new-tokens 64 {' '.join(sampling)}\n"
    assert (done.stdout, done.returncode) == (wanted, 0)


def test_interchange_hands_its_options_to_the_pipeline(project: Path) -> None:
    done = invoke(project, "export", "runs/latest", "--to", "speculators", "--out", "there", "--target", "t")
    assert done.stdout == "argv export runs/latest --to speculators --out there --target t\n"
    done = invoke(project, "import", "folder", "--out", "there", "--reading", "zlab", "--config", "c.json")
    assert done.stdout == "argv import folder --out there --reading zlab --config c.json\n"
    assert invoke(project, "serve-command", "runs/a").stdout == "argv serve-command runs/a --engine vllm\n"


def test_smoke_hands_its_options_to_the_pipeline(project: Path) -> None:
    assert invoke(project, "smoke").stdout == "argv smoke\n"
    done = invoke(project, "smoke", "--device", "cpu", "--json", "out.json")
    assert done.stdout == f"argv smoke --device cpu --json {project}/out.json\n"


def test_cache_hands_its_archive_to_the_pipeline_by_its_whole_path(project: Path) -> None:
    done = invoke(project, "cache", "--export", "out.tar", "--set", "a.b=1")
    assert done.stdout == f"argv cache --config configs/quickstart.yaml a.b=1 --export {project}/out.tar\n"
    done = invoke(project, "cache", "--import", "in.tar", "--config", "configs/ci.yaml")
    assert done.stdout == f"argv cache --config configs/ci.yaml --import {project}/in.tar\n"


def test_doctor_and_race_hand_their_options_to_their_modules(project: Path) -> None:
    says = 'import sys\npreflight = None\nif __name__ == "__main__":\n    print("argv", *sys.argv[1:], flush=True)\n'
    (project / "dflash/compile").mkdir(parents=True)
    for module in ("dflash/compile/lab.py", "env/doctor.py"):
        (project / module).write_text(says)
    done = invoke(project, "race", "--runs", "2", "--json", "out.json", "--device", "cpu")
    assert done.stdout == "argv --runs 2 --jobs 1 --json out.json --device cpu\n"
    done = invoke(project, "doctor", "--lock", "x.txt", "--json", "out.json")
    assert done.stdout == f"argv --lock x.txt --json {project}/out.json\n"


def test_bench_hands_its_options_to_the_benchmark(project: Path) -> None:
    (project / "benchmarks").mkdir()
    (project / "benchmarks/step.py").write_text('import sys\nprint("argv", *sys.argv[1:], flush=True)\n')
    assert invoke(project, "bench").stdout == "argv --device auto\n"
    done = invoke(project, "bench", "--json", "out.json", "--device", "cpu", "--sizes", "small")
    assert done.stdout == "argv --json out.json --device cpu --sizes small\n"


def test_tests_run_two_files_at_a_time_unless_a_gpu_or_the_image_is_what_they_share(project: Path) -> None:
    (project / "pytest.py").write_text('import sys\nprint("argv", *sys.argv[1:])')
    chosen = "tests -m not gpu and not image"
    assert invoke(project, "test").stdout == f"argv {chosen} -n 2 --dist loadfile\n"
    assert invoke(project, "test", "--jobs", "1", "-k", "x").stdout == f"argv {chosen} -k x\n"
    assert invoke(project, "test", "--gpu", "--jobs", "4").stdout == "argv tests -m gpu\n"
    assert invoke(project, "test", "--image").stdout == "argv tests -m image\n"


def test_diff_takes_two_runs_by_position(project: Path) -> None:
    (project / "env/diff.py").write_text('import sys\nprint("argv", *sys.argv[1:], flush=True)\n')
    assert invoke(project, "diff", "runs/a", "latest").stdout == "argv runs/a latest\n"
    assert invoke(project, "diff", "runs/a", "b", "--json").stdout == "argv runs/a b --json\n"


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_the_pipelines_exit_code_is_the_tasks(project: Path, code: int) -> None:
    done = invoke(project, "train", "--set", f"exit={code}")
    assert done.returncode == code and "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_invoke_lets_the_pipeline_save(project: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "invoke", "train", "--set", "wait=1"]
    with subprocess.Popen(command, cwd=project, env=environ(), stdout=subprocess.PIPE, text=True) as process:
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
    process = subprocess.Popen(command, cwd=project, env=environ(), stdin=follower, stdout=follower, stderr=follower)
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
    done = invoke(project, "train", DFLASH_IN_IMAGE="0")
    assert done.returncode == 3
    assert done.stderr == f"{project}/lockfiles/runtime.txt: no such lock. Run: invoke lock\n"


@pytest.mark.parametrize("task", [("train",), ("smoke",), ("generate", "--prompt", "x")])
def test_a_place_that_does_not_exist_is_one_line(project: Path, task: tuple[str, ...]) -> None:
    done = invoke(project, *task, "--in", "nonsense")
    line = "--in: 'nonsense' is no place. Choose one of auto, image, venv.\n"
    assert (done.stdout, done.stderr, done.returncode) == ("", line, 3)
