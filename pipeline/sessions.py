"""What a training writes about itself: a line of metrics.jsonl, and the session of one start of it.

A session is made of parts, one for each process: one where workers are threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.config_json import to_json
from pipeline.cache import CachedData
from pipeline.config import RunConfig
from pipeline.errors import VerificationFailed
from pipeline.own_gpus import Names
from pipeline.pace import summed
from pipeline.ranks import Ranks
from pipeline.replica import Replica
from pipeline.topology import target_name

UNBOUND = {"checkpoint_every", "evaluate_every", "keep_checkpoints", "log_every", "head_chunk_rows"}
"""Fields of the train section that a resumed run may change: they do not touch what is computed."""
SUMMED_OF_GATE = (
    "compiles",
    "compiles_after_warmup",
    "eager_bodies",
    "misses",
    "seconds_compiling",
    "seconds_parked",
)
COUNTED_BY_GATE = ("compiles_after_warmup", "eager_bodies", "seconds_parked")
"""What a line of metrics.jsonl has of the gate's report."""


def step_record(step: int, epoch: int, sums: Sequence[float], block_size: int, **more: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl of a step's loss sums (dflash.objective.LossSums.vector)."""
    K = block_size
    numerator, denominator, accepted, blocks = sums[:4]
    correct, counts, runs, reached = (sums[4 + i * K : 4 + (i + 1) * K] for i in range(4))
    return {
        "step": step,
        "epoch": epoch,
        "loss": numerator / denominator,
        "accepted_length": 1 + accepted / blocks if blocks else math.nan,
        "slot_accuracy": _ratios(correct, counts),
        "slot_conditional_accuracy": _ratios(runs, reached),
        "supervised_slots": int(sum(counts)),
        **more,
    }


def _ratios(hits: Sequence[float], counts: Sequence[float]) -> list[float | None]:
    """Return hits / counts of slots 1.. (slot 0 is never drafted); None for a slot that no block reached."""
    return [round(hit / count, 4) if count else None for hit, count in zip(hits[1:], counts[1:], strict=True)]


def check_finite(step: int, sums: Tensor, norm: Tensor) -> None:
    """Raise VerificationFailed when the loss or the gradient is not a number: before it is logged, and before it is
    saved, so that a run can always go on from its last checkpoint."""
    numerator, denominator = sums[:2].tolist()
    loss = numerator / denominator if denominator else math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise VerificationFailed(
            f"the loss is {loss} and the gradient's norm {float(norm)}",
            where=f"step {step}",
            fix="Lower train.learning_rate; the last checkpoint is from before it.",
        )


def contract_of(config: RunConfig, data: CachedData) -> dict[str, Any]:
    """Return what a resume must find unchanged: it decides the meaning of weights, moments and step numbers."""
    contract = {
        "target": data.target.identity,
        "answers": data.answers_key,
        "drafter": {k: v for k, v in to_json(data.drafter).items() if k != "dtype"},
        "train": config.train.model_dump(mode="json", exclude=UNBOUND),
        "buckets": list(config.data.buckets),
        "samples_per_row": config.data.samples_per_row,
        "seed": config.seed,
    }
    as_read: dict[str, Any] = json.loads(json.dumps(contract))
    return as_read


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all processes of a session report: "gate" (CompileGate.report), "built", "loaded", "waited", the
    slowest one's "warmup_seconds" and on how many "hosts" they were."""
    gates = [part["gate"] for part in parts]
    gate = {name: round(sum(g[name] for g in gates), 3) for name in SUMMED_OF_GATE}
    return {
        "hosts": len({part["host"] for part in parts}),
        "warmup_seconds": max(part["warmup_seconds"] for part in parts),
        "gate": {**gates[0], "functions": [function for g in gates for function in g["functions"]], **gate},
        **{name: sum(part[name] for part in parts) for name in ("built", "loaded")},
        "waited": {thread: reasons for part in parts for thread, reasons in part["waited"].items()},
    }


def totals(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the manifest says of all sessions together."""
    gates = [session["gate"] for session in sessions]
    return {
        "replicas_equal": all(session["replicas_equal"] for session in sessions),
        **{name: sum(session.get(name, 0) for session in sessions) for name in ("built", "loaded")},
        **{name: sum(g[name] for g in gates) for name in ("compiles_after_warmup", "eager_bodies", "misses")},
        "training": summed(sessions),
    }


def whereabouts(
    replicas: Sequence[Replica], targets: Sequence[torch.device], ranks: Ranks | None, called: Names
) -> dict[str, list[str]]:
    """Return on which devices the workers and the targets of all processes are; these are one's own."""
    base = ranks.rank if ranks else 0
    found = {
        "workers": [f"{r.name} on {called.name(r.device)} ({r.attention})" for r in replicas],
        "targets": [f"{target_name(number)} on {called.name(device)}" for number, device in enumerate(targets, base)],
    }
    if ranks is None:
        return found
    ranks.put("places", found)
    every = ranks.all("places")
    return {kind: [line for one in every for line in one[kind]] for kind in found}
