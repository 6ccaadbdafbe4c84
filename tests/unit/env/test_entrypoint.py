"""What the container starts: doctor's word first, then exactly the command, in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from env import entrypoint
from env.entrypoint import MODULES, PIPELINE, command_line, main
from env.errors import EnvError
from env.findings import Finding, error, warning

Capture = pytest.CaptureFixture[str]
TOO_SMALL = error("/dev/shm", "64 MiB", "Add --shm-size=1g")
READ_ONLY = error("/cache", "is not writable", "Mount it")
SLOW = warning("/cache", "is on nfs", "Use a local disk")


class Started(BaseException):
    """Stands for the process that execvp would become."""

    def __init__(self, command: list[str]) -> None:
        self.command = command


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Finding]:
    """Return what doctor finds; a command that is started raises Started."""
    found: list[Finding] = []

    def execvp(file: str, command: list[str]) -> None:
        raise Started(command)

    monkeypatch.setattr(entrypoint, "preflight", lambda root: list(found))
    monkeypatch.setattr(os, "execvp", execvp)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return found


def _started(*arguments: str) -> list[str]:
    with pytest.raises(Started) as caught:
        main(arguments)
    return caught.value.command


@pytest.mark.parametrize(
    "arguments, command",
    [
        (["train", "--config", "a b.yaml"], [sys.executable, "-m", "pipeline", "train", "--config", "a b.yaml"]),
        (["generate", "--run", "x"], [sys.executable, "-m", "pipeline", "generate", "--run", "x"]),
        (["needs", "--config", "x"], [sys.executable, "-m", "pipeline", "needs", "--config", "x"]),
        (["doctor", "--json", "x"], [sys.executable, "-m", "env.doctor", "--json", "x"]),
        (["race"], [sys.executable, "-m", "dflash.compile.lab"]),
        (["python", "-c", "import torch"], ["python", "-c", "import torch"]),
        (["bash"], ["bash"]),
    ],
)
def test_a_command_of_ours_is_python_and_anything_else_a_program(arguments: list[str], command: list[str]) -> None:
    assert command_line(arguments) == command


def test_every_command_of_the_pipeline_is_known(repository: Path) -> None:
    """One that is added there and not here would be taken for a program of that name."""
    done = subprocess.run([sys.executable, "-m", "pipeline"], cwd=repository, capture_output=True, text=True)
    shown = done.stderr.split("pipeline")[1].split("...")[0].replace("[-h]", "")
    assert sorted(PIPELINE) == sorted(name.strip() for name in shown.split("|"))


def test_every_tool_is_a_module_that_is_there(repository: Path) -> None:
    for module in MODULES.values():
        place = repository / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


def test_a_fit_container_starts_the_command(findings: list[Finding], capsys: Capture) -> None:
    assert _started("python", "x.py") == ["python", "x.py"]
    assert capsys.readouterr() == ("", "")


def test_errors_end_it_with_every_reason_before_the_command_starts(findings: list[Finding], capsys: Capture) -> None:
    """pytorch#5040: too little shared memory is a bus error later, and one line here."""
    findings += [TOO_SMALL, READ_ONLY, SLOW]
    assert main(["python", "x.py"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        *map(str, findings),
        "The container is not fit; every reason is above.",
    ]


def test_a_warning_is_said_and_stops_nothing(findings: list[Finding], capsys: Capture) -> None:
    findings.append(SLOW)
    assert _started("python") == ["python"]
    assert capsys.readouterr().err == f"{SLOW}\n"


@pytest.mark.parametrize("name", ["train", "smoke", "doctor", "needs"])
def test_commands_that_ask_doctor_themselves_and_needs_are_not_held_up(findings: list[Finding], name: str) -> None:
    findings.append(TOO_SMALL)
    assert _started(name)[-1] in (name, "env.doctor")


@pytest.mark.parametrize("name", ["generate", "fingerprint", "race", "diff", "python", "bash"])
def test_every_other_command_is(findings: list[Finding], name: str) -> None:
    findings.append(TOO_SMALL)
    assert main([name]) == 3


def test_without_a_command_it_is_doctor(findings: list[Finding]) -> None:
    assert _started() == [sys.executable, "-m", "env.doctor"]


def test_a_lock_that_is_missing_is_one_line(
    findings: list[Finding], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def no_lock(root: Path) -> list[Finding]:
        raise EnvError("no such lock", where="runtime.txt", fix="Build the image again.")

    monkeypatch.setattr(entrypoint, "preflight", no_lock)
    assert main(["python"]) == 3
    assert capsys.readouterr().err == "runtime.txt: no such lock. Build the image again.\n"


@pytest.mark.parametrize("name", ["trian", "/nowhere/program"])
def test_a_program_that_is_not_there_is_one_line_with_the_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture, name: str
) -> None:
    monkeypatch.setattr(entrypoint, "preflight", lambda root: [])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([name, "--config", "x"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{name}: cannot be started (No such file or directory). Commands: ")
    assert all(command in lines[0] for command in (*PIPELINE, *MODULES))


def test_an_empty_command_is_one_line_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setattr(entrypoint, "preflight", lambda root: [])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([""]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_home_folder_is_made_since_the_mounted_cache_may_be_empty(
    findings: list[Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "cache/home"))
    _started("python")
    assert (tmp_path / "cache/home").is_dir()


@pytest.mark.parametrize("home", ["", "file/home"])
def test_a_home_folder_that_cannot_be_made_is_doctors_to_tell(
    findings: list[Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / home) if home else "")
    findings.append(READ_ONLY)
    assert main(["python"]) == 3


def _without_doctor(repository: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the entry point in a process of its own, with a doctor that finds nothing."""
    script = "import sys; from env import entrypoint as e; e.preflight = lambda r: []; sys.exit(e.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True)


def test_the_command_takes_the_place_of_this_process_so_that_signals_reach_it(repository: Path) -> None:
    with _without_doctor(repository, "sh", "-c", "echo $$; exit 5") as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid
        assert process.wait(timeout=60) == 5


def test_the_image_starts_this_module_with_a_command_that_it_knows(repository: Path) -> None:
    lines = (repository / "Dockerfile").read_text().splitlines()
    command = next(line for line in lines if line.startswith("CMD "))
    quickstart: Callable[[str], str] = lambda text: text.split('"')[1]  # noqa: E731
    assert quickstart(command) in PIPELINE
