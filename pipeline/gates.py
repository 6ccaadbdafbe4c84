"""Gates: one claim each, with its measured value, its limit and a verdict. The ones here read what training wrote."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from env.installed import Finding


@dataclass(frozen=True)
class Gate:
    """`value` and `limit` are numbers or short texts; `holds` decides the verdict; `detail` is for a person."""

    name: str
    value: Any
    limit: str
    holds: bool
    detail: str = ""

    def record(self) -> dict[str, Any]:
        """Return the gate as verify.json holds it."""
        entry = asdict(self)
        entry["verdict"] = "pass" if entry.pop("holds") else "fail"
        return entry


def environment_equals_lock(findings: Sequence[Finding]) -> Gate:
    """No installed distribution differs from lockfiles/runtime.txt."""
    errors = [str(f) for f in findings if f.level == "error"]
    return Gate("environment equals lock", len(errors), "0 differences", not errors, "; ".join(errors[:3]))


def no_compiles_after_warmup(manifest: Mapping[str, Any]) -> Gate:
    """No graph was compiled after the seal, in any session of the training."""
    count = manifest["compiles_after_warmup"]
    graphs = sum(s["gate"]["compiles"] for s in manifest["sessions"])
    seconds = sum(s["warmup_seconds"] for s in manifest["sessions"])
    return Gate(
        "compiles after warm-up",
        count,
        "0",
        count == 0,
        f"{graphs} graphs traced or loaded in {seconds:.1f} s of warm-up",
    )


def no_eager_bodies(manifest: Mapping[str, Any]) -> Gate:
    """The drafter's body never ran as plain Python."""
    count = manifest["eager_bodies"]
    return Gate(
        "eager bodies", count, "0", count == 0, f"over {manifest['steps']} steps on {', '.join(manifest['workers'])}"
    )


def replicas_equal(manifest: Mapping[str, Any]) -> Gate:
    """All drafter replicas ended with the same bits."""
    equal = bool(manifest["replicas_equal"])
    return Gate(
        "replicas equal", "equal" if equal else "different", "equal", equal, f"{len(manifest['workers'])} replicas"
    )


def loss_fell(metrics: Sequence[Mapping[str, Any]]) -> Gate:
    """Every loss is finite, and the last tenth's mean is below the first tenth's."""
    losses = [float(m["loss"]) for m in metrics]
    tenth = max(1, len(losses) // 10)
    first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    finite = all(map(math.isfinite, losses))
    return Gate(
        "loss finite and fell",
        round(last / first, 4),
        "< 1",
        finite and last < first,
        f"{first:.3f} -> {last:.3f} over {len(losses)} records",
    )


def memory_flat(metrics: Sequence[Mapping[str, Any]]) -> Gate:
    """On CUDA: over the second half reserved bytes constant, no allocator retry, allocated bytes at most 1 % up.

    Allocated bytes move a little with the number of supervised slots in a batch.

    On the CPU: the resident set's last quarter at most 5 % above its second (it counts the shards' pages, read early).
    """
    half = metrics[len(metrics) // 2 :]
    if "reserved_bytes" in half[-1]:
        reserved = {m["reserved_bytes"] for m in half}
        retries = half[-1]["allocator_retries"] - half[0]["allocator_retries"]
        growth = max(reserved) / min(reserved) - 1
        quarter = max(1, len(half) // 2)
        allocated = [
            statistics.median(m["allocated_bytes"] for m in part) for part in (half[:quarter], half[-quarter:])
        ]
        leak = allocated[1] / allocated[0] - 1
        return Gate(
            "memory flat",
            round(max(growth, leak), 4),
            "reserved constant, allocated within 0.01, no retry",
            growth == 0 and leak <= 0.01 and retries == 0,
            f"{max(reserved) / 2**30:.2f} GiB reserved, allocated {leak:+.4f}, {retries} retries",
        )
    resident = [m["resident_bytes"] for m in metrics]
    quarter = max(1, len(resident) // 4)
    early, late = statistics.median(resident[quarter : 2 * quarter] or resident), statistics.median(resident[-quarter:])
    growth = late / early - 1
    return Gate(
        "memory flat",
        round(growth, 4),
        "<= 0.05 growth of the resident set",
        growth <= 0.05,
        f"{early / 2**30:.2f} GiB -> {late / 2**30:.2f} GiB",
    )


def throughput_held(metrics: Sequence[Mapping[str, Any]], minimum: float) -> Gate:
    """Tokens/s of the last half did not sink under a share of the first tenth's (the first record is left out)."""
    rates = [float(m["tokens_per_second"]) for m in metrics[1:]] or [float(metrics[0]["tokens_per_second"])]
    first = statistics.median(rates[: max(1, len(rates) // 10)])
    last = statistics.median(rates[len(rates) // 2 :])
    ratio = last / first
    return Gate(
        "throughput held", round(ratio, 3), f">= {minimum}", ratio >= minimum, f"{first:,.0f} -> {last:,.0f} tokens/s"
    )
