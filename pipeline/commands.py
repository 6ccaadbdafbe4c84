"""What the command line does: the flow of `train` and of `generate`. No torch before the cache variables are set."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from env.cache_archive import export_key, import_archive
from env.cache_volume import open_key
from env.caches import CacheDirs, cache_key, environment_for_compile
from env.doctor import preflight
from env.errors import EnvError
from env.fingerprint import fingerprint, source_hash
from env.installed import Finding
from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError, VerificationFailed
from pipeline.inputs import check_inputs, local_sources, to_fetch
from pipeline.report import shown, write_report
from pipeline.runs import Run, discard_run, find_run, is_new, latest_run, lock_run, made_run, open_run, read_manifest
from pipeline.stages import Stage, run_stages

ROOT = Path(__file__).resolve().parent.parent


def train(
    config_path: Path,
    overrides: list[str],
    *,
    only: str | None = None,
    start_from: str | None = None,
    force: bool = False,
    root: Path = ROOT,
    checks: Callable[[Path], list[Finding]] = preflight,
    functions: Mapping[str, Stage] | None = None,
) -> int:
    """Run the stages of a configuration, write the report, print what was proved and return 0.

    checks     what must hold before anything is written; an error among the findings is exit 3
    functions  the stages, when they are not the real ones
    Raises what a stage raises; the report is written in any case.
    """
    config = load_config(config_path, overrides)
    _check_environment(root, checks)
    caches = CacheDirs.from_environment(root)
    hash_of_source = source_hash(root)
    before = latest_run(caches.runs)
    with lock_run(made_run(config, caches.runs)):  # first: a second process must not leave its fingerprint
        run = open_run(config, caches.runs, fingerprint(root))
        if functions is None:
            if not (force or only == "cache" or start_from == "cache"):
                check_inputs(run)
            set_cache_variables(config, caches, compile_factors(root))
            functions = _real_stages()
        say(f"run {_relative(run.folder)}")
        failure: VerificationFailed | None = None
        try:
            run_stages(
                run, functions, only=only, start_from=start_from, force=force, source_hash=hash_of_source, log=say
            )
        except VerificationFailed as error:
            failure = error
        except BaseException as error:
            if getattr(error, "exit_code", None) == ConfigError.exit_code and is_new(run):
                discard_run(run, before)  # bad input leaves no run behind, and latest where it was
                raise
            with contextlib.suppress(Exception):  # the report must not hide why the run stopped
                write_report(run, run.report_path)
            raise
        write_report(run, run.report_path)
        _print_summary(run)
        if failure is not None:
            raise failure
    return 0


def generate(path: str, prompt: str, decoding: Mapping[str, Any], *, root: Path = ROOT) -> int:
    """Decode a prompt with the drafter of a run and return 0.

    decoding   fields of pipeline.generate.Decoding and of dflash.Sampling
    """
    caches = CacheDirs.from_environment(root)
    run = find_run(path, caches.runs)
    if not run.drafter_dir.is_dir():
        raise ConfigError("the run has no drafter yet", where=path, fix="Finish its training first: invoke train.")
    set_cache_variables(run.config, caches, compile_factors(root))
    from pipeline.generate import decoding_of
    from pipeline.generate import generate as decode

    decode(run, prompt, decoding_of(**decoding))
    return 0


def rank(
    path: str, explain: Callable[[BaseException], tuple[int | None, str]], *, started_by_train: bool, root: Path = ROOT
) -> int:
    """Be one process of a run's training and return its exit code.

    started_by_train   the environment was checked, the cache variables are set, and the run is locked
    explain            exit code and message of an error
    """
    caches = CacheDirs.from_environment(root)
    run = find_run(path, caches.runs)
    if not started_by_train:
        if os.environ.get("LOCAL_RANK") == "0":
            _check_environment(root, preflight)
        set_cache_variables(run.config, caches, compile_factors(root))
    from pipeline.rank import work

    return work(run, started_by_train=started_by_train, source_hash=source_hash(root), explain=explain)


def needs(
    config_path: Path | None, overrides: list[str], *, run: str = "", again: bool = False, root: Path = ROOT
) -> int:
    """Print one line of JSON, {"files": paths that a run reads, "fetch": what it would download now}; return 0.

    config_path   of a run to come; None: what decoding with the finished `run` needs
    again         its cache stage will run even if it is finished
    """
    caches = CacheDirs.from_environment(root)
    config = load_config(config_path, overrides) if config_path is not None else find_run(run, caches.runs).config
    say(json.dumps({"files": local_sources(config), "fetch": to_fetch(config, caches, again=again)}))
    return 0


def compile_factors(root: Path) -> dict[str, str]:
    """Return what compiled code depends on in this environment.

    The GPU's capability is among it, which only torch knows for certain, and the cache variables, which depend on it,
    must be set before torch is imported here: so a child process asks torch. Raises EnvError when that fails.
    """
    script = "import json, sys; from env.caches import default_factors; print(json.dumps(default_factors(sys.argv[1])))"
    command = [sys.executable, "-c", script, source_hash(root)]
    child = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit {child.returncode}"])[-1]
        raise EnvError(f"torch cannot be used ({last})", where=sys.executable, fix="Run invoke doctor.")
    factors: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return factors


def set_cache_variables(config: RunConfig, caches: CacheDirs, factors: Mapping[str, str]) -> str:
    """Point every compiler cache of this process at the folder of its key, checked, and return the key."""
    key, named = _compile_key(config, factors)
    folder = open_key(caches.compile, key, named, say)
    os.environ.update(environment_for_compile(folder))
    return key


def export_cache(config_path: Path, overrides: list[str], archive: Path, *, root: Path = ROOT) -> int:
    """Write the compile cache of a configuration into an archive and return 0. Raises EnvError."""
    caches = CacheDirs.from_environment(root)
    key, _ = _compile_key(load_config(config_path, overrides), compile_factors(root))
    count = export_key(caches.compile / key, archive)
    say(f"compile cache: {key} exported, {count} files, {archive.stat().st_size / 2**20:.1f} MiB")
    return 0


def import_cache(config_path: Path, overrides: list[str], archive: Path, *, root: Path = ROOT) -> int:
    """Take an archive in as the compile cache of a configuration and return 0.

    Raises EnvError naming every factor of the archive that is not this machine's and this configuration's.
    """
    caches = CacheDirs.from_environment(root)
    _, named = _compile_key(load_config(config_path, overrides), compile_factors(root))
    import_archive(archive, caches.compile, named, say)
    return 0


def _compile_key(config: RunConfig, factors: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the key of the configuration's compiled code here, and its factors by name."""
    drafter = json.dumps(config.drafter.model_dump(mode="json"), sort_keys=True)
    drafter_hash = hashlib.sha256(drafter.encode()).hexdigest()[:16]
    return cache_key({**factors, "drafter": drafter_hash})


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


