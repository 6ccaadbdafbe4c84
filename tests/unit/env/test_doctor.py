"""Each check of doctor fires on the thing it looks for, and is silent without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from env import installed
from env.caches import CacheDirs, environment_for_compile
from env.doctor import check_compiler, check_disk, check_lock, check_variables, preflight
from env.errors import EnvError

Install = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, install: Install) -> Path:
    """Return a folder of packages that agrees with lockfiles/runtime.txt of the same project."""
    (tmp_path / "lockfiles").mkdir()
    (tmp_path / "lockfiles/runtime.txt").write_text("torch==2.11.0\ntransformers==5.17.0\n")
    (tmp_path / "lockfiles/dev.txt").write_text("torch==2.11.0\ntransformers==5.17.0\npytest==9.2.0\n")
    install("transformers", "5.17.0")
    return install("torch", "2.11.0")


def _lines(site: Path, *more: Path) -> list[str]:
    root = site.parent
    return [str(f) for f in check_lock(root, root / "lockfiles/runtime.txt", [str(site), *map(str, more)])]


def test_an_environment_that_equals_its_lock_has_no_findings(site: Path, install: Install) -> None:
    install("pytest", "9.2.0")  # in dev.txt, so no stranger
    install("pip", "24.0")
    assert _lines(site) == []


def test_a_missing_distribution_is_an_error(site: Path) -> None:
    lock = site.parent / "lockfiles/runtime.txt"
    lock.write_text(lock.read_text() + "rich==15.0.0\n")
    (line,) = _lines(site)
    assert line.startswith("error: rich==15.0.0 (runtime.txt): is not installed. ")


def test_another_version_is_an_error_that_names_both(site: Path, tmp_path: Path) -> None:
    (tmp_path / "lockfiles/runtime.txt").write_text("torch==2.11.0\ntransformers==4.57.1\n")
    (line,) = _lines(site)
    assert line.startswith("error: transformers: version 5.17.0 is installed, the lock says 4.57.1. ")


@pytest.mark.parametrize(
    "damage, how",
    [
        (lambda path: path.write_text("VERSION = '2.11.1'\n"), "content"),  # the same length
        (lambda path: path.write_text("VERSION = '2.11.0'\nimport patch\n"), "size"),
        (lambda path: path.unlink(), "gone"),
    ],
)
def test_a_patched_file_of_torch_is_an_error(site: Path, damage: Callable[[Path], None], how: str) -> None:
    damage(site / "torch.py")
    (line,) = _lines(site)
    assert line.startswith(f"error: torch==2.11.0: differs from what was installed: torch.py ({how}). ")


def test_files_above_the_limit_are_compared_by_size_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "HASHED_UP_TO_BYTES", 4)
    (site / "torch.py").write_text("VERSION = '2.11.1'\n")
    assert _lines(site) == []
    (site / "torch.py").write_text("VERSION = '2.11.10'\n")
    assert "torch.py (size)" in _lines(site)[0]


@pytest.mark.parametrize("name", ["flash-attn", "Flash_Attn", "vllm", "deepspeed", "torch-nightly"])
def test_a_package_that_brings_or_patches_torch_is_an_error(site: Path, install: Install, name: str) -> None:
    install(name, "1.0")
    (line,) = _lines(site)
    assert line.startswith(f"error: {installed.canonical(name)}==1.0: is not in the lock and ")


def test_an_unlisted_package_that_builds_on_torch_is_an_error_too(site: Path, install: Install) -> None:
    install("fast-kernels-42", "0.1", ("Torch>=2.0; python_version > '3'", "numpy"))
    (line,) = _lines(site)
    assert "fast-kernels-42==0.1: is not in the lock and builds on torch" in line


def test_any_other_stranger_is_a_warning(site: Path, install: Install) -> None:
    install("ipython", "9.0")
    (line,) = _lines(site)
    assert line.startswith("warning: ipython==9.0: is not in the lock. ")


def test_a_second_torch_on_the_path_is_an_error(site: Path, install: Install) -> None:
    other = install("torch", "2.11.0", into="other")
    (line,) = _lines(site, other)
    assert line.startswith("error: torch: is installed 2 times; ")


def test_a_path_that_is_named_twice_is_no_second_copy(site: Path) -> None:
    assert _lines(site, site) == []


@pytest.mark.parametrize(
    "name, value, level",
    [
        ("TORCHDYNAMO_DISABLE", "1", "error"),
        ("TORCH_COMPILE_DISABLE", "1", "error"),
        ("TRITON_INTERPRET", "1", "error"),
        ("TORCH_COMPILE_DISABLE", "0", "warning"),
        ("TORCH_LOGS", "dynamo", "warning"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "warning"),
        ("TRITON_PTXAS_PATH", "/opt/ptxas", "warning"),
        ("LD_PRELOAD", "libjemalloc.so", "warning"),
        ("PYTHONPATH", "/opt/other", "warning"),
    ],
)
def test_a_leftover_variable_is_found(name: str, value: str, level: str) -> None:
    (finding,) = check_variables({"HOME": "/root", name: value})
    assert (finding.level, finding.where) == (level, name)
    assert value in finding.what and f"unset {name}" in finding.fix


def test_our_own_cache_variables_and_empty_ones_are_no_leftovers(tmp_path: Path) -> None:
    assert check_variables({**environment_for_compile(tmp_path), "PYTHONPATH": "", "DFLASH_RUNS": "/runs"}) == []


def test_a_missing_compiler_and_missing_headers_are_errors(tmp_path: Path) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    (tmp_path / "Python.h").write_text("")
    fit = {"PATH": str(tmp_path)}
    assert check_compiler(fit, tmp_path) == []
    assert "no C++ compiler" in check_compiler({"PATH": str(tmp_path / "empty")}, tmp_path)[0].what
    assert "CXX names nvc++" in check_compiler({**fit, "CXX": "nvc++"}, tmp_path)[0].what
    assert "no Python.h" in check_compiler(fit, tmp_path / "empty")[0].what


def test_a_full_or_unwritable_place_is_an_error_that_names_the_variable(tmp_path: Path) -> None:
    caches = CacheDirs.from_environment(tmp_path, {"DFLASH_RUNS": "file/runs"})
    (tmp_path / "file").write_text("")
    plenty = {"cache": 1, "runs": 1}
    assert [(f.where, f.fix) for f in check_disk(caches, plenty)] == [
        (str(tmp_path / "file"), "Set DFLASH_RUNS to a folder that is.")
    ]
    (tmp_path / "file").unlink()
    assert check_disk(caches, plenty) == []
    (finding,) = check_disk(caches, {"cache": 1 << 60, "runs": 1})
    assert "GiB free" in finding.what and "DFLASH_CACHE" in finding.fix


def test_errors_come_before_warnings(site: Path) -> None:
    levels = [f.level for f in preflight(site.parent, environ={**os.environ, "LD_PRELOAD": "x.so"})]
    assert levels == sorted(levels) and "warning" in levels


def test_a_missing_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"nothing\.txt: no such lock"):
        check_lock(tmp_path, tmp_path / "nothing.txt")


def _doctor(repository: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "PYTORCH", "TRITON"))}
    command = [sys.executable, "-m", "env.doctor", *arguments]
    return subprocess.run(command, cwd=repository, env={**environ, **variables}, capture_output=True, text=True)


def test_the_command_says_one_line_each_and_exits_3_for_errors_only(repository: Path, tmp_path: Path) -> None:
    fit = _doctor(repository, "--json", str(tmp_path / "fit.json"))
    assert fit.returncode == 0, fit.stderr
    ill = _doctor(repository, "--json", str(tmp_path / "ill.json"), TORCHDYNAMO_DISABLE="1")
    assert ill.returncode == 3
    assert ill.stderr.startswith("error: TORCHDYNAMO_DISABLE: is '1': torch.compile does nothing.")
    assert json.loads((tmp_path / "ill.json").read_text())[0]["where"] == "TORCHDYNAMO_DISABLE"
    missing = _doctor(repository, "--lock", "nowhere.txt")
    assert (
        missing.returncode == 3
        and missing.stderr == "nowhere.txt: no such lock. lockfiles/runtime.txt is the usual one.\n"
    )


def test_doctor_imports_no_torch(repository: Path) -> None:
    script = "import sys, tasks, env.doctor, env.fingerprint, env.caches; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=repository).returncode == 0
