"""The base of the image without a registry: a minimal Debian made from its packages by mmdebstrap.

The same package index gives the same bytes (measured: two runs, one sha256). A later index has newer packages; the list
of packages beside the archive then says which. The address of the package index is not left in it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from env.errors import EnvError
from env.image import ImagePins
from env.output import output_of

_LEFT_OUT = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")


def make_base(pins: ImagePins, out: Path) -> Path:
    """Write the root filesystem as tar to `out` (complete or not at all) and `out`.packages; return `out`.

    Uses the package sources of this machine's apt. Raises EnvError when mmdebstrap or a source is missing.
    """
    if shutil.which("mmdebstrap") is None:
        what = "mmdebstrap is not installed and no registry was chosen"
        raise EnvError(what, where="base image", fix="apt-get install mmdebstrap, or: invoke build --base registry")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".base-", dir=out.parent) as folder:
        sources = Path(folder) / "sources.list"
        sources.write_text("\n".join(apt_sources(_index_targets(), pins.suite)) + "\n", encoding="utf-8")
        growing, packages = Path(folder) / "base.tar", Path(folder) / "packages"
        command = mmdebstrap_argv(pins, out=growing, sources=sources, packages=packages)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(pins.epoch)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EnvError(f"mmdebstrap failed ({_reason(done.stderr)})", where="base image", fix="Mend that first.")
        packages.replace(out.with_name(out.name + ".packages"))
        growing.replace(out)
    return out


def can_make_base(pins: ImagePins) -> bool:
    """Return whether this host has mmdebstrap and package sources of the suite (Ubuntu has none of Debian's)."""
    if shutil.which("mmdebstrap") is None:
        return False
    try:
        return bool(apt_sources(_index_targets(), pins.suite))
    except EnvError:
        return False


def apt_sources(index_targets: str, suite: str) -> list[str]:
    """Return the lines of a sources.list for `suite` and its updates, from what apt says of its indexes.

    index_targets   lines "SITE RELEASE COMPONENT KIND"
    Raises EnvError when this machine's apt has no such suite.
    """
    rows = [line.split() for line in index_targets.splitlines()]
    lines = sorted(
        {
            f"deb {site} {release} {component}"
            for site, release, component, kind in (row for row in rows if len(row) == 4)
            if kind == "Packages"
            and component == "main"
            and re.fullmatch(rf"{re.escape(suite)}(-updates|-security)?", release)
        }
    )
    if not any(line.split()[2] == suite for line in lines):
        fix = "Add it to apt's sources, or: invoke build --base registry"
        raise EnvError(f"this machine's apt has no {suite!r} main", where="base image", fix=fix)
    return lines


def mmdebstrap_argv(pins: ImagePins, *, out: Path, sources: Path, packages: Path) -> list[str]:
    """Return the command that writes the base to `out` and the list of its packages to `packages`."""
    return [
        *("mmdebstrap", "--variant=minbase", "--mode=auto", "--quiet", "--include=" + ",".join(pins.packages)),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        '--customize-hook=rm -f "$1"/etc/resolv.conf "$1"/etc/hostname "$1"/etc/apt/sources.list.d/0000sources.list',
        f'--customize-hook=chroot "$1" dpkg-query -W > {shlex.quote(str(packages))}',
        '--customize-hook=rm -rf "$1"/var/log/apt "$1"/var/log/*.log "$1"/var/cache/ldconfig/aux-cache',
        *(pins.suite, str(out), str(sources)),
    ]


def _index_targets() -> str:
    form = "$(SITE) $(RELEASE) $(COMPONENT) $(CREATED_BY)"
    listing = output_of(["apt-get", "indextargets", "--format", form])
    if listing is None:
        fix = "Use a Debian host, or: invoke build --base registry"
        raise EnvError("apt-get cannot say where its packages come from", where="base image", fix=fix)
    return listing


def _reason(stderr: str) -> str:
    lines: Sequence[str] = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "error:"))]
    return re.sub(r"\w+://\S+", "<address>", (errors or list(lines) or ["it gave no reason"])[0])[:300]
