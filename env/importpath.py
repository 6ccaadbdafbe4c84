"""What reaches Python beside the installed distributions: modules that shadow locked ones, and code at its start."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import Distribution
from pathlib import Path

from env.findings import Finding, error
from env.installed import CORE, REMAKE, Found, base_folder, read_record

_VIRTUALENV_HOOK = ("_virtualenv.pth", "import _virtualenv")
"""What virtualenv puts into every environment it makes; it only mends distutils."""
_REMOVE = "Unset PYTHONPATH, set PYTHONNOUSERSITE=1, or remove it."


START_PATH = tuple(sys.path)
"""sys.path when the program started. Libraries add to it: torch imports setuptools, which adds its _vendor folder with
other versions of locked packages, and a check after training would find them."""


def site_folders() -> list[str]:
    """Return the folders of this interpreter whose .pth files run: site-packages, and the user's when enabled."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return folders


def check_shadowing(found: Found, names: Iterable[str], path: list[str] | None = None) -> list[Finding]:
    """Return modules of the distributions `names` that `path` (default: sys.path) has a second time.

    An earlier one is what is imported: an error. A later one is an error for CORE only. Copies that are distributions
    of the same name are left to compare_with_lock. Namespace packages cannot shadow anything.
    """
    entries = _entries(path)
    findings = []
    for name in dict.fromkeys([*names, *CORE]):
        copies = [os.path.realpath(base_folder(copy)) for copy in found.get(name, [])]
        modules = _modules(found[name][0]) if copies else {name}
        position = entries.index(copies[0]) if copies and copies[0] in entries else len(entries)
        for number, entry in enumerate(entries):
            if entry in copies or (number > position and name not in CORE):
                continue
            shadows = sorted(module for module in modules if _holds(entry, module))
            if not shadows:
                continue
            if not copies:
                what = "is a package that no distribution brought"
            elif number < position:
                what = f"is imported instead of the one of {name}=={found[name][0].version} in {copies[0]}"
            else:
                what = f"is a second {name} on the path, beside the one in {copies[0]}"
            findings.append(error(os.path.join(entry, shadows[0]), what, _REMOVE))
    return findings


def check_start_hooks(
    allowed: Mapping[str, Distribution], folders: Iterable[str] | None = None, path: list[str] | None = None
) -> list[Finding]:
    """Return the code that runs at every start of Python and that no distribution of `allowed` recorded.

    folders   where .pth files are read (default: site_folders() as far as they are on `path`)
    """
    entries = _entries(path)
    if folders is None:
        folders = [folder for folder in site_folders() if os.path.realpath(folder) in entries]
    owned = set()
    for distribution in allowed.values():
        base = os.path.realpath(base_folder(distribution))
        owned |= {os.path.join(base, row[0]) for row in read_record(distribution) if "/" not in row[0]}
    findings = []
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
        for file in sorted(Path(folder).glob("*.pth")):
            if str(file) in owned:
                continue
            try:
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue  # site cannot read it either
            code = [line.strip() for line in lines if line.startswith(("import ", "import\t"))]
            if code and (file.name, code[0]) != _VIRTUALENV_HOOK:
                what = f"runs code at every start of Python ({code[0][:80]}) and no locked package brought it"
                findings.append(error(str(file), what, f"Remove it. {REMAKE}"))
    for module in ("sitecustomize", *(["usercustomize"] if site.ENABLE_USER_SITE else [])):
        # The first one on the path is the one that runs; Debian and Ubuntu have theirs in the standard library.
        place = next((entry for entry in _entries(path, standard_library=True) if _holds(entry, module)), None)
        if place is None or place in _standard_library() or os.path.join(place, f"{module}.py") in owned:
            continue
        what = "runs at every start of Python and no locked package brought it"
        findings.append(error(os.path.join(place, module), what, _REMOVE))
    return findings


def _modules(distribution: Distribution) -> set[str]:
    """Return the top-level modules and regular packages of a distribution, as far as RECORD shows them."""
    modules = set()
    for relative, _, _ in read_record(distribution):
        first, _, rest = relative.partition("/")
        if (not rest and first.endswith((".py", ".so"))) or rest == "__init__.py":
            modules.add(first.partition(".")[0])
    return modules


def _holds(entry: str, module: str) -> bool:
    spec = PathFinder.find_spec(module, [entry])
    return spec is not None and spec.origin is not None  # a namespace package has no origin


def _entries(path: list[str] | None, *, standard_library: bool = False) -> list[str]:
    entries = dict.fromkeys(os.path.realpath(entry or ".") for entry in (sys.path if path is None else path))
    return [entry for entry in entries if standard_library or entry not in _standard_library()]


def _standard_library() -> set[str]:
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return {os.path.realpath(place) for folder in folders for place in (folder, os.path.join(folder, "lib-dynload"))}
