"""The tasks on hosts with container engines, which are shell scripts here."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.engine_tools import REGISTRY, SAYS, FakeEngines
from tests.task_tools import environ, invoke, make_project


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """Return a copy of the project with everything that an image is built from."""
    root = make_project(tmp_path / "my project", repository)
    for folder in ("dflash", "benchmarks", "configs"):
        (root / folder).mkdir()
    for name in ("Dockerfile", ".dockerignore", "LICENSE", "configs/quickstart.yaml"):
        (root / name).write_text("")
    (root / "lockfiles/runtime.txt").write_text("torch==2.11.0\n")
    pins = {"registry": REGISTRY, "suite": "bookworm", "packages": ["tini"], "epoch": 1795824000}
    (root / "lockfiles/images.yaml").write_text(json.dumps(pins))
    return root


@pytest.fixture
def fakes(project: Path) -> FakeEngines:
    """Return a host without any engine; the PATH of `_on_host` holds no real one either."""
    return FakeEngines.make(project.parent)


def _environment(project: Path) -> str:
    """Put this Python where the lock's environment belongs, and return the place as it is shown."""
    digest = hashlib.sha256((project / "lockfiles/runtime.txt").read_bytes()).hexdigest()[:12]
    shown = f".cache/venv-{sys.version_info.major}.{sys.version_info.minor}-{digest}"
    (project / shown / "bin").mkdir(parents=True)
    (project / shown / "bin/python").symlink_to(sys.executable)
    return shown


def _on_host(project: Path, fakes: FakeEngines, *arguments: str, **places: str) -> subprocess.CompletedProcess[str]:
    return invoke(project, *arguments, **{"DFLASH_IN_IMAGE": "0", "PATH": str(fakes.bin), **places})


@pytest.mark.parametrize(
    "engine, line",
    [
        ("", "No container engine (docker, podman, buildah) works on this host"),
        ("podman", "Found podman, but no image of this checkout is built (invoke build)"),
        ("buildah", "buildah builds images and cannot run them"),
    ],
)
def test_without_an_image_the_locked_environment_is_used_and_one_line_says_so(
    project: Path, fakes: FakeEngines, engine: str, line: str
) -> None:
    shown = _environment(project)
    if engine:
        fakes.add(engine)
    assert _on_host(project, fakes, "train").stdout.splitlines() == [
        f"{line}: using the locked environment {shown}",
        "argv train --config configs/quickstart.yaml",
    ]


def test_after_build_train_runs_in_the_image_and_without_a_network(project: Path, fakes: FakeEngines) -> None:
    fakes.add("podman")
    built = _on_host(project, fakes, "build")
    first, second = built.stdout.splitlines()
    name = first.split()[1]
    assert first == f"Building {name} with podman (docker is not installed; podman works); base: registry."
    assert second == f"{name}  digest-same  1.23 GB, 1 Python and 1 Debian packages"
    assert (built.stderr, built.returncode) == ("", 0)

    done = _on_host(project, fakes, "train", "--set", "train.steps=5", "--set", "name=x")
    lines = done.stdout.splitlines()
    assert lines[0] == f"In the image {name} (podman); /cache is {project}/.cache, /runs is {project}/runs"
    assert lines[1] == "Network: none, everything is cached" and json.loads(lines[2]) == SAYS
    config = f"--volume={project}/configs/quickstart.yaml:/srv/dflash/configs/quickstart.yaml:ro {name}"
    asked, ran = fakes.calls("run")[-2:]
    assert asked.endswith(f"{config} needs --config configs/quickstart.yaml train.steps=5 name=x")
    assert ran.endswith(f"{config} train --config configs/quickstart.yaml train.steps=5 name=x")
    assert "--network=none" in ran and "--tty" not in ran.split()


def test_the_places_are_those_of_the_host_wherever_they_are(project: Path, fakes: FakeEngines) -> None:
    fakes.add("podman")
    places = {"DFLASH_CACHE": "my cache", "DFLASH_RUNS": f"{project}/elsewhere/runs"}
    assert _on_host(project, fakes, "build", **places).returncode == 0
    assert list((project / "my cache/images").iterdir()) and not (project / ".cache").exists()
    assert _on_host(project, fakes, "smoke", "--in", "image", **places).returncode == 0
    volumes = f"--volume={project}/my cache:/cache:rw --volume={project}/elsewhere/runs:/runs:rw"
    assert volumes in fakes.calls("smoke")[-1] and (project / "elsewhere/runs").is_dir()


