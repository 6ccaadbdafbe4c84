"""Container engines of the host: which one is used, why, and what this machine asks of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from env.errors import EnvError
from env.output import output_of

ENGINES = ("docker", "podman", "buildah")
"""In the order of preference. docker needs its daemon and BuildKit; buildah builds and cannot run."""
_CAP_SYS_RESOURCE = 24


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the kernel of this host allows; decides flags of podman and buildah."""

    hybrid_cgroups: bool = False
    """cgroups v1 and v2 mixed, or v1 alone: crun, podman's default, refuses it; runc runs."""
    may_raise_limits: bool = True
    """Without CAP_SYS_RESOURCE podman cannot set its default limits and starts nothing."""
    rootless: bool = False

    @classmethod
    def read(cls, proc: Path = Path("/proc"), sys_fs: Path = Path("/sys/fs/cgroup"), uid: int = 0) -> HostFacts:
        """Return the facts of this machine."""
        try:
            status = (proc / "self" / "status").read_text(encoding="utf-8")
            effective = int(status.split("CapEff:")[1].split()[0], 16)
        except (OSError, IndexError, ValueError):
            effective = 0
        return cls(
            hybrid_cgroups=sys_fs.is_dir() and not (sys_fs / "cgroup.controllers").is_file(),
            # Without root podman sets no limits above its own.
            may_raise_limits=uid != 0 or bool(effective >> _CAP_SYS_RESOURCE & 1),
            rootless=uid != 0,
        )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine that answered."""

    name: str
    why: str
    facts: HostFacts = HostFacts()

    @property
    def can_run(self) -> bool:
        return self.name != "buildah"


def find_engine(
    wanted: str = "",
    *,
    facts: HostFacts = HostFacts(),
    which: Callable[[str], str | None] = shutil.which,
    answers: Callable[[list[str]], str | None] | None = None,
) -> Engine | None:
    """Return the first engine that works, None when there is none.

    wanted    only this one
    answers   runs a command: what it prints, or None when it fails; a client without its daemon is no engine
    Raises EnvError when `wanted` does not work here, with the reason.
    """
    ask = answers or (lambda command: output_of(command, timeout_seconds=30))
    if wanted and wanted not in ENGINES:
        raise EnvError(f"{wanted!r} is no engine", where="--engine", fix=f"Choose one of {', '.join(ENGINES)}.")
    reasons = []
    for name in [wanted] if wanted else ENGINES:
        if which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        problem = _problem(name, ask)
        if problem:
            reasons.append(problem)
            continue
        return Engine(name=name, why="; ".join([*reasons, f"{name} works"]), facts=facts)
    if wanted:
        raise EnvError(reasons[0], where="--engine", fix="Install or start it, or leave the option out.")
    return None


def _problem(name: str, ask: Callable[[list[str]], str | None]) -> str | None:
    if name == "docker":
        if ask(["docker", "version", "--format", "{{.Server.Version}}"]) is None:
            return "docker has no running daemon"
        if ask(["docker", "buildx", "version"]) is None:
            return "docker has no buildx (BuildKit), which the build needs for its secrets"
        return None
    return None if ask([name, "--version"]) is not None else f"{name} does not start"
