"""The smoke test's checks notice what they are for, and its table and exit codes say it. The whole is in scenarios."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash import masks
from dflash.masks import MaskLayout
from env.errors import EnvError
from env.installed import Finding
from pipeline import __main__ as cli
from pipeline import commands, smoke_checks
from pipeline import smoke as smoke_module
from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError, Interrupted, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.runs import Run
from pipeline.smoke_results import LeftOut, Results
from pipeline.stages import Stage

CPU = torch.device("cpu")
Capture = pytest.CaptureFixture[str]


# -- C extension -------------------------------------------------------------------------------------------------------


def test_an_extension_is_built_against_python_h_and_called(tmp_path: Path) -> None:
    """Slim images lack the compiler, Python.h or parts of libc, and Triton's launcher fails there (pytorch#116696)."""
    assert "loaded and called" in smoke_checks.c_extension(tmp_path)


def test_an_extension_with_a_wrong_result_fails(tmp_path: Path) -> None:
    wrong = smoke_checks.C_SOURCE.replace("a + b", "a - b")
    assert wrong != smoke_checks.C_SOURCE
    with pytest.raises(VerificationFailed, match=r"add\(2, 3\) gave -1"):
        smoke_checks.c_extension(tmp_path, wrong)


def test_a_compiler_that_is_not_there_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EnvError, match="PATH: CC names no-such-compiler, which is not there"):
        smoke_checks.c_extension(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvError, match=r"no C compiler \(gcc, clang\)"):
        smoke_checks.c_extension(tmp_path)


def test_a_missing_header_is_named(tmp_path: Path) -> None:
    """pytorch#116696."""
    with pytest.raises(EnvError, match=r"cannot build a Python extension \(.*missing_python.h"):
        smoke_checks.c_extension(tmp_path, smoke_checks.C_SOURCE.replace("Python.h", "missing_python.h"))


# -- Triton kernel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.usefixtures("own_triton_cache")
def test_without_a_gpu_a_kernel_is_compiled_to_machine_code_for_sm_90(tmp_path: Path) -> None:
    assert "ahead of time for sm_90 by ptxas" in smoke_checks.triton_kernel(CPU)
    assert list((tmp_path / "triton").rglob("*.cubin")) != []


@pytest.mark.usefixtures("own_triton_cache")
def test_a_kernel_that_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import smoke_kernel

    monkeypatch.setitem(smoke_kernel.SIGNATURE, "num", "*fp32")  # a pointer where the kernel compares a number
    with pytest.raises(Exception, match="at "):
        smoke_checks.triton_kernel(CPU)


@pytest.mark.usefixtures("own_triton_cache")
def test_a_ptxas_that_fails_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "ptxas"
    broken.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\ntest \"$1\" = --version\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(broken))
    with pytest.raises(Exception, match="ptxas"):
        smoke_checks.triton_kernel(CPU)


def test_where_no_triton_is_the_check_is_left_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # how Python marks a module that cannot be imported
    with pytest.raises(LeftOut, match="no triton here"):
        smoke_checks.triton_kernel(CPU)


def test_a_triton_that_is_damaged_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "triton.compiler", None)
    with pytest.raises(ModuleNotFoundError, match=r"triton\.compiler"):
        smoke_checks.triton_kernel(CPU)


# -- flex attention ----------------------------------------------------------------------------------------------------


def test_flex_has_the_numbers_of_dense_attention() -> None:
    # Inductor's C++ is compiled in the scenario; the comparison is the same.
    assert "output as dense attention's" in smoke_checks.flex_block(CPU, backend="eager")


def test_flex_with_another_mask_than_the_dense_reference_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_off(anchors: Tensor, layout: MaskLayout, implementation: str) -> Any:
        return masks.flex_mask(anchors + 1, layout) if implementation == "flex" else masks.dense_mask(anchors, layout)

    monkeypatch.setattr(smoke_checks, "build_mask", one_off)
    with pytest.raises(VerificationFailed, match="flex attention: output differs from dense attention by"):
        smoke_checks.flex_block(CPU, backend="eager")


def test_numbers_that_are_not_finite_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = smoke_checks.block_attention

    def with_nan(*arguments: Any) -> Tensor:
        out = real(*arguments)
        return out * torch.nan if arguments[-1] == "flex" else out

    monkeypatch.setattr(smoke_checks, "block_attention", with_nan)
    with pytest.raises(VerificationFailed, match="by inf"):
        smoke_checks.flex_block(CPU, backend="eager")


def test_a_cpu_that_flex_cannot_be_compiled_for_is_no_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(message)

    monkeypatch.setattr(torch, "compile", lambda *arguments, **named: refuse)
    message = "torch.compile on current platform is not supported for CPU."
    with pytest.raises(LeftOut, match="for no CPU of this kind"):
        smoke_checks.flex_block(CPU)
    message = "something else"
    with pytest.raises(NotImplementedError, match="something else"):
        smoke_checks.flex_block(CPU)


# -- the stages --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _run_in(folder: Path) -> Iterator[tuple[Path, RunConfig]]:
    path = smoke_module._prepare(folder, "cpu")
    with smoke_module._own_places(folder):
        yield path, load_config(path)


