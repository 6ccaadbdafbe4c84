"""`invoke export`, `import` and `serve-command`: drafters for other projects' programs, and from them.

A drafter is named by a run or by a folder. Every folder written here holds interchange.json, which says where it comes
from; only such a folder, or an empty one, is written over.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.checkpoint import CONFIG
from dflash.interchange.drafter import ForeignDrafter, read_note, write_zlab
from dflash.interchange.engines import serving
from dflash.interchange.files import check_out
from dflash.interchange.reader import read_drafter
from dflash.interchange.speculators import write_speculators
from dflash.interchange.target import read_tables
from env.caches import CacheDirs
from pipeline.catalogue import load_catalogue, nearest
from pipeline.commands import ROOT, say
from pipeline.config import TargetConfig
from pipeline.errors import ConfigError
from pipeline.files import expand_user
from pipeline.runs import find_run
from pipeline.targets import resolve_target

FORMATS = ("zlab", "speculators")


@dataclass(frozen=True)
class _Target:
    """source: a named target, a folder, or a hub id with a revision; "" when nobody said."""

    source: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> _Target:
        """Return the target of `NAME`, `FOLDER` or `OWNER/NAME@COMMIT`."""
        hub = re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})", text)
        return cls(hub[1], hub[2]) if hub else cls(text)

    def folder(self, caches: CacheDirs) -> Path:
        """Return the target's files. A folder is taken as it is: its config.json may be all that is asked for."""
        if found := self.here():
            return found
        named = load_catalogue().targets
        if not self.revision and self.source not in named:
            what = f"{self.source!r} is no named target and no folder here; a hub id needs @ and the commit after it"
            raise ConfigError(what, where="--target", fix=nearest(self.source, named))
        config = TargetConfig(source=self.source, revision=self.revision or None)
        return resolve_target(config, caches.models, caches.packages).path

    def for_engines(self, caches: CacheDirs) -> str:
        """Return what an engine loads: a hub id, or the absolute folder."""
        is_path = self.source.startswith((".", "/", "~"))
        if is_path or self.here() or (not self.revision and self.source in load_catalogue().targets):
            return str(self.folder(caches))
        return self.source

    def here(self) -> Path | None:
        """Return the folder that the source is, None when it is a name or an id."""
        given = expand_user(self.source)
        is_name = not self.source or self.revision or self.source in load_catalogue().targets
        return given.resolve() if not is_name and given.is_dir() else None


def export_drafter(place: str, to: str, out: str, target: str = "", *, root: Path = ROOT) -> int:
    """Write a run's or a folder's drafter for other programs and return 0.

    to       "zlab" (vLLM, SGLang, z-lab's code, SpecForge) or "speculators" (with the target's embedding and head)
    target   for a folder; a run knows its own
    Raises ConfigError or DFlashError.
    """
    if to not in FORMATS:
        raise ConfigError(f"{to!r} is no format", where="--to", fix=f"One of {', '.join(FORMATS)}.")
    caches = CacheDirs.from_environment(root)
    folder, known = _find(place, caches)
    out_folder = expand_user(out)
    check_out(out_folder, folder)
    chosen = _Target.parse(target) if target else known
    drafter = read_drafter(folder, target=chosen.here())
    name = chosen.for_engines(caches) if chosen.source else drafter.target
    note = _note("export", folder, drafter, name, chosen.revision)
    if to == "zlab":
        write_zlab(out_folder, drafter, note)
    else:
        own = drafter.kept is not None
        tables = None if own or not chosen.source else read_tables(chosen.folder(caches), name)
        write_speculators(out_folder, drafter, tables, note)
        if own:
            say("with the embedding and head of the file it was imported from")
    _describe(drafter, folder)
    _warn(_format_warnings(drafter, to))
    say(f"written to {out_folder} in the format of {to}")
    return 0


def import_drafter(
    place: str, out: str, *, reading: str = "", target: str = "", config: str = "", root: Path = ROOT
) -> int:
    """Write another project's drafter as a folder that train.init_from takes and return 0.

    reading   how a silent file's sliding layers are meant, by project; "" for the project that wrote it
    target    says what the file leaves out
    config    config.json of weights that come without one
    Raises ConfigError or DFlashError.
    """
    caches = CacheDirs.from_environment(root)
    source, out_folder = expand_user(place), expand_user(out)
    check_out(out_folder, source)
    chosen = _Target.parse(target)
    drafter = read_drafter(
        source,
        reading=reading,
        config_file=expand_user(config) if config else None,
        target=chosen.folder(caches) if chosen.source else None,
    )
    name = chosen.for_engines(caches) if chosen.source else drafter.target
    note = _note("import", source, drafter, name, chosen.revision) | {"reading": reading or "its writer's"}
    write_zlab(out_folder, drafter, note)
    _describe(drafter, source)
    _warn(drafter.notes)
    say(f"written to {out_folder}; go on with it by train.init_from={out_folder}")
    return 0


def serve_command(place: str, engine: str = "vllm", target: str = "", *, root: Path = ROOT) -> int:
    """Print the command line that serves a run's or a folder's drafter and return 0; notes go to stderr.

    Raises ConfigError or DFlashError, also where the engine would compute another drafter than was trained.
    """
    caches = CacheDirs.from_environment(root)
    folder, known = _find(place, caches)
    chosen = _Target.parse(target) if target else known
    drafter = read_drafter(folder, target=chosen.here())
    name = chosen.for_engines(caches) if chosen.source else drafter.target
    if not name:
        raise ConfigError("nothing here says what its target is", where=place, fix="Name it with --target.")
    layout = "speculators" if drafter.format == "speculators" else "zlab"
    found = serving(engine, str(folder.resolve()), name, drafter.config, revision=chosen.revision, layout=layout)
    _warn(found.warnings)
    say(found.command)
    return 0


def _find(place: str, caches: CacheDirs) -> tuple[Path, _Target]:
    """Return the drafter's folder and its target, as far as the run or the folder's note knows it."""
    folder = expand_user(place)
    if (folder / CONFIG).is_file():
        note = read_note(folder)
        return folder, _Target(str(note.get("target") or ""), str(note.get("revision") or ""))
    run = find_run(place, caches.runs)
    if not run.drafter_dir.is_dir():
        raise ConfigError("the run has no drafter yet", where=place, fix="Finish its training first: invoke train.")
    return run.drafter_dir, _Target(run.config.target.source, run.config.target.revision or "")


def _note(verb: str, source: Path, drafter: ForeignDrafter, target: str, revision: str) -> dict[str, Any]:
    return {
        "by": f"invoke {verb}",
        "from": str(source.resolve()),
        "format": drafter.format,
        "target": target,
        "revision": revision,
    }


def _describe(drafter: ForeignDrafter, source: Path) -> None:
    config = drafter.config
    taps = ", ".join(map(str, config.target_layer_ids))
    say(
        f"{source}: {drafter.format} drafter, {config.num_hidden_layers} layers, block of {config.block_size}, "
        f"taps {taps} of {config.num_target_layers}, mask token {config.mask_token_id}, {config.dtype}"
    )


def _format_warnings(drafter: ForeignDrafter, to: str) -> list[str]:
    """Return what the reader of a format will not compute as this drafter was trained."""
    config = drafter.config
    if config.sliding_window is None:
        return []
    if to == "zlab" and config.window_reading == "anchor":
        return ["its window hangs on the anchor, which this format cannot say; engines hang it on each slot"]
    if to == "speculators" and config.window_reading == "slot":
        return ["its window hangs on each slot, as vLLM runs it; speculators' own code hangs it on the anchor"]
    return []


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"note: {line}", file=sys.stderr, flush=True)
