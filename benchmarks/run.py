"""One record of a finished run: how long it took, how fast it trained, who waited, and what came out.

    python -m benchmarks.run RUN_FOLDER [--json FILE]

All but the rates is read from the run's own files. The rates are measured now, so run it on the machine that trained.
MFU is the drafter's operations in training by benchmarks/flops.py over what its GPUs would have multiplied in
training's seconds: warm-up, evaluations and checkpoints left out, padding and waits left in. The target's are apart.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.flops import expected_pairs, step_flops
from benchmarks.header import ROOT, check_record, header
from benchmarks.peaks import measure_peaks
from dflash.checkpoint import read_config
from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from env.caches import CacheDirs
from env.errors import EnvError
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, DataError
from pipeline.metrics import read
from pipeline.runs import Run, find_run, read_manifest
from pipeline.stages import STAGES, is_finished
from pipeline.target_forward import recorded_shapes
from pipeline.targets import resolve_target, target_config

GATE = ("name", "value", "limit", "verdict", "detail")


def drafter_flops(config: DrafterConfig, training: Mapping[str, Any], text_tokens: float) -> float:
    """Return the operations of all training steps: forward and backward of the tokens and supervised blocks that there
    were, without padding. An anchor is taken to see half of a text of `text_tokens`, the mean; it sees more, as anchors
    stand in the answer, but attention is a small part.

    Raises DFlashError for a drafter that step_flops does not count.
    """
    anchors = training["anchors"]
    return step_flops(
        config,
        sequences=1,
        context_len=training["tokens"],
        num_anchors=anchors,
        num_rows=training["supervised_slots"],
        pairs=expected_pairs(1, text_tokens, anchors, config.block_size),  # type: ignore[arg-type]
    ).total


def target_flops(config: Any, tokens: int, text_tokens: float, layers: int | None = None) -> float:
    """Return the operations of a causal forward over `tokens` in texts of `text_tokens`, without the head.

    config   transformers' configuration of a Llama, Qwen2 or Qwen3
    layers   how many of its layers run; None is all
    """
    D, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or D // heads
    queries, keys = heads * width, config.num_key_value_heads * width
    layer = 2 * D * (queries + 2 * keys) + 2 * queries * D + 6 * D * config.intermediate_size
    attention = 2 * 2 * queries * text_tokens / 2
    return float((layers or config.num_hidden_layers) * tokens * (layer + attention))


def layers_run(run: Run) -> int | None:
    """Return how many layers of the target ran beside training (pipeline/target_forward.py), None for all."""
    config = run.config
    if not recorded_shapes(config) or config.train.soft_weight or config.data.samples_per_row > 1:
        return None
    return max(read_config(run.drafter_dir).target_layer_ids) + 1


def hosts_of(sessions: Iterable[Mapping[str, Any]]) -> float:
    """Return on how many hosts a training was, in the mean over its seconds: torchrun may go on with more or fewer."""
    given = [(session["wall_seconds"], session.get("hosts", 1)) for session in sessions]
    seconds = sum(wall for wall, _ in given)
    return sum(wall * hosts for wall, hosts in given) / seconds if seconds else 1.0


def gpus_of(config: RunConfig, hosts: float) -> dict[str, float]:
    """Return how many GPUs each stage uses; topology names one host's."""
    online = config.data.features == "online"
    drafters, targets = config.topology.drafters, config.topology.targets
    used = {"cache": targets[:1], "train": (*drafters, *(targets if online else ())), "verify": drafters[:1]}
    found: dict[str, float] = {
        stage: len({name for name in names if name.startswith("cuda")}) for stage, names in used.items()
    }
    return found | {"train": found["train"] * hosts}


def manifests_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the manifests of all stages. Raises DataError for a run that is not finished or did not count."""
    found = {}
    for stage in STAGES:
        manifest = read_manifest(run.manifest_path(stage))
        if not is_finished(manifest):
            raise DataError(f"has not finished {stage}", where=run.id, fix="Finish it: invoke train.")
        found[stage] = manifest
    training = found["train"].get("training")
    if not training or training["steps"] != found["train"]["steps"]:
        what = f"counted {training['steps'] if training else 0} of {found['train']['steps']} steps"
        raise DataError(what, where=str(run.manifest_path("train")), fix="Train it anew with this version.")
    return found


def device_of(run: Run) -> torch.device:
    """Return the first drafter's device. Raises ConfigError when this machine has no such GPU."""
    device = torch.device(run.config.topology.drafters[0])
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"torch sees no {device} here", where=run.id, fix="Run it on the machine that trained.")
    return device


