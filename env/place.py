"""Where a command runs: in the image of this checkout when it is built, else in the locked environment of this host."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env.build import built_image, host_engine
from env.caches import CacheDirs
from env.container import checked_code, container_argv, make_places, needs
from env.engines import ENGINES, Engine
from env.errors import EnvError
from env.foreground import run_foreground
from env.image import Mount
from env.venv import ensure_runtime, runtime_folder

PLACES = ("auto", "image", "venv")


@dataclass(frozen=True, kw_only=True)
class Place:
    """kind: "here" inside our image, "venv", or "image" with the engine that runs it."""

    kind: str
    line: str = ""
    """What a person is told once, before the command; empty inside the image."""
    engine: Engine | None = None
    image: dict[str, Any] = field(default_factory=dict)


def in_our_image() -> bool:
    """Other containers are hosts like any other: only our image brings the locked packages with it."""
    return os.environ.get("DFLASH_IN_IMAGE") == "1"


def choose_place(
    wanted: str,
    root: Path,
    caches: CacheDirs,
    *,
    engine: Callable[..., Engine | None] = host_engine,
    image: Callable[[Path, CacheDirs, Engine], dict[str, Any] | None] = built_image,
) -> Place:
    """Return the place for `wanted`: "auto", "image" or "venv". Raises EnvError when there is no image to run in."""
    if wanted not in PLACES:
        raise EnvError(f"{wanted!r} is no place", where="--in", fix=f"Choose one of {', '.join(PLACES)}.")
    if in_our_image():
        return Place(kind="here")
    folder = runtime_folder(root, caches)
    shown = folder.relative_to(root) if folder.is_relative_to(root) else folder
    if wanted == "venv":
        return Place(kind="venv", line=f"Using the locked environment {shown}")
    found = engine()
    if found is None or not found.can_run:
        what = (
            f"No container engine ({', '.join(ENGINES)}) works on this host"
            if found is None
            else f"{found.name} builds images and cannot run them"
        )
        if wanted == "image":
            raise EnvError(what, where="--in image", fix="Install docker or podman, or leave --in out.")
        return Place(kind="venv", line=f"{what}: using the locked environment {shown}")
    manifest = image(root, caches, found)
    for name in ENGINES if manifest is None else ():  # it may have been built with --engine
        with contextlib.suppress(EnvError):
            other = engine(name) if name != found.name else None
            if other is not None and other.can_run and (manifest := image(root, caches, other)) is not None:
                found = other
                break
    if manifest is None:
        what = "no image of this checkout is built"
        if wanted == "image":
            raise EnvError(what, where=found.name, fix="Run: invoke build")
        line = f"Found {found.name}, but {what} (invoke build): using the locked environment {shown}"
        return Place(kind="venv", line=line)
    line = f"In the image {manifest['name']} ({found.name}); /cache is {caches.root}, /runs is {caches.runs}"
    return Place(kind="image", line=line, engine=found, image=manifest)


def run_there(
    place: Place,
    command: Sequence[str],
    module: Sequence[str],
    *,
    root: Path,
    caches: CacheDirs,
    say: Callable[[str], None],
    ask: Sequence[str] = (),
    named: Sequence[str] = (),
    outputs: Sequence[Path] = (),
    keyboard: bool = False,
) -> int:
    """Run a command in the foreground and return its exit code.

    command   for the image's entry point, e.g. ["train", "--config", "x.yaml"]
    module    the same for Python, e.g. ["-m", "pipeline", "train", ...]
    ask       arguments of `needs` when the command reads a configuration or a run: the files it names are mounted, and
              the network is there only if something must be fetched
    named     paths that the command itself names; outputs: folders that are written to
    """
    if place.line:
        say(place.line)
    if place.kind != "image":
        python = sys.executable if place.kind == "here" else str(ensure_runtime(root, caches, say=say))
        return run_foreground([python, *module], cwd=root)
    assert place.engine is not None
    make_places(caches)
    read = list(named)
    fetch: list[str] = []
    if ask:
        question = ["needs", *ask]
        answer = needs(
            container_argv(
                place.engine, place.image["name"], question, root=root, caches=caches, named=read, gpus=False
            )
        )
        if isinstance(answer, int):
            return answer
        read += answer["files"]
        fetch = answer["fetch"]
        say(f"Network: for {', '.join(fetch)}" if fetch else "Network: none, everything is cached")
    argv = container_argv(
        place.engine,
        place.image["name"],
        command,
        root=root,
        caches=caches,
        named=read,
        network=bool(fetch),
        # A terminal without a keyboard would swallow Ctrl-C: engines pass signals on only without one.
        terminal=keyboard and sys.stdout.isatty(),
        keyboard=keyboard,
        more=[Mount(source=folder, target=str(folder), writable=True) for folder in outputs],
    )
    return checked_code(run_foreground(argv, cwd=root), place.engine.name)


def run_name(path: str, root: Path, caches: CacheDirs) -> str:
    """Return a run folder as every place finds it: its name, for one below the runs folder."""
    here = root / Path(path).expanduser()
    return here.name if here.parent.resolve() == caches.runs.resolve() else path