def _check_environment(root: Path, checks: Callable[[Path], list[Finding]]) -> None:
    findings = checks(root)
    for finding in findings:
        print(finding, file=sys.stderr, flush=True)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        count = "1 fault" if len(errors) == 1 else f"{len(errors)} faults"
        raise EnvError(f"the environment is not fit ({count} above)", fix="Mend them and run the command again.")


def _real_stages() -> dict[str, Stage]:
    from pipeline.cache import build_cache
    from pipeline.memory import free_memory
    from pipeline.train import train as train_drafter
    from pipeline.verify import verify

    def and_free(stage: Stage) -> Stage:
        def freeing(run: Run) -> dict[str, Any]:
            try:
                return stage(run)
            finally:
                free_memory()  # the next stage loads its own models

        return freeing

    stages: dict[str, Stage] = {"cache": build_cache, "train": train_drafter, "verify": verify}
    return {name: and_free(stage) for name, stage in stages.items()}


def _print_summary(run: Run) -> None:
    console = Console(highlight=False)
    found: Mapping[str, Any] = read_manifest(run.verify_path) or {}
    gates = [gate for gate in found.get("gates") or [] if isinstance(gate, dict)]
    if gates:
        table = Table("gate", "value", "limit", "verdict", box=None, pad_edge=False)
        for gate in gates:
            verdict = str(gate.get("verdict"))
            style = {"pass": "green", "fail": "bold red"}.get(verdict, "")
            values = (Text(shown(gate.get(field))) for field in ("value", "limit"))
            table.add_row(Text(str(gate.get("name"))), *values, Text(verdict, style=style))
        console.print(table)
    passed = sum(gate.get("verdict") == "pass" for gate in gates)
    proved = f"{passed} of {len(gates)} gates passed" if gates else "not verified yet"
    say(f"{_relative(run.folder)}: {proved}. The whole story is in {_relative(run.report_path)}.")


def _relative(path: Path) -> str:
    """Return the path as a person here would type it; one far away stays absolute."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.path.join("..", "..")) else relative
