"""The image unpacked, for hosts without an OCI engine (LXC, Apptainer, chroot): `invoke build --rootfs OUT.tar`.

A root file system knows no variables and no entry point, so the archive gets /start, written from the image's own
configuration: `/start train --config configs/quickstart.yaml` does what `docker run IMAGE train ...` does.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from env.engines import Engine
from env.errors import EnvError
from env.image import engine_argv
from env.output import output_of

START = "start"


def write_rootfs(engine: Engine, name: str, out: Path, *, say: Callable[[str], None] = print) -> Path:
    """Write the file system of image `name` and /start as tar to `out`, complete or not at all. Raises EnvError."""
    if not out.parent.is_dir():
        raise EnvError("no such folder", where=str(out.parent), fix="Make it first.")
    if out.is_dir():
        raise EnvError("is a folder", where=str(out), fix="Name a file.")
    if engine.name == "buildah":
        raise EnvError("buildah cannot write a file system", where="--rootfs", fix="Use podman or docker.")
    argv = engine_argv(engine)
    config = output_of([*argv, "image", "inspect", "--format={{json .Config}}", name])
    container = output_of([*argv, "create", name]) if config is not None else None
    if config is None or container is None:
        raise EnvError("the image is not there", where=name, fix="Run: invoke build")
    growing = out.with_name(f".{out.name}.growing")
    try:
        with growing.open("wb") as file:
            done = subprocess.run([*argv, "export", container], stdout=file, stderr=subprocess.PIPE, check=False)
        if done.returncode != 0:
            reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise EnvError(f"{engine.name} export failed ({reason[-1]})", where=str(out), fix="Is the disk full?")
        about = json.loads(config)
        append_start(growing, start_script(about))
        growing.replace(out)
    finally:
        growing.unlink(missing_ok=True)
        output_of([*argv, "rm", container])
    say(f"{out}: {out.stat().st_size / 1e9:.2f} GB; unpack it as root, mount /cache, /runs, /tmp and start /start")
    return out


def start_script(config: Mapping[str, Any]) -> str:
    """Return /start for an image's configuration (Env, WorkingDir, Entrypoint, Cmd). Values that are set already stay,
    but for PATH and HOME, so that DFLASH_CACHE and DFLASH_RUNS can be moved."""
    variables = dict(entry.split("=", 1) for entry in config.get("Env") or [])
    lines = ["#!/bin/sh", "# Written by invoke build --rootfs from the image's configuration.", "set -eu"]
    for key, value in sorted(variables.items()):
        lines.append(f"export {key}={shlex.quote(value)}" if key in ("PATH", "HOME") else _default(key, value))
    lines.append(f"cd {shlex.quote(config.get('WorkingDir') or '/')}")
    entry: Sequence[str] = config.get("Entrypoint") or []
    command = " ".join(shlex.quote(word) for word in config.get("Cmd") or [])
    lines.append(f'[ "$#" -gt 0 ] || set -- {command}')
    # tini is for PID 1 of a container of its own; here the caller's own init does that.
    program = [word for word in entry if word not in ("/usr/bin/tini", "--")]
    lines.append(f'exec {" ".join(shlex.quote(word) for word in program)} "$@"')
    return "\n".join(lines) + "\n"


def _default(key: str, value: str) -> str:
    return f'[ -n "${{{key}:-}}" ] || {key}={shlex.quote(value)}; export {key}'


def append_start(archive: Path, script: str) -> None:
    """Add /start, executable, to a tar."""
    body = script.encode()
    member = tarfile.TarInfo(START)
    member.size, member.mode = len(body), 0o755
    with tarfile.open(archive, "a") as tar:
        tar.addfile(member, io.BytesIO(body))
