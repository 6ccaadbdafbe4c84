"""Stage 3: prove that the run is what it claims. Writes verify.json; a failed gate fails the run (exit 4)."""

from __future__ import annotations

from typing import Any

import torch

from dflash.checkpoint import load_drafter
from dflash.compile.counters import disk_counts
from dflash.errors import DFlashError
from env.doctor import check_lock
from pipeline.cache import ROOT, load_cached
from pipeline.checkpoints import latest_checkpoint, load_checkpoint
from pipeline.compile_lock import cache_folder, compiling
from pipeline.dense_step import compiled_equals_dense
from pipeline.errors import DataError, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.gates import (
    Gate,
    environment_equals_lock,
    loss_fell,
    memory_flat,
    no_compiles_after_warmup,
    no_eager_bodies,
    replicas_equal,
    throughput_held,
)
from pipeline.memory import free_memory
from pipeline.metrics import progress_bar, read
from pipeline.proofs import (
    chained_tau,
    decode_set,
    export_equals_training,
    lossless,
    train_equals_decode,
)
from pipeline.regenerate import stop_ids
from pipeline.replica import DTYPES, new_drafter
from pipeline.runs import Run, read_manifest
from pipeline.targets import load_target, load_tokenizer
from pipeline.warmup import say, set_threads

AT_ONCE = 32
"""Prompts that a GPU decodes in one batch; their keys and values are float32."""


def verify(run: Run) -> dict[str, Any]:
    """Return {"verdict", "gates", "tau", "compile"} after writing it to verify.json.

    Raises VerificationFailed that names the failed gates.
    """
    config, data = run.config, load_cached(run)
    manifest = read_manifest(run.manifest_path("train"))
    if manifest is None:
        raise DataError("has no finished training", where=run.id, fix="Run it: invoke train --from-stage train.")
    if not {"compiles_after_warmup", "eager_bodies", "replicas_equal", "sessions", "workers"} <= manifest.keys():
        raise DataError("is damaged", where=str(run.manifest_path("train")), fix="Run invoke train --from-stage train.")
    metrics = read(run.metrics_path)
    if not metrics:
        raise DataError(
            "has no records", where=run.metrics_path.name, fix="Train again: invoke train --from-stage train."
        )
    gates = [
        environment_equals_lock(check_lock(ROOT, ROOT / "lockfiles" / "runtime.txt")),
        no_compiles_after_warmup(manifest),
        no_eager_bodies(manifest),
        replicas_equal(manifest),
        memory_flat(metrics, manifest["sessions"]),
        loss_fell(metrics),
        throughput_held(metrics, config.verify.min_throughput_ratio),
    ]
    checkpoint = latest_checkpoint(run.checkpoints_dir, lambda line: None)
    if checkpoint is None:
        raise DataError(
            "has no complete checkpoint", where=run.id, fix="Run it again: invoke train --from-stage train."
        )
    weights = load_checkpoint(checkpoint).tensors["weights"]
    try:
        exported = load_drafter(run.drafter_dir)
    except DFlashError as error:
        raise DataError(error.what, where=error.where, fix="Train again: invoke train --from-stage train.") from None
    gates.append(export_equals_training(run.drafter_dir, weights, DTYPES[config.train.precision]))

    device = torch.device(config.topology.drafters[0])
    target = load_target(data.target, torch.float32, device)
    # The same intra-op threads as training, so that its compiled code is found on disk; decoding then takes all cores.
    set_threads(len(config.topology.drafters), device)
    before = disk_counts()
    with compiling(cache_folder(), say):
        gates.append(compiled_equals_dense(config, data, target, exported, device))
    counts = disk_counts(before)
    free_memory()  # of the compiled replica
    set_threads(1, device)

    drafter = load_drafter(run.drafter_dir, dtype=torch.float32, device=device)
    untrained = new_drafter(config, data.drafter, target.get_output_embeddings().weight).to(device).eval()
    eos_ids = set(stop_ids(target, load_tokenizer(data.target)))
    count = config.verify.num_prompts
    with progress_bar("decoding held-out prompts", 2 * count) as bar:
        inside, outside = [
            decode_set(
                name,
                target,
                drafter,
                data.prompts[name][:count],
                max_new_tokens=config.verify.max_new_tokens,
                eos_ids=eos_ids,
                advance=bar.advance,
                at_once=min(count, AT_ONCE) if device.type == "cuda" else 1,
            )
            for name in ("held_out", "out_of_domain")
        ]
    gates += [train_equals_decode(inside, drafter, target), lossless([inside, outside])]
    tau: dict[str, Any] = {}
    for found in (inside, outside):
        tau[found.name] = {
            "decoded": round(found.tau, 4),
            "chained": round(chained_tau(found, drafter, target), 4),
            "untrained": round(chained_tau(found, untrained, target), 4),
            "tokens": sum(len(d.tokens) for d in found.speculative),
            "calls": sum(len(d.accepted) for d in found.speculative),
        }
    gates += tau_gates(tau, config.verify.min_tau, config.verify.min_tau_gain, config.verify.min_tau_gain_out_of_domain)
    passed = all(gate.holds for gate in gates)
    report = {
        "verdict": "pass" if passed else "fail",
        "gates": [gate.record() for gate in gates],
        "tau": tau,
        "compile": counts,
    }
    atomic_write_json(run.verify_path, report)
    if not passed:
        names = ", ".join(gate.name for gate in gates if not gate.holds)
        raise VerificationFailed(f"failed: {names}", where=run.verify_path.name, fix="Its detail says why.")
    return report


def tau_gates(tau: dict[str, Any], minimum: float, gain: float, gain_outside: float) -> list[Gate]:
    """Return the gates on acceptance length: tokens emitted per verifying target call, pooled over prompts."""
    inside, outside = tau["held_out"], tau["out_of_domain"]
    limit = max(minimum, round(inside["untrained"] + gain, 4))
    difference = max(abs(t["decoded"] - t["chained"]) for t in (inside, outside))
    floor = round(outside["untrained"] + gain_outside, 4)

    def detail(t: dict[str, Any]) -> str:
        return f"untrained drafter {t['untrained']}, chained {t['chained']}, {t['tokens']} tokens in {t['calls']} calls"

    return [
        Gate("tau in domain", inside["decoded"], f">= {limit}", inside["decoded"] >= limit, detail(inside)),
        Gate("tau out of domain", outside["decoded"], f">= {floor}", outside["decoded"] >= floor, detail(outside)),
        Gate(
            "chained tau equals decoded",
            round(difference, 4),
            "<= 0.01",
            difference <= 0.01,
            "the training mask's walk over the decoded texts",
        ),
    ]
