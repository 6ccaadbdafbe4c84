"""A run is a folder, runs/<id>/, that a person can open. This module makes, finds and locks it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import yaml

from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError
from pipeline.files import atomic_write_json, atomic_write_text

log = logging.getLogger(__name__)

LATEST = "latest"


@dataclass(frozen=True)
class Run:
    folder: Path
    config: RunConfig

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def config_path(self) -> Path:
        """The resolved configuration: every default written out."""
        return self.folder / "config.yaml"

    @property
    def fingerprint_path(self) -> Path:
        """The environment of the newest start."""
        return self.folder / "fingerprint.json"

    @property
    def fingerprint_history_path(self) -> Path:
        """One line for each earlier start in another environment; no file while it was always the same."""
        return self.folder / "fingerprints.jsonl"

    @property
    def stages_path(self) -> Path:
        return self.folder / "stages.json"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def drafter_dir(self) -> Path:
        """The export."""
        return self.folder / "drafter"

    @property
    def verify_path(self) -> Path:
        """The gates; also the manifest of the verify stage."""
        return self.manifest_path("verify")

    @property
    def report_path(self) -> Path:
        return self.folder / "report.html"

    def manifest_path(self, stage: str) -> Path:
        """The file whose presence, with a "finished" time in it, says that the stage is done."""
        return self.folder / f"{stage}.json"


def made_run(config: RunConfig, runs_root: Path) -> Run:
    """Return the run of `config` with its folder, and nothing written into it. Raises ConfigError."""
    run = Run(runs_root / config.run_id(), config)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            "a file stands where the run's folder should be", where=str(run.folder), fix="Move it."
        ) from None
    return run


def open_run(config: RunConfig, runs_root: Path, fingerprint: dict[str, Any]) -> Run:
    """Return the run of `config`, made if it is new, with its configuration and fingerprint written.

    The same configuration always gives the same folder, so opening a run again is how it is resumed. A run resumed in
    another environment keeps the fingerprint of the earlier one.
    """
    run = made_run(config, runs_root)
    atomic_write_text(run.config_path, _as_yaml(config))
    _keep_earlier_fingerprint(run, fingerprint)
    atomic_write_json(run.fingerprint_path, fingerprint)
    _point_latest(runs_root, run.id)
    return run


def latest_run(runs_root: Path) -> str | None:
    """Return the id that runs/latest names, None when there is none."""
    latest = runs_root / LATEST
    try:
        return os.readlink(latest) if latest.is_symlink() else latest.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def is_new(run: Run) -> bool:
    """Return whether no stage of the run was ever finished and nothing of it was trained."""
    return not run.manifest_path("cache").exists() and not run.checkpoints_dir.exists()


def discard_run(run: Run, latest_before: str | None) -> None:
    """Remove a run that never began, and point runs/latest back to where it was."""
    shutil.rmtree(run.folder, ignore_errors=True)
    runs_root = run.folder.parent
    if latest_before is not None and latest_before != run.id:
        _point_latest(runs_root, latest_before)
    else:
        (runs_root / LATEST).unlink(missing_ok=True)


def find_run(path: str | Path, runs_root: Path) -> Run:
    """Return the run that a person named: a run's folder, its id, or "latest" with or without the folder before it.

    Raises ConfigError when there is none.
    """
    given = Path(path)
    for candidate in (given, runs_root / given):
        if candidate.is_file() and candidate.name == LATEST:  # where symlinks are refused it is a file with the id
            candidate = candidate.parent / candidate.read_text(encoding="utf-8").strip()
        if not candidate.is_dir() or candidate.resolve() == runs_root.resolve():
            continue
        folder = candidate.resolve()
        config_path = folder / "config.yaml"
        if not config_path.is_file():
            raise ConfigError("is no run's folder (no config.yaml)", where=str(path), fix=_known(runs_root))
        return Run(folder, load_config(config_path))
    raise ConfigError("no such run", where=str(path), fix=_known(runs_root))


@contextlib.contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Keep other processes from working on the run.

    The kernel drops the lock with the process, so a kill leaves nothing to clean.
    Raises ConfigError that names the holder.
    """
    holder = run.folder / ".lock-holder"
    lock = filelock.FileLock(run.folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        try:
            who = holder.read_text(encoding="utf-8").strip()
        except OSError:
            who = "another process"
        raise ConfigError(
            f"{who} is working on this run", where=run.id, fix="Wait for it or stop it, or use another name."
        ) from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s: this file system refuses locks (%s); start no second process on this run", run.folder, error)
        yield
        return
    try:
        atomic_write_text(holder, f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None when there is no file or no object that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _keep_earlier_fingerprint(run: Run, new: dict[str, Any]) -> None:
    """Add the last start's fingerprint to the history if `new` differs from it."""
    earlier = read_manifest(run.fingerprint_path)
    if earlier is None or earlier == new:
        return
    path = run.fingerprint_history_path
    history = path.read_text(encoding="utf-8") if path.exists() else ""
    line = json.dumps(earlier) + "\n"
    if not history.endswith(line):  # a kill between this and the next write would add it twice
        atomic_write_text(path, history + line)


def _as_yaml(config: RunConfig) -> str:
    body = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)
    return f"# The resolved configuration of {config.run_id()}. To change something, edit a preset in configs/.\n{body}"


def _point_latest(runs_root: Path, run_id: str) -> None:
    latest = runs_root / LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise ConfigError("is a folder, and should be a link to the newest run", where=str(latest), fix="Rename it.")
    temporary = runs_root / f".{LATEST}-{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(run_id, target_is_directory=True)
        temporary.replace(latest)
    except OSError:  # a file system without symlinks
        temporary.unlink(missing_ok=True)
        atomic_write_text(latest, run_id + "\n")


def _known(runs_root: Path) -> str:
    folders = [p.parent for p in runs_root.glob("*/config.yaml") if not p.parent.is_symlink()]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    if not folders:
        return "There is no run yet; invoke train makes one."
    return f"Runs here: {', '.join(folder.name for folder in folders[:5])}."
