"""The image as pure functions: what goes into it, what it is called, and the command lines that build and run it.

Nothing here starts a program; tests need no engine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from env.engines import Engine
from env.errors import EnvError

COPIED = ("dflash", "env", "pipeline", "benchmarks", "configs", "lockfiles")
"""Folders that the Dockerfile copies; with it and .dockerignore they are everything that shapes the image."""
LOOSE = ("Dockerfile", ".dockerignore", "LICENSE")
SOURCE_IN_IMAGE = "/srv/dflash"
HOME_IN_IMAGE = "/cache/home"
SHM_BYTES = 1 << 30
"""Engines give 64 MiB; NCCL and loader workers die of a bus error when it is full (pytorch#5040)."""


@dataclass(frozen=True, kw_only=True)
class ImagePins:
    """lockfiles/images.yaml, checked."""

    registry: str
    suite: str
    packages: tuple[str, ...]
    epoch: int

    @classmethod
    def read(cls, path: Path) -> ImagePins:
        """Raises EnvError naming the key that is wrong."""
        fix = "Compare with the file in version control."
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise EnvError(f"cannot be read ({type(error).__name__})", where=str(path), fix=fix) from None
        if not isinstance(found, dict) or set(found) != {"registry", "suite", "packages", "epoch"}:
            raise EnvError("must hold registry, suite, packages and epoch", where=str(path), fix=fix)
        if not re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", str(found["registry"])):
            what = f"{found['registry']!r} is not pinned by digest"
            raise EnvError(what, where=f"{path}: registry", fix="Write NAME:TAG@sha256:DIGEST.")
        packages, epoch = found["packages"], found["epoch"]
        if not (isinstance(packages, list) and packages and all(isinstance(name, str) for name in packages)):
            raise EnvError(f"{packages!r} is no list of names", where=f"{path}: packages", fix=fix)
        if type(epoch) is not int or epoch < 0:
            raise EnvError(f"{epoch!r} is no number of seconds", where=f"{path}: epoch", fix=fix)
        return cls(
            registry=found["registry"],
            suite=str(found["suite"]),
            packages=tuple(packages),
            epoch=epoch,
        )


def context_files(root: Path, tracked: Sequence[str] | None) -> list[str]:
    """Return the files of the build context, sorted, relative to `root`.

    tracked   what version control knows; None where there is none, and then every file but bytecode counts
    """
    if tracked is None:
        tracked = [
            path.relative_to(root).as_posix()
            for folder in COPIED
            for path in (root / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ] + [name for name in LOOSE if (root / name).is_file()]
    return sorted(
        name for name in tracked if (name.partition("/")[0] in COPIED or name in LOOSE) and (root / name).is_file()
    )


def content_tag(root: Path, files: Sequence[str], base: str) -> str:
    """Return 12 hex digits over the base and over names, modes and contents of the files: the image's tag.

    A commit that changes none of them (README, tests) keeps the tag, and needs no other image.
    """
    digest = hashlib.sha256(f"{base}\0".encode())
    for name in files:
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{int(os.access(root / name, os.X_OK))}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def image_name(tag: str) -> str:
    """`localhost/` keeps every engine from asking a registry for it."""
    return f"localhost/dflash:{tag}"


def build_argv(
    engine: Engine,
    *,
    context: Path,
    name: str,
    epoch: int,
    arguments: Mapping[str, str],
    secrets: Mapping[str, Path] | None = None,
    scratch: bool = False,
    archive: Path | None = None,
) -> list[str]:
    """Return the command that builds `context` (it holds a Dockerfile) as image `name`.

    epoch     seconds since 1970 that every file and the image get
    secrets   {id: file} of the Dockerfile's secret mounts
    scratch   use no layer of an earlier build
    archive   docker only: write an OCI archive with rewritten times there instead of loading the image, since only
              such an output is the same twice
    """
    shared = [f"--build-arg={key}={value}" for key, value in sorted(arguments.items())]
    shared += [f"--secret=id={key},src={path}" for key, path in sorted((secrets or {}).items())]
    shared += ["--no-cache"] if scratch else []
    if engine.name == "docker":
        output = f"type=oci,dest={archive},rewrite-timestamp=true" if archive else "type=docker"
        shared += [f"--build-arg=SOURCE_DATE_EPOCH={epoch}", "--provenance=false", f"--output={output}"]
        return ["docker", "buildx", "build", "--quiet", *shared, f"--tag={name}", str(context)]
    # chroot: needs no OCI runtime and no cgroups, so it also builds inside other containers.
    shared += ["--isolation=chroot", "--format=oci", "--layers", f"--timestamp={epoch}"]
    return [*engine_argv(engine), "build", "--quiet", *shared, f"--tag={name}", str(context)]


def engine_argv(engine: Engine) -> list[str]:
    """Return the program with the options that this host asks for, before the subcommand."""
    if engine.name != "podman":
        return [engine.name]
    options = ["--runtime=runc", "--cgroup-manager=cgroupfs"] if engine.facts.hybrid_cgroups else []
    return ["podman", *options, "--events-backend=none"]


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host in the container."""

    source: Path
    target: str
    writable: bool = False


def run_argv(
    engine: Engine,
    image: str,
    command: Sequence[str],
    *,
    mounts: Sequence[Mount],
    user: str,
    network: bool,
    gpus: bool,
    pass_variables: Sequence[str] = (),
    set_variables: Mapping[str, str] | None = None,
    terminal: bool = False,
    keyboard: bool = False,
    entrypoint: str = "",
    shm_bytes: int = SHM_BYTES,
) -> list[str]:
    """Return the command that runs `command` in the image: read-only root, no privileges, written places mounted.

    user            "uid:gid" that files are written as
    network         False: the container has none
    gpus            all GPUs of the host: --gpus all for docker, CDI for podman
    pass_variables  names whose value is taken from this process, so that no secret stands in a command line
    terminal        give it a terminal for colours and bars; keyboard: also connect stdin
    Raises EnvError for an engine that cannot run containers.
    """
    if not engine.can_run:
        raise EnvError(f"{engine.name} builds images and cannot run them", fix="Install podman, or use --in venv.")
    argv = [*engine_argv(engine), "run", "--rm", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    # SELinux hosts deny mounts without a label; relabelling a user's files would be worse. No effect elsewhere.
    argv += ["--security-opt=label=disable"]
    if all(mount.target != "/tmp" for mount in mounts):
        argv += ["--tmpfs=/tmp:rw,nosuid,nodev,mode=1777"]
    argv += [f"--shm-size={shm_bytes}", f"--user={user}"]
    if not network:
        argv += ["--network=none"]
    elif engine.name == "podman" and not engine.facts.rootless:
        # Its bridge needs netavark and iptables, which minimal hosts lack; the container only downloads.
        argv += ["--network=host"]
    if engine.name == "podman":
        argv += ["--userns=keep-id"] if engine.facts.rootless else []
        argv += [] if engine.facts.may_raise_limits else ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
        argv += ["--device=nvidia.com/gpu=all"] if gpus else []
    else:
        argv += ["--gpus=all"] if gpus else []
    argv += ["--tty"] if terminal else []
    argv += ["--interactive"] if keyboard else []
    for mount in mounts:
        if ":" in f"{mount.source}{mount.target}":
            raise EnvError("a path with a colon cannot be mounted", where=str(mount.source), fix="Rename it.")
        argv.append(f"--volume={mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}")
    argv += [f"--env={name}" for name in pass_variables]
    argv += [f"--env={name}={value}" for name, value in sorted((set_variables or {}).items())]
    argv += [f"--entrypoint={entrypoint}"] if entrypoint else []
    return [*argv, image, *command]


def in_image(path: str, root: Path, home: Path) -> tuple[Path, str]:
    """Return (where a path that a person wrote is here, where the container sees it), so that it means the same there.

    Relative paths start at the repository, which is /srv/dflash there; ~ is the home folder of either side.
    """
    if path == "~" or path.startswith("~/"):
        return home / path[2:], f"{HOME_IN_IMAGE}/{path[2:]}".rstrip("/")
    if path.startswith("/"):
        return Path(path), os.path.normpath(path)
    return root / path, os.path.normpath(f"{SOURCE_IN_IMAGE}/{path}")


def describe(manifest: Mapping[str, Any]) -> str:
    """Return the one line about an image that a person reads after a build."""
    size = manifest["size_bytes"] / 1e9
    python, debian = (len(manifest["packages"][kind]) for kind in ("python", "debian"))
    return f"{manifest['name']}  {manifest['digest']}  {size:.2f} GB, {python} Python and {debian} Debian packages"
