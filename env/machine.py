"""The machine as a program meets it: its user, its clock, its compilers."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

from env.caches import OWNED_VARIABLES
from env.findings import Finding, error, warning

_USER_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""In the order in which getpass.getuser asks for them."""
_DAY_SECONDS = 86_400.0
_COMPILE_TIMEOUT_SECONDS = 60.0
_CXX_SOURCE = """#include <Python.h>
{include_omp}
extern "C" PyObject* dflash_probe() {{ return PyLong_FromLong({threads}); }}
"""
_C_SOURCE = "#include <stdint.h>\n#include <stdlib.h>\nint dflash_probe(void) { return atexit(abort); }\n"


def check_user(
    environ: Mapping[str, str], *, has_name: bool, uid: int, owned: Collection[str] = OWNED_VARIABLES
) -> list[Finding]:
    """Return what a user id without a name breaks (pytorch#140765).

    has_name   the id has an entry in the password database
    owned      variables that are set before torch is imported, whatever the environment says

    torch 2.11.0 asks getpass.getuser() when torch._inductor.codecache is imported (_HEADER_DIR), also when the cache
    variables are set: with neither an entry nor one of _USER_NAMES that is a KeyError before any compile.
    """
    if has_name:
        return []
    findings = []
    if not any(environ.get(name) or name in owned for name in _USER_NAMES):
        what = "has no name (no passwd entry, USER not set): torch cannot import its compiler"
        findings.append(error(f"uid {uid}", what, "Set USER, in a container: --env USER=dflash"))
    if not environ.get("HOME"):
        what = "has no home (no passwd entry, HOME not set): libraries write to a folder named ~ in the working folder"
        findings.append(warning(f"uid {uid}", what, "Set HOME to a writable folder."))
    return findings


def current_user_has_name() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


def check_clock(now: float, newest: Path) -> list[Finding]:
    """Return whether the clock (seconds since 1970) is more than a day before the time of a file that is there already.

    Certificates look not yet valid then, and caches are pruned in the wrong order.
    """
    try:
        written = newest.stat().st_mtime
    except OSError:
        return []
    if now >= written - _DAY_SECONDS:
        return []
    what = f"says {_date(now)}, but {newest.name} was written on {_date(written)}"
    return [warning("clock", what, "Set the clock of this machine (NTP).")]


def check_compilers(environ: Mapping[str, str], include: Path) -> list[Finding]:
    """Return what keeps Inductor (C++) and Triton (C) from building a shared object at run time.

    include   the folder of this interpreter's Python.h
    A compiler that is there can still lack the C library's parts or OpenMP (pytorch#116696): so both build something.
    """
    findings = []
    mac = sys.platform == "darwin"
    cxx = environ.get("CXX") or ("clang++" if mac else "g++")
    cc = environ.get("CC") or next((name for name in ("gcc", "clang") if _which(name, environ)), "gcc")
    headers = (include / "Python.h").is_file()
    if not headers:
        fix = "On Debian: apt-get install python3-dev, for the Python that runs this."
        findings.append(error(str(include), "no Python.h", fix))
    openmp = [] if mac else ["-fopenmp"]  # on a Mac Inductor takes the one that torch brings
    source = _CXX_SOURCE.format(
        include_omp="" if mac else "#include <omp.h>", threads="1" if mac else "omp_get_max_threads()"
    )
    for variable, compiler, language, text, arguments in (
        (
            "CXX",
            cxx,
            "C++",
            source,
            ["-xc++", f"-I{include}", *openmp, *(["-undefined", "dynamic_lookup"] if mac else [])],
        ),
        ("CC", cc, "C", _C_SOURCE, ["-xc"]),
    ):
        program = _which(compiler, environ)
        if program is None:
            if environ.get(variable):
                what = f"{variable} names {compiler}, which is not there"
            else:
                what = f"no {language} compiler ({compiler})"
            findings.append(error("PATH", what, f"On Debian: apt-get install g++; elsewhere set {variable} to one."))
        elif (language == "C" or headers) and (reason := _cannot_build(program, text, arguments, environ)):
            what = f"cannot build a shared object ({reason})"
            findings.append(
                error(program, what, "On Debian: apt-get install g++ libc6-dev; it brings what is missing.")
            )
    return findings


def _which(program: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program, path=environ.get("PATH", os.defpath))


def _cannot_build(program: str, source: str, arguments: list[str], environ: Mapping[str, str]) -> str | None:
    """Return the compiler's first complaint, or None when it made a shared object."""
    try:
        with tempfile.TemporaryDirectory(prefix="dflash-doctor-") as folder:
            target = Path(folder) / "probe.so"
            done = subprocess.run(
                [program, "-shared", "-fPIC", *arguments, "-", "-o", str(target)],
                input=source,
                capture_output=True,
                text=True,
                errors="replace",
                env=dict(environ),
                timeout=_COMPILE_TIMEOUT_SECONDS,
                check=False,
            )
            if done.returncode == 0 and target.is_file():
                return None
    except subprocess.TimeoutExpired:
        return f"it did not end in {_COMPILE_TIMEOUT_SECONDS:.0f} s"
    except OSError as failure:
        return failure.strerror or str(failure)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line or "cannot find" in line), lines[0] if lines else "")
    return (first or f"exit {done.returncode}, nothing was written")[:160]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