def test_a_failed_gate_is_told_with_its_numbers_since_the_run_folder_goes(tmp_path: Path) -> None:
    gate = {"name": "loss finite and fell", "value": 1.2, "limit": "< 1", "verdict": "fail", "detail": "6.0 -> 7.2"}

    def failing(run: Run) -> dict[str, Any]:
        atomic_write_json(run.verify_path, {"verdict": "fail", "gates": [gate, gate | {"verdict": "pass"}]})
        raise VerificationFailed("failed: loss finite and fell", where="verify.json")

    stages: dict[str, Stage] = {"cache": lambda run: {}, "train": lambda run: {}, "verify": failing}
    with _run_in(tmp_path) as (path, config):
        run = Run(tmp_path / "runs" / config.run_id(), config)
        for name in ("cache", "train"):
            commands.train(path, [], only=name, checks=lambda root: [], functions=stages)
        with pytest.raises(VerificationFailed) as caught:
            smoke_module._stage("verify", run, path, commands.ROOT, stages)
    told = "gates: loss finite and fell is 1.2, limit < 1 (6.0 -> 7.2). Do not train here before that is understood."
    assert str(caught.value) == told


def test_the_places_of_the_run_are_its_own_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_RUNS", "mine")
    monkeypatch.delenv("DFLASH_CACHE", raising=False)
    here = Path.cwd()
    with pytest.raises(RuntimeError), smoke_module._own_places(tmp_path):
        assert os.environ["DFLASH_RUNS"] == str(tmp_path / "runs")
        assert os.environ["DFLASH_CACHE"] == str(tmp_path / "cache")
        assert Path.cwd() == tmp_path
        raise RuntimeError
    assert os.environ["DFLASH_RUNS"] == "mine"
    assert "DFLASH_CACHE" not in os.environ
    assert Path.cwd() == here


# -- table, exit codes, JSON -------------------------------------------------------------------------------------------


def _raise(error: BaseException) -> str:
    print("what the check printed")
    raise error


def test_a_check_that_passes_or_is_left_out_is_a_row_and_prints_nothing_else(capsys: Capture) -> None:
    results = Results()
    assert results.attempt("first", lambda: (print("noise"), "fine")[1])
    assert results.attempt("second", lambda: _raise(LeftOut("no GPU here")))
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [["first", "passed"], ["second", "left"]]
    assert err == ""
    assert results.conclude() == "smoke: all 1 checks passed, 1 left out (see why above)"
    assert results.record()["verdict"] == "pass"


@pytest.mark.parametrize(
    ("errors", "kind", "line"),
    [
        (
            [VerificationFailed("differs by 0.3", where="flex attention", fix="Stop.")],
            VerificationFailed,
            "smoke: check 1 failed (1 of 2 checks). check 1: flex attention: differs by 0.3. Stop.",
        ),
        (
            [RuntimeError("ptxas died"), EnvError("no compiler", where="PATH", fix="Get one.")],
            EnvError,
            "smoke: check 1, check 2 failed (2 of 3 checks). check 2: PATH: no compiler. Get one.",
        ),
        (
            [OSError(errno.ENOSPC, "No space left on device")],
            EnvError,
            "smoke: check 1 failed (1 of 2 checks). check 1: OSError: [Errno 28] No space left on device",
        ),
    ],
)
def test_what_failed_is_one_line_and_what_the_machine_lacks_comes_first(
    errors: list[Exception], kind: type[Exception], line: str, capsys: Capture
) -> None:
    results = Results()
    results.attempt("check 0", lambda: "fine")
    for number, error in enumerate(errors, start=1):
        assert not results.attempt(f"check {number}", lambda error=error: _raise(error))  # type: ignore[misc]
    assert "what the check printed" in capsys.readouterr().err
    with pytest.raises(kind) as caught:
        results.conclude()
    assert str(caught.value) == line
    assert caught.value.__cause__ in errors
    assert results.record()["verdict"] == "fail"


def test_no_check_at_all_is_no_pass() -> None:
    assert Results().record()["verdict"] == "fail"


def test_an_interruption_goes_through() -> None:
    for error in (KeyboardInterrupt(), Interrupted("stopped after step 1, saved")):
        with pytest.raises(KeyboardInterrupt):
            Results().attempt("train stage", lambda error=error: _raise(error))  # type: ignore[misc]


def test_a_fault_that_doctor_finds_ends_it_with_3_and_is_in_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    finding = Finding(level="error", what="version 2.9.0 is installed", where="torch", fix="Make it anew.")
    real = smoke_module.smoke
    monkeypatch.setattr(cli, "smoke", lambda *given: real(*given, checks=lambda root: [finding]))
    assert cli.main(["smoke", "--json", str(tmp_path / "out.json")]) == 3
    out, err = capsys.readouterr()
    assert "error: torch: version 2.9.0 is installed. Make it anew." in err
    assert [line.split()[0] for line in out.splitlines()] == ["check", "doctor"]
    assert err.splitlines()[-1].startswith("smoke: doctor failed (1 of 1 checks). doctor: the environment is not fit")
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["verdict"], [row["result"] for row in written["checks"]]) == ("fail", ["failed"])
    assert not (tmp_path / "cache").exists()


def test_a_gpu_that_is_asked_for_and_not_there_ends_it_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    factors = {"torch": "2.11.0", "triton": "3.6.0", "cuda": "none", "gpu_capability": "cpu"}
    monkeypatch.setattr(commands, "compile_factors", lambda root: factors)
    real = smoke_module.smoke
    monkeypatch.setattr(cli, "smoke", lambda *given: real(*given, checks=lambda root: []))
    assert cli.main(["smoke", "--device", "cuda"]) == 3
    assert "torch: --device cuda: no GPU that torch can use." in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("place", ["", "missing/out.json"])
def test_a_place_where_no_json_can_be_written_is_refused_before_anything_runs(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written\. Name a file in a folder that exists"):
        smoke_module.smoke("cpu", tmp_path / place, checks=lambda root: pytest.fail("doctor ran"))
