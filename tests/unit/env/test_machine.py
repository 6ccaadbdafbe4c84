"""User, clock and compilers, with made-up users and with compilers that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from env.machine import check_clock, check_compilers, check_user

INCLUDE = Path(sysconfig.get_path("include"))
NAMELESS = """
import os, pwd, sys
def no_entry(uid): raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = no_entry
import torch._inductor.codecache
"""


def test_a_uid_without_a_name_is_an_error_and_a_variable_cures_it() -> None:
    """pytorch/pytorch#140765."""
    (finding,) = check_user({"HOME": "/tmp"}, has_name=False, uid=54321, owned=())
    assert (finding.level, finding.where) == ("error", "uid 54321") and "--env USER=dflash" in finding.fix
    assert check_user({"HOME": "/tmp", "USER": "dflash"}, has_name=False, uid=54321, owned=()) == []
    assert check_user({"HOME": "/tmp"}, has_name=False, uid=54321, owned={"USER"}) == []
    assert check_user({}, has_name=True, uid=0, owned=()) == []


@pytest.mark.parametrize("name, works", [("", False), ("dflash", True)])
def test_torch_does_what_the_finding_says(tmp_path: Path, name: str, works: bool) -> None:
    """pytorch/pytorch#140765: also when the cache variables are set, with the locked torch."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environ |= {"USER": name} if name else {}
    done = subprocess.run([sys.executable, "-c", NAMELESS], env=environ, capture_output=True, text=True)
    assert (done.returncode == 0) is works, done.stderr
    assert works or "uid not found" in done.stderr
    assert (check_user(environ, has_name=False, uid=1, owned=()) == []) is works


def test_a_uid_without_a_home_is_a_warning() -> None:
    (finding,) = check_user({"USER": "dflash"}, has_name=False, uid=54321)
    assert finding.level == "warning" and "HOME" in finding.fix


def test_a_clock_before_the_files_of_the_checkout_is_a_warning(tmp_path: Path) -> None:
    lock = tmp_path / "runtime.txt"
    lock.write_text("")
    written = 1_795_000_000.0  # 2026-11-18
    os.utime(lock, (written, written))
    (finding,) = check_clock(0.0, lock)
    assert (finding.level, finding.where) == ("warning", "clock")
    assert finding.what == "says 1970-01-01, but runtime.txt was written on 2026-11-18"
    assert check_clock(written - 3600, lock) == []  # another time zone is no wrong clock
    assert check_clock(written + 1e9, lock) == []
    assert check_clock(0.0, tmp_path / "gone") == []


def _program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder / name


def test_the_compilers_of_this_machine_build_a_shared_object() -> None:
    assert check_compilers(os.environ, INCLUDE) == []


def test_missing_compilers_and_headers_are_errors(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path / "empty")}
    what = [f.what for f in check_compilers(environ, INCLUDE)]
    assert what == ["no C++ compiler (g++)", "no C compiler (gcc)"]
    what = [f.what for f in check_compilers({**environ, "CXX": "nvc++", "CC": "nvc"}, INCLUDE)]
    assert what == ["CXX names nvc++, which is not there", "CC names nvc, which is not there"]
    assert [f.what for f in check_compilers(os.environ, tmp_path)] == ["no Python.h"]


def test_a_compiler_whose_libraries_are_missing_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    """pytorch/pytorch#116696: a slim image has the compiler, not the C library's parts that linking needs."""
    words = "/usr/bin/ld: cannot find /usr/lib/libc_nonshared.a"
    linker_fails = _program(
        tmp_path / "bin", "cc", f"cat >/dev/null; echo 'warning: x' >&2; echo '{words}' >&2; exit 1"
    )
    (finding,) = check_compilers({**os.environ, "CC": str(linker_fails)}, INCLUDE)
    assert finding.level == "error" and finding.where == str(linker_fails) and words in finding.what


def test_a_compiler_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    program = _program(tmp_path / "bin", "c++", "cat >/dev/null")
    (finding,) = check_compilers({**os.environ, "CXX": str(program)}, INCLUDE)
    assert "nothing was written" in finding.what


def test_headers_that_do_not_compile_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "Python.h").write_text('#include "pyconfig-of-another-machine.h"\n')
    (finding,) = check_compilers(os.environ, tmp_path)
    assert "pyconfig-of-another-machine.h" in finding.what