def summary(run: Run) -> dict[str, Any]:
    """Return the record, without the rates and what is divided by them."""
    manifests, config = manifests_of(run), run.config
    train, training, tau = manifests["train"], manifests["train"]["training"], manifests["verify"]["tau"]
    about = json.loads(run.fingerprint_path.read_text(encoding="utf-8"))
    losses = [float(record["loss"]) for record in read(run.metrics_path)]
    seconds = {
        "cache": manifests["cache"]["seconds"],  # short where prompts and answers lay in the cache already
        "training": round(sum(session["wall_seconds"] for session in train["sessions"]), 1),
        "verify": manifests["verify"]["seconds"],
    }
    hosts = hosts_of(train["sessions"])
    gpus = gpus_of(config, hosts)
    answers = manifests["cache"]["answers"]
    gpu_seconds = sum(part * gpus[stage] for part, stage in zip(seconds.values(), STAGES, strict=True))
    return {
        "run": run.id,
        "config": config.name,
        "finished": manifests["verify"]["finished"],
        "git": about["git"],
        "gpus": [device["name"] for device in (about["gpus"] or {}).get("devices", [])],
        "cpu": about["cpu"],
        "workers": train["workers"],
        "samples": answers["num_samples"],
        "sample_tokens": answers["num_tokens"],
        "seconds": seconds,
        "warm_up_seconds": round(sum(session["warmup_seconds"] for session in train["sessions"]), 1),
        "sessions": len(train["sessions"]),
        "hosts": round(hosts, 3),
        "training": training,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "tau": {name: {kind: tau[name][kind] for kind in ("chained", "decoded", "untrained")} for name in tau},
        "gpu_minutes": round(gpu_seconds / 60, 2),
        "gates": [{key: gate.get(key) for key in GATE} for gate in manifests["verify"]["gates"]],
    }


def shares(run: Run, found: Mapping[str, Any], matmul_flops: float) -> dict[str, Any]:
    """Return the operations of drafter and target in training, and what share of the rate `matmul_flops` they are.

    A drafter that benchmarks/flops.py does not count has None, and "not_counted" says why.
    """
    training, topology, hosts = found["training"], run.config.topology, found["hosts"]
    text_tokens = found["sample_tokens"] / found["samples"]
    try:
        drafter, why = drafter_flops(read_config(run.drafter_dir), training, text_tokens), None
    except DFlashError as error:
        drafter, why = None, str(error)
    target = 0.0
    if run.config.data.features == "online":  # else its forward was a part of the stage before
        caches = CacheDirs.from_environment(ROOT)
        folder = resolve_target(run.config.target, caches.models, caches.packages)
        target = target_flops(target_config(folder), training["tokens"], text_tokens, layers_run(run))
    peak = training["seconds"] * matmul_flops
    return {
        "drafter_tflop": None if drafter is None else round(drafter / 1e12, 4),
        "target_tflop": round(target / 1e12, 4),
        "mfu": None if drafter is None else round(drafter / peak / (hosts * len(set(topology.drafters))), 6),
        "target_share": round(target / peak / (hosts * len(set(topology.targets))), 6),
        **({} if why is None else {"not_counted": why}),
    }


def described(found: Mapping[str, Any]) -> str:
    """Return the record in a few lines."""
    training, tau, seconds = found["training"], found["tau"], found["seconds"]
    waited = [
        f"{thread} {sum(reasons.values()):.1%} ({', '.join(f'{why} {share:.1%}' for why, share in reasons.items())})"
        for thread, reasons in training["waited_share"].items()
    ]
    mfu = "not counted" if found["mfu"] is None else f"{found['mfu']:.2%}"
    return "\n".join(
        [
            f"{found['run']} on {found['device']}",
            f"seconds: cache stage {seconds['cache']}, training {seconds['training']} (warm-up "
            f"{found['warm_up_seconds']}), verify {seconds['verify']}; {found['gpu_minutes']} GPU minutes",
            f"training: {training['steps']} steps, {training['tokens']:,} tokens, {training['supervised_slots']:,} "
            f"slots of {training['anchors']:,} anchors, {training['tokens_per_second']:,.0f} tokens/s",
            f"drafter {found['drafter_tflop']} TFLOP, MFU {mfu}; target {found['target_tflop']} TFLOP, "
            f"{found['target_share']:.2%}; of {found['peaks']['matmul_flops'] / 1e12:.4g} TFLOP/s",
            f"waited: {'; '.join(waited)}",
            f"loss {found['loss_first']:.3f} -> {found['loss_last']:.3f}",
            *(
                f"tau {name}: decoded {t['decoded']}, chained {t['chained']}, untrained {t['untrained']}"
                for name, t in tau.items()
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run's folder or id, or latest")
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    options = parser.parse_args(arguments)
    try:
        check_record(options.json)
        run = find_run(options.run, CacheDirs.from_environment(ROOT).runs)
        device, of_run = device_of(run), summary(run)
        words = shlex.join(sys.argv[1:] if arguments is None else arguments)
        peaks = measure_peaks(device)
        found = {
            **header(f"python -m benchmarks.run {words}", device),
            **of_run,  # its git too: the source that trained, not the one that measures
            "peaks": asdict(peaks),
            **shares(run, of_run, peaks.matmul_flops),
        }
    except (DFlashError, ConfigError, DataError, EnvError) as error:
        print(error, file=sys.stderr)
        return 2
    print(described(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
