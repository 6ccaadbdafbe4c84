"""The locks: lockfiles/*.in, which people edit, compiled into hashed, universal lockfiles/*.txt without a host name.

Another source of packages than the configured index never enters a lock, so the same files work behind any mirror.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from env.errors import EnvError
from env.uvtool import run_uv

NAMES = ("runtime", "dev", "host", "next")
"""In the order of compilation: dev and host are constrained by runtime.txt."""
PYTHON_VERSION = "3.11"
"""The oldest Python that is supported; the universal lock forks by marker where newer ones differ."""

# An address, a direct reference, an absolute path, or an option that names an index. Comments are published too.
_FOREIGN = re.compile(
    r"\w+://\S+| @ \S+|(?:^|[\s=])/\S+"
    r"|^\s*(?:-i|-f|--(?:extra-)?index-url|--default-index|--index|--find-links|--trusted-host)\b.*"
)
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(?:\s*;\s*([^\\]+?))?\s*\\?$")


def compile_locks(root: Path, *, upgrade: Collection[str] = (), uv: Path | None = None) -> None:
    """Write lockfiles/*.txt from lockfiles/*.in, keeping every pin that still fits; `upgrade` names locks that take the
    newest versions instead. Raises EnvError."""
    for name in NAMES:
        run_uv(
            [
                "pip",
                "compile",
                "--quiet",
                "--universal",
                "--generate-hashes",
                "--no-build",  # a package without wheels would run its own code here, and again at every user's
                f"--python-version={PYTHON_VERSION}",
                # uv would repeat the command line in the header, with the path of the copy that a check compiles.
                "--custom-compile-command=invoke lock",
                f"--output-file=lockfiles/{name}.txt",
                *(["--upgrade"] if name in upgrade else []),
                f"lockfiles/{name}.in",
            ],
            where=f"lockfiles/{name}.in",
            cwd=root,
            uv=uv,
        )
        refuse_hosts(root / "lockfiles" / f"{name}.txt", shown=f"lockfiles/{name}.txt")


def check_locks(root: Path, *, uv: Path | None = None) -> None:
    """Raise EnvError unless each lock is what uv makes of its .in when it is given that lock as its preference.

    So a newer release on the index is no drift; an edited .in, an edited .txt or a withdrawn release is.
    """
    for name in NAMES:
        lock = root / "lockfiles" / f"{name}.txt"
        if not lock.is_file():
            raise EnvError("no such lock", where=f"lockfiles/{name}.txt", fix="Run: invoke lock")
        refuse_hosts(lock, shown=f"lockfiles/{name}.txt")
    with tempfile.TemporaryDirectory(prefix="dflash-lock-") as folder:
        shutil.copytree(root / "lockfiles", Path(folder) / "lockfiles")
        compile_locks(Path(folder), uv=uv)
        for name in NAMES:
            difference = first_difference(
                (root / "lockfiles" / f"{name}.txt").read_text(encoding="utf-8"),
                (Path(folder) / "lockfiles" / f"{name}.txt").read_text(encoding="utf-8"),
            )
            if difference:
                raise EnvError(
                    f"is not what lockfiles/{name}.in gives: {difference}",
                    where=f"lockfiles/{name}.txt",
                    fix="Run: invoke lock, and commit the result.",
                )


def refuse_hosts(lock: Path, *, shown: str) -> None:
    """Raise EnvError if the lock holds an address, a local path or an index option."""
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), start=1):
        if match := _FOREIGN.search(line):
            raise EnvError(
                f"names a source of packages: {match[0].strip()[:120]}",
                where=f"{shown}:{number}",
                fix="A lock holds names, versions and hashes only; take the address out of the .in file.",
            )


def first_difference(current: str, wanted: str) -> str | None:
    """Return the first requirement in which two lock texts differ, in words, or None when the texts are equal."""
    if current == wanted:
        return None
    have, want = _blocks(current), _blocks(wanted)
    for pin in sorted({*have, *want}):
        name = pin.partition("==")[0]
        if pin not in want:
            other = next((other for other in want if other.partition("==")[0] == name and other not in have), None)
            return f"{pin} should be {other}" if other else f"{pin} should not be there"
        if pin not in have and not any(other.partition("==")[0] == name and other not in want for other in have):
            return f"{pin} is missing"
        if pin in have and have[pin] != want[pin]:
            return f"{pin} has other hashes or other reasons (via)"
    return "the header or the order of the lines differs"


def _blocks(text: str) -> dict[str, str]:
    """Return {"name==version ; marker": its hashes and comments} of a lock's text."""
    blocks: dict[str, str] = {}
    pin = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            pin = line.rstrip("\\ ")
            blocks[pin] = ""
        elif pin:
            blocks[pin] += line + "\n"
    return blocks


def parse_lock(lock: Path, environment: dict[str, str] | None = None) -> dict[str, tuple[str, str | None]]:
    """Return {name: (version, marker)} of the requirements that apply here, names in lower case with dashes.

    environment   marker variables that differ from this interpreter's, e.g. {"sys_platform": "darwin"}
    Raises EnvError for a line that is no pin, and when two pins of a name apply at once.
    """
    # Here, not at the top: the runtime has packaging, the host tools do not and never read a lock this way.
    from packaging.markers import Marker
    from packaging.utils import canonicalize_name

    pins: dict[str, tuple[str, str | None]] = {}
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(("#", "--hash=")):
            continue
        match = _PIN.match(line)
        if match is None:
            raise EnvError(f"is not a pin: {line.strip()[:80]}", where=f"{lock}:{number}", fix="Run: invoke lock")
        marker = match[3].strip() if match[3] else None
        if marker is not None and not Marker(marker).evaluate(environment):
            continue
        name = str(canonicalize_name(match[1]))
        if name in pins:
            raise EnvError(
                f"{name} is pinned twice for this platform", where=f"{lock}:{number}", fix="Run: invoke lock"
            )
        pins[name] = (match[2], marker)
    return pins
