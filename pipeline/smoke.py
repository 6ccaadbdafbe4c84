"""`python -m pipeline smoke`: does everything work here? Doctor, what must compile, and a run of three steps.

The run is that of the real stages on a tiny random target, in a temporary folder that is removed; only compiled code is
kept, in the compile cache of this machine, so a second smoke test compiles nothing. Needs no network.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from env.caches import CacheDirs
from env.doctor import preflight
from env.errors import EnvError
from env.installed import Finding
from pipeline import commands
from pipeline.compile_lock import cache_folder, compiling
from pipeline.config import load_config
from pipeline.errors import ConfigError, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.metrics import read
from pipeline.runs import Run, read_manifest
from pipeline.smoke_results import Results
from pipeline.stages import STAGES, Stage

SETTINGS: dict[str, Any] = {
    "name": "smoke",
    "target": {"source": "target-qwen3"},
    "data": {
        "train": [{"source": "train.jsonl", "count": 8}],
        "held_out": 2,
        "out_of_domain": {"source": "other.jsonl", "count": 2},
        "max_prompt_tokens": 48,
        "max_answer_tokens": 16,
        "buckets": [64],
    },
    # Row 300 of the tiny target's embedding is no token of its tokenizer.
    "drafter": {"num_layers": 1, "block_size": 4, "target_layer_ids": [0, 2], "mask_token_id": 300},
    # A step is an epoch, so that three losses can be compared: they are of the same samples.
    "train": {"steps": 3, "batch_size": 8, "micro_batch": 2, "num_anchors": 8, "learning_rate": 3.0e-3},
    # In three steps nothing is learned that a random target would write, and an untrained drafter may guess a token by
    # chance: tau is computed, and need not have grown.
    "verify": {
        "num_prompts": 2,
        "max_new_tokens": 12,
        "min_tau": 1.0,
        "min_tau_gain": -1.0,
        "min_tau_gain_out_of_domain": -1.0,
        "min_throughput_ratio": 0.0,
    },
}
"""The run's configuration without the devices; its files are made in the folder where it runs."""


def smoke(
    device: str | None = None,
    json_path: Path | None = None,
    *,
    root: Path = commands.ROOT,
    checks: Callable[[Path], list[Finding]] = preflight,
) -> int:
    """Make all checks, print their table, and return 0.

    device     "cpu" or "cuda"; None takes a GPU if there is one
    json_path  also write the table, the gates and the place of compiled code there, whatever the outcome
    checks     doctor's
    Raises EnvError (exit 3) when the machine lacks something, VerificationFailed (exit 4) when a check failed.
    """
    if json_path is not None and (json_path.is_dir() or not json_path.parent.is_dir()):
        raise ConfigError("cannot be written", where=str(json_path), fix="Name a file in a folder that exists.")
    json_path = json_path and json_path.absolute()
    caches, results, facts = CacheDirs.from_environment(root), Results(), {}
    try:
        results.header()
        if results.attempt("doctor", lambda: _doctor(checks(root)), show_output=True):
            caches.root.mkdir(parents=True, exist_ok=True)
            # Not in the system's temporary folder: in a container with a read-only root there may be none.
            with tempfile.TemporaryDirectory(prefix="smoke-", dir=caches.root) as folder:
                facts = _compile_and_train(results, Path(folder), device, caches, root)
    finally:
        if json_path is not None:
            atomic_write_json(json_path, {**results.record(), **facts})
    commands.say(results.conclude())
    return 0


def _compile_and_train(
    results: Results, folder: Path, device: str | None, caches: CacheDirs, root: Path
) -> dict[str, Any]:
    """Make the checks after doctor's, and return what the JSON holds besides the table."""
    factors: dict[str, str] = {}

    def torch_works() -> str:
        factors.update(commands.compile_factors(root))
        if device == "cuda" and factors["gpu_capability"] == "cpu":
            fix = "Run invoke doctor, or ask for --device cpu."
            raise EnvError("no GPU that torch can use", where="--device cuda", fix=fix)
        return ", ".join(f"{name} {factors[name]}" for name in ("torch", "triton", "cuda", "gpu_capability"))

    if not results.attempt("torch", torch_works):
        return {}
    chosen = device or ("cpu" if factors["gpu_capability"] == "cpu" else "cuda")
    place = "cuda:0" if chosen == "cuda" else "cpu"
    config_path = _prepare(folder, place)
    config = load_config(config_path)
    commands.set_cache_variables(config, caches, factors)
    compiled = cache_folder()
    before = _files(compiled)

    # Only now: torch reads the cache variables when it is imported.
    import torch

    from pipeline import smoke_checks

    results.attempt("C extension", lambda: smoke_checks.c_extension(folder))
    with compiling(compiled, commands.say):
        results.attempt("Triton kernel", lambda: smoke_checks.triton_kernel(torch.device(place)))
        results.attempt("flex attention", lambda: smoke_checks.flex_block(torch.device(place)))
    with _own_places(folder):
        run = Run(CacheDirs.from_environment(root).runs / config.run_id(), config)
        stages = _real_stages(folder)
        for name in STAGES:
            if not results.attempt(f"{name} stage", partial(_stage, name, run, config_path, root, stages)):
                break  # the later ones need it
        gates = (read_manifest(run.verify_path) or {}).get("gates", [])
        found = {name: read_manifest(run.manifest_path(name)) or {} for name in STAGES}
    graphs = {name: manifest.get("compile", manifest) for name, manifest in found.items()}
    after = _files(compiled)
    commands.say(f"compiled code: {len(after)} files, {len(after - before)} of them new, in {compiled}")
    facts = {
        "folder": str(compiled),
        "files": len(after),
        "new_files": len(after - before),
        "stages": {name: {key: counts.get(key) for key in ("built", "loaded")} for name, counts in graphs.items()},
    }
    return {"device": chosen, "factors": factors, "compiled": facts, "gates": gates}


