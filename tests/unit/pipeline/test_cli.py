"""Arguments in, exit code and lines out. The stages here are small stand-ins; the real ones have tests of their own."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from env.errors import EnvError
from env.installed import Finding
from pipeline import __main__ as cli
from pipeline import commands
from pipeline.config import load_config
from pipeline.errors import ConfigError, Interrupted, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.runs import Run, find_run
from pipeline.stages import Stage

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
GATES = [{"name": "tau in domain", "value": 1.2512, "limit": 1.15, "verdict": "pass", "detail": ""}]


def _stages(verify: Callable[[Run], dict[str, Any]] | None = None) -> dict[str, Stage]:
    def passing(run: Run) -> dict[str, Any]:
        return {"verdict": "pass", "gates": GATES}

    return {"cache": lambda run: {}, "train": lambda run: {}, "verify": verify or passing}


def _fails(run: Run) -> dict[str, Any]:
    gates = [GATES[0] | {"value": 1.0, "verdict": "fail"}]
    atomic_write_json(run.verify_path, {"verdict": "fail", "gates": gates})
    raise VerificationFailed("tau in domain is 1.0, the limit is 1.15", where="verify.json", fix="Train longer.")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "runs"


def _train(
    monkeypatch: pytest.MonkeyPatch,
    functions: Mapping[str, Stage],
    *arguments: str,
    findings: list[Finding] | None = None,
) -> int:
    """Run the command line with these stages in an environment with these findings."""
    real = commands.train

    def with_stand_ins(*given: Any, **named: Any) -> int:
        return real(*given, **named, functions=functions, checks=lambda root: findings or [])

    with monkeypatch.context() as patch:
        patch.setattr(commands, "train", with_stand_ins)
        return cli.main(["train", "--config", str(QUICKSTART), *arguments])


Capture = pytest.CaptureFixture[str]


def test_a_run_ends_with_its_place_and_what_it_proved(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert _train(monkeypatch, _stages()) == 0
    out, err = capsys.readouterr()
    run = find_run("latest", runs)
    assert err == ""
    assert "tau in domain  1.251  1.15   pass" in out
    assert f"{run.id}: 1 of 1 gates passed." in out
    assert run.report_path.is_file()


def test_the_second_time_everything_is_skipped(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    _train(monkeypatch, _stages())
    capsys.readouterr()
    assert _train(monkeypatch, _stages()) == 0
    assert capsys.readouterr().out.count("skipped, finished") == 3


def test_overrides_may_stand_before_and_after_options(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _train(monkeypatch, _stages(), "train.steps=7", "--stage", "cache", "seed=3") == 0
    run = find_run("latest", runs)
    assert (run.config.train.steps, run.config.seed) == (7, 3)
    assert not run.manifest_path("train").exists()


def test_a_failed_gate_is_exit_4_with_summary_and_report(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert _train(monkeypatch, _stages(_fails)) == 4
    out, err = capsys.readouterr()
    assert err == "verify.json: tau in domain is 1.0, the limit is 1.15. Train longer.\n"
    assert "0 of 1 gates passed" in out
    assert "Verdict:" in find_run("latest", runs).report_path.read_text()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("no target", where="x", fix="Set it."), 2, "x: no target. Set it."),
        (Interrupted("stopped at step 3", fix="Run it again."), 5, "stopped at step 3. Run it again."),
        (KeyboardInterrupt(), 5, "interrupted. The same command goes on from the last finished stage or checkpoint."),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), 3, "/data/x: no space left on device. Make room"),
        (PermissionError(errno.EACCES, "Permission denied", "/data"), 3, "/data: permission denied. Make it writable"),
        (
            MemoryError("Unable to allocate 7 TiB"),
            2,
            "out of memory (Unable to allocate 7 TiB). Lower",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), 2, "a" * 60 + "...: the name is too long."),
        (BrokenPipeError(), 1, "the reader of the output went away."),
    ],
)
def test_an_error_that_a_person_can_mend_is_one_line(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def stage(run: Run) -> dict[str, Any]:
        raise error

    # _drop would send this process's own stdout to nowhere.
    monkeypatch.setattr(cli, "_drop", lambda stream: None)
    assert _train(monkeypatch, _stages() | {"cache": stage}) == code
    err = capfd.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1
    if getattr(error, "exit_code", None) == 2:  # bad input: the run never began
        assert list(runs.glob("*/config.yaml")) == []
        return
    book = json.loads(find_run("latest", runs).stages_path.read_text())["stages"]
    assert book[0]["state"] == ("interrupted" if code == 5 else "failed")


def test_debug_adds_the_traceback(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert _train(monkeypatch, _stages(_fails), "--debug") == 4
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("Train longer.\n")


def test_our_own_mistakes_keep_their_traceback(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(run: Run) -> dict[str, Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _train(monkeypatch, _stages() | {"train": stage})
    assert find_run("latest", runs).report_path.is_file()


def test_an_unfit_environment_stops_before_anything_is_written(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    error = Finding(
        level="error", what="is 2.0, the lock says 2.11.0", where="torch", fix="Make the environment again."
    )
    warning = Finding(level="warning", what="is set", where="LD_PRELOAD", fix="Unset it.")
    assert _train(monkeypatch, _stages(), findings=[error, warning]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [str(error), str(warning)]
    assert lines[2].startswith("the environment is not fit (1 fault above)")
    assert not runs.exists()


def test_a_warning_is_shown_and_the_run_goes_on(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    warning = Finding(level="warning", what="is set", where="LD_PRELOAD", fix="Unset it.")
    assert _train(monkeypatch, _stages(), findings=[warning]) == 0
    assert capsys.readouterr().err == f"{warning}\n"


def test_sigterm_during_a_stage_is_an_interruption(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(run: Run) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal did not arrive")

    before = signal.getsignal(signal.SIGTERM)
    assert _train(monkeypatch, _stages() | {"train": stage}) == 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_generate_needs_a_run_with_a_drafter(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(runs.parent)  # else runs/latest is the one of this checkout
    assert cli.main(["generate", "--run", "runs/latest", "--prompt", "hello"]) == 2
    assert capsys.readouterr().err == "runs/latest: no such run. There is no run yet; invoke train makes one.\n"
    _train(monkeypatch, _stages())
    capsys.readouterr()
    assert cli.main(["generate", "--run", "latest", "--prompt", "hello"]) == 2
    assert capsys.readouterr().err == "latest: the run has no drafter yet. Finish its training first: invoke train.\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train"], "required: --config"),
        (["train", "--config", "x", "--stage", "trian"], "invalid choice: 'trian'"),
        (["train", "--config", "x", "--forse"], "unknown argument '--forse'"),
        (["generate", "--run", "x", "--prompt", "y", "seed=1"], "unknown argument 'seed=1'"),
        (["generate", "--run", "x", "--prompt", "y", "--max-new-tokens", "0"], "'0' is not a whole number above 0"),
        (["generate", "--run", "x", "--prompt", "y", "--block-length", "0"], "'0' is not a whole number above 0"),
        (["generate", "--run", "x", "--prompt", "y", "--top-k", "-1"], "'-1' is not a whole number above 0"),
        ([], "required: train | generate"),
    ],
)
def test_wrong_arguments_are_exit_2(capsys: Capture, arguments: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["train"], ["generate"]])
def test_the_help_fits_a_screen(capsys: Capture, command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    assert caught.value.code == 0
    assert 5 < len(capsys.readouterr().out.splitlines()) < 24


def _python(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", script] if script else []), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_command_line_imports_no_torch_before_the_cache_variables_are_set() -> None:
    done = _python("import pipeline.__main__, sys; print('torch' in sys.modules)")
    assert done.stdout == "False\n"


def test_a_real_process_gives_one_line_and_exit_2_for_a_bad_configuration() -> None:
    done = _python("", "-m", "pipeline", "train", "--config", str(QUICKSTART), "train.step=4")
    assert done.returncode == 2
    assert done.stderr == "override train.step=4: train.step: unknown key. Did you mean steps?\n"


def test_a_reader_that_goes_away_is_one_line_and_no_complaint_at_exit(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pipeline import __main__ as cli, commands\n"
        "def chatter(*a, **k):\n    while True: commands.say('line')\n"
        "commands.train = chatter\n"
        "sys.exit(cli.main(['train', '--config', 'x']))\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "the reader of the output went away.\n"
    assert process.returncode == 1


def test_compiler_caches_go_to_a_folder_named_by_its_key(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from env.caches import OWNED_VARIABLES, CacheDirs

    for name in OWNED_VARIABLES:
        monkeypatch.setenv(name, "left over from a shell")
    caches = CacheDirs.from_environment(ROOT)
    config = load_config(QUICKSTART)
    found = commands.compile_factors(ROOT)
    key = commands.set_cache_variables(config, caches, found)
    folder = tmp_path / "cache" / "compile" / key
    assert all(Path(os.environ[name]).is_relative_to(folder) for name in OWNED_VARIABLES)
    factors = json.loads((folder / "factors.json").read_text())
    assert {"torch", "gpu_capability", "source", "drafter"} <= factors.keys()
    other = load_config(QUICKSTART, ["drafter.block_size=8"])
    assert commands.set_cache_variables(other, caches, found) != key


def test_a_torch_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    for folder in ("env", "dflash", "pipeline"):
        (tmp_path / folder).mkdir()
    (tmp_path / "env" / "caches.py").write_text(
        "def default_factors(source):\n    raise ImportError('libcudart.so is gone')\n"
    )
    with pytest.raises(EnvError) as caught:
        commands.compile_factors(tmp_path)
    assert "torch cannot be used (ImportError: libcudart.so is gone). Run invoke doctor." in str(caught.value)
