"""The order of a run's stages. A stage is finished when its manifest is published; finished stages are skipped.

The manifest of a stage is runs/<id>/<stage>.json: what the stage's function returned, with the time it finished, its
seconds and the hash of the source that made it. For `verify` that file holds the gates. The stage itself writes it
too, so that the gates can be read after a failure; only a passed one gets a "finished" time. A failed one runs again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeGuard

from pipeline.errors import ConfigError, Interrupted, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.runs import Run, read_manifest

STAGES = ("cache", "train", "verify")

Stage = Callable[[Run], dict[str, Any]]
Log = Callable[[str], None]


def run_stages(
    run: Run,
    functions: Mapping[str, Stage],
    *,
    only: str | None,
    start_from: str | None,
    force: bool,
    source_hash: str,
    log: Log,
) -> None:
    """Run the stages that are not finished, in order, and keep stages.json.

    only        runs this stage alone; ConfigError when the one before it is not finished
    start_from  runs this stage and the later ones again, from nothing
    force       the same from the first stage, or from the `only` one
    Raises whatever a stage raises, after its line is in stages.json.
    """
    if only and start_from:
        raise ConfigError("--stage and --from exclude each other", fix="Give one of them.")
    for name in (only, start_from):
        if name and name not in STAGES:
            raise ConfigError(f"there is no stage {name!r}", fix=f"Stages: {', '.join(STAGES)}.")
    chosen = (only,) if only else STAGES
    first = only or start_from
    if first:
        _require_earlier(run, first)
    again: tuple[str, ...] = ()
    if force or start_from:
        again = (only,) if only else STAGES[STAGES.index(start_from) if start_from else 0 :]

    book = _Book(run)
    if again:
        _remove_manifests(run, STAGES.index(again[0]), book)
        _remove_outputs(run, again, log)
    for name in chosen:
        if manifest := _finished(run, name, log):
            log(_skip_line(name, manifest, source_hash))
            book.put(name, "skipped", seconds=manifest.get("seconds"), finished=manifest["finished"])
            continue
        _remove_manifests(run, STAGES.index(name), book)
        _run_one(run, name, functions[name], source_hash, book, log)


def _run_one(run: Run, name: str, function: Stage, source_hash: str, book: _Book, log: Log) -> None:
    log(f"{name}: started")
    book.put(name, "running")
    begin = time.monotonic()
    try:
        manifest = dict(function(run))
        if manifest.get("verdict") == "fail":
            raise VerificationFailed(
                "the verdict is fail", where=run.manifest_path(name).name, fix="Its gates say why."
            )
        seconds = round(time.monotonic() - begin, 1)
        finished = _now()
        manifest |= {"finished": finished, "seconds": seconds, "source": source_hash}
        atomic_write_json(run.manifest_path(name), manifest)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | Interrupted)
        seconds = round(time.monotonic() - begin, 1)
        book.put(name, "interrupted" if stopped else "failed", seconds=seconds, error=one_line(error))
        raise
    book.put(name, "done", seconds=seconds, finished=finished)
    log(f"{name}: done in {seconds:.1f} s")


class _Book:
    """stages.json: one entry a stage, rewritten at every change.

    state: done, skipped, failed, interrupted, pending, or running (which a killed process leaves behind).
    """

    def __init__(self, run: Run) -> None:
        self._path = run.stages_path
        self._entries: dict[str, dict[str, Any]] = {}
        for name in STAGES:
            manifest = read_manifest(run.manifest_path(name))
            if is_finished(manifest):
                self._entries[name] = _entry(name, "done", manifest.get("seconds"), manifest["finished"], None)
            else:
                self._entries[name] = _entry(name, "pending", None, None, None)
        self._write()

    def put(
        self,
        name: str,
        state: str,
        *,
        seconds: float | None = None,
        finished: str | None = None,
        error: str | None = None,
    ) -> None:
        self._entries[name] = _entry(name, state, seconds, finished, error)
        self._write()

    def _write(self) -> None:
        atomic_write_json(self._path, {"stages": [self._entries[name] for name in STAGES]})


def _entry(name: str, state: str, seconds: float | None, finished: str | None, error: str | None) -> dict[str, Any]:
    return {"name": name, "state": state, "seconds": seconds, "finished": finished, "error": error}


def is_finished(manifest: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Return whether a manifest is one of a stage that need not run again. One with gates must have passed them all."""
    if manifest is None or not isinstance(manifest.get("finished"), str) or manifest.get("verdict", "pass") != "pass":
        return False
    gates = manifest.get("gates")
    return gates is None or (
        isinstance(gates, list) and all(isinstance(g, dict) and g.get("verdict") == "pass" for g in gates)
    )


def one_line(error: BaseException) -> str:
    """Return what a person reads: the message of our own errors, type and message of all others."""
    text = " ".join(str(error).split())
    if getattr(error, "exit_code", None) is not None:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _finished(run: Run, name: str, log: Log) -> dict[str, Any] | None:
    path = run.manifest_path(name)
    manifest = read_manifest(path)
    if manifest is None and path.exists():
        log(f"{name}: {path.name} cannot be read, so the stage runs again")
    return manifest if is_finished(manifest) else None


def _skip_line(name: str, manifest: dict[str, Any], source_hash: str) -> str:
    line = f"{name}: skipped, finished {manifest['finished']}"
    made_by = str(manifest.get("source"))
    if made_by != source_hash:
        line += f", by other source ({made_by[:12]}, now {source_hash[:12]}); --force runs it again"
    return line


def _require_earlier(run: Run, name: str) -> None:
    for earlier in STAGES[: STAGES.index(name)]:
        path = run.manifest_path(earlier)
        if not is_finished(read_manifest(path)):
            missing = f"{path.name} says that it did not finish" if path.exists() else f"{path.name} is not there"
            raise ConfigError(
                f"{name} needs the stage {earlier}, and {missing}",
                where=run.id,
                fix=f"Run the stage {earlier} first, or all of them in order.",
            )


def _remove_manifests(run: Run, index: int, book: _Book) -> None:
    """Take back the stage's manifest and those of the later ones, which no longer follow from it."""
    for name in STAGES[index:]:
        run.manifest_path(name).unlink(missing_ok=True)
        book.put(name, "pending")


def _remove_outputs(run: Run, names: tuple[str, ...], log: Log) -> None:
    """Let a stage that is asked for again start from nothing; else training would resume from its own last step."""
    if "train" not in names:
        return
    there = [p for p in (run.checkpoints_dir, run.metrics_path, run.drafter_dir) if p.exists()]
    for path in there:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if there:
        log(f"train: starts over; removed {', '.join(path.name for path in there)}")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