def test_the_place_that_is_asked_for_is_taken_or_refused(project: Path, fakes: FakeEngines) -> None:
    shown = _environment(project)
    done = _on_host(project, fakes, "train", "--in", "image")
    what = "No container engine (docker, podman, buildah) works on this host"
    line = f"--in image: {what}. Install docker or podman, or leave --in out.\n"
    assert (done.stderr, done.returncode) == (line, 3)
    fakes.add("podman")
    done = _on_host(project, fakes, "generate", "--prompt", "x", "--in", "image")
    assert (done.stderr, done.returncode) == ("podman: no image of this checkout is built. Run: invoke build\n", 3)
    assert _on_host(project, fakes, "build").returncode == 0
    done = _on_host(project, fakes, "train", "--in", "venv")
    assert done.stdout.splitlines()[0] == f"Using the locked environment {shown}"
    assert "argv train" in done.stdout and fakes.calls("train") == []


def test_generate_gives_the_container_a_run_that_lies_elsewhere(project: Path, fakes: FakeEngines) -> None:
    fakes.add("podman")
    assert _on_host(project, fakes, "build").returncode == 0
    run = project.parent / "other runs/mine"
    run.mkdir(parents=True)
    assert _on_host(project, fakes, "generate", "--run", str(run), "--prompt", "x").returncode == 0
    assert f"--volume={run}:{run}:ro" in fakes.calls("generate")[-1]


@pytest.mark.parametrize("code", [2, 5])
def test_the_containers_exit_code_is_the_tasks(project: Path, fakes: FakeEngines, code: int) -> None:
    fakes.add("podman")
    assert _on_host(project, fakes, "build").returncode == 0
    (fakes.state / "run_code").write_text(str(code))
    done = _on_host(project, fakes, "train")
    assert done.returncode == code and "Traceback" not in done.stderr


def test_an_engine_or_a_base_that_is_not_there_is_one_line(project: Path, fakes: FakeEngines) -> None:
    none = "no container engine (docker, podman, buildah) works on this host"
    fix = "Install docker or podman; invoke train needs neither."
    done = _on_host(project, fakes, "build")
    assert (done.stderr, done.returncode) == (f"invoke build: {none}. {fix}\n", 3)
    done = _on_host(project, fakes, "build", "--engine", "nerdctl")
    line = "--engine: 'nerdctl' is no engine. Choose one of docker, podman, buildah.\n"
    assert (done.stderr, done.returncode) == (line, 3)
    fakes.add("podman")
    done = _on_host(project, fakes, "build", "--base", "alpine")
    assert (done.stderr, done.returncode) == ("--base: 'alpine' is no base. Choose debian or registry.\n", 3)
    assert fakes.calls("build") == []


def test_shell_opens_one_in_the_image_with_the_keyboard(project: Path, fakes: FakeEngines) -> None:
    fakes.add("podman")
    assert _on_host(project, fakes, "shell").returncode == 3
    name = _on_host(project, fakes, "build").stdout.split()[1]
    assert _on_host(project, fakes, "shell").returncode == 0
    last = fakes.calls("run")[-1]
    assert "--interactive" in last.split() and "--network=none" in last and last.endswith(f" {name} bash")


def test_build_compares_itself_and_writes_the_file_system(project: Path, fakes: FakeEngines) -> None:
    fakes.add("podman")
    (fakes.state / "config").write_text("{}")
    tarfile.open(fakes.state / "rootfs.tar", "w").close()
    done = _on_host(project, fakes, "build", "--check", "--rootfs", "nowhere/root.tar")
    assert (done.stderr, done.returncode) == (f"{project}/nowhere: no such folder. Make it first.\n", 3)
    assert "Built again from nothing, same digest: digest-same" in done.stdout
    done = _on_host(project, fakes, "build", "--rootfs", "root.tar")
    assert (done.stderr, done.returncode) == ("", 0)
    with tarfile.open(project / "root.tar") as tar:
        assert tar.getnames() == ["start"]


def test_an_interrupted_build_is_one_line_and_leaves_no_manifest(project: Path, fakes: FakeEngines) -> None:
    fakes.add("podman")
    (fakes.bin / "podman").rename(fakes.bin / "answers")
    waits = 'case " $* " in *" build "*) echo waits > "$0.note"; exec sleep 60 ;; esac'
    fakes.program("podman", f'#!/bin/sh\nPATH={os.defpath}\n{waits}\nexec "${{0%podman}}answers" "$@"\n')
    note, temporary = fakes.bin / "podman.note", project.parent / "tmp"
    temporary.mkdir()
    variables = environ(DFLASH_IN_IMAGE="0", PATH=str(fakes.bin), TMPDIR=str(temporary))
    command = [sys.executable, "-m", "invoke", "build"]
    with subprocess.Popen(
        command, cwd=project, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (note.is_file() and note.read_text().endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does, to the engine as well
        _, err = process.communicate(timeout=60)
    line = "Interrupted before the program started; nothing is half-written. Run it again.\n"
    assert (process.returncode, err) == (5, line)
    assert not (project / ".cache").exists() and list(temporary.iterdir()) == []