def _doctor(findings: list[Finding]) -> str:
    for finding in findings:
        print(finding)
    errors = sum(finding.level == "error" for finding in findings)
    if errors:
        count = "1 fault" if errors == 1 else f"{errors} faults"
        raise EnvError(f"the environment is not fit ({count} above)", fix="Mend them and run the command again.")
    return f"no error, {len(findings)} warning{'' if len(findings) == 1 else 's'}"


def _prepare(folder: Path, device: str) -> Path:
    """Write prompts and configuration, and return the configuration's path. The target is made when torch is there."""
    for name, texts in {
        "train.jsonl": [f"Tell me about {i}." for i in range(20)],
        "other.jsonl": [f"Add {i} and {i + 1}!" for i in range(10)],
    }.items():
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (folder / name).write_text("".join(lines), encoding="utf-8")
    # Two drafters, also on one device: only then are gradients exchanged and replicas compared.
    settings = SETTINGS | {"topology": {"targets": [device], "drafters": [device, device]}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def _real_stages(folder: Path) -> dict[str, Stage]:
    from pipeline.cache import build_cache
    from pipeline.tiny_target import tiny_target
    from pipeline.train import train
    from pipeline.verify import verify

    def cache(run: Run) -> dict[str, Any]:
        tiny_target(folder)
        return build_cache(run)

    return {"cache": cache, "train": train, "verify": verify}


def _stage(name: str, run: Run, config_path: Path, root: Path, stages: dict[str, Stage]) -> str:
    """Run one stage as `train` does, and return what it did. A failed gate's numbers are in the error."""
    try:
        commands.train(config_path, [], only=name, root=root, checks=lambda root: [], functions=stages)
    except VerificationFailed as error:
        gates = (read_manifest(run.verify_path) or {}).get("gates", []) if name == "verify" else []
        failed = [gate for gate in gates if gate["verdict"] != "pass"]
        if not failed:
            raise
        what = "; ".join(f"{g['name']} is {g['value']}, limit {g['limit']} ({g['detail']})" for g in failed)
        raise VerificationFailed(what, where="gates", fix="Do not train here before that is understood.") from error
    return _story(name, run, read_manifest(run.manifest_path(name)) or {})


def _story(name: str, run: Run, manifest: dict[str, Any]) -> str:
    if name == "cache":
        return f"{manifest['answers']['num_samples']} answers and their features, drafter compiled"
    if name == "train":
        losses = [f"{record['loss']:.3f}" for record in read(run.metrics_path)]
        return f"{manifest['steps']} steps of {', '.join(manifest['workers'])}; loss {' -> '.join(losses)}"
    tau = ", ".join(f"{found['decoded']} {name}" for name, found in manifest["tau"].items())
    return f"all {len(manifest['gates'])} gates passed; tau {tau}"


@contextlib.contextmanager
def _own_places(folder: Path) -> Iterator[None]:
    """Let data and run be made below `folder`, and be there; the compiler caches stay where they were put before."""
    own = {"DFLASH_CACHE": str(folder / "cache"), "DFLASH_RUNS": str(folder / "runs")}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        # The names of prompts files seed the draw from them: relative ones give every machine the same samples.
        with contextlib.chdir(folder):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _files(folder: Path | None) -> set[Path]:
    """Return what compilers wrote below the key's folder: its subfolders' files, without locks."""
    if folder is None:
        return set()
    return {path for path in folder.glob("*/**/*") if path.is_file() and path.suffix != ".lock"}
