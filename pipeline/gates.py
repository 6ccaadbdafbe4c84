"""Gates: one claim each, with its measured value, its limit and a verdict. The ones here read what training wrote."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from env.installed import Finding

SETTLING_STEPS = 3
"""After a process's warm-up, before its memory is held to be constant."""


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


def memory_flat(metrics: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, Any]]) -> Gate:
    """On CUDA: the same bytes allocated and reserved in all settled lines of a session, and no allocator retry.

    Each session is a process of its own, with an allocator of its own. Its first tenth, and never less than
    SETTLING_STEPS, is left out: libraries make their workspaces at first, and where threads share a GPU their peaks
    must have met before what is reserved is enough. Lines with an evaluation or a checkpoint count like all others. Of
    several GPUs each is held to it: what one took, another may have let go in the same step.

    On the CPU: the resident set's last quarter at most 5 % above its second (it counts the shards' pages, read early).
    """
    if "reserved_bytes" in metrics[-1]:
        return _flat_on_gpus([_settled(metrics, session) for session in sessions] or [metrics])
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


def _settled(metrics: Sequence[Mapping[str, Any]], session: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a session's lines without its beginning; its last line when it has no other."""
    first, last = session["from_step"], session["to_step"]
    lines = [m for m in metrics if first < m["step"] <= last]
    begin = first + max(SETTLING_STEPS, (last - first) // 10)
    return [m for m in lines if m["step"] > begin] or lines[-1:]


def _flat_on_gpus(parts: Sequence[Sequence[Mapping[str, Any]]]) -> Gate:
    parts = [part for part in parts if part]
    names = sorted({name for part in parts for m in part for name in m.get("gpus", {})})
    spreads = {
        name: _spread([[m["gpus"][name] for m in part if name in m.get("gpus", {})] for part in parts])
        for name in names
    }
    spreads[""] = _spread(parts)  # of the sums: of one GPU that is all there is
    worst = max(spreads, key=lambda name: (any(spreads[name]), max(spreads[name]), bool(name)))
    allocated, reserved, retries = spreads[worst]
    flat = not any(map(any, spreads.values()))
    last: Mapping[str, Any] = parts[-1][-1] if parts else {"allocated_bytes": 0, "reserved_bytes": 0}
    among = f" on {len(last['gpus'])} GPUs" if last.get("gpus") else ""
    return Gate(
        "memory flat",
        f"{allocated} allocated, {reserved} reserved{f' on {worst}' if worst and not flat else ''}",
        "0 bytes of difference, no retry",
        bool(parts) and flat,
        f"{last['allocated_bytes'] / 2**30:.2f} GiB allocated, {last['reserved_bytes'] / 2**30:.2f} GiB reserved"
        f"{among}, {retries} retries over {sum(map(len, parts))} records",
    )


def _spread(parts: Sequence[Sequence[Mapping[str, int]]]) -> list[int]:
    """Return the largest difference inside a session of what is allocated, reserved and retried."""
    fields = ("allocated_bytes", "reserved_bytes", "allocator_retries")
    return [
        max((max(m[f] for m in part) - min(m[f] for m in part) for part in parts if part), default=0) for f in fields
    ]


def throughput_held(metrics: Sequence[Mapping[str, Any]], minimum: float) -> Gate:
    """Tokens/s of the last half did not sink under a share of the first tenth's (the first record is left out)."""
    rates = [float(m["tokens_per_second"]) for m in metrics[1:]] or [float(metrics[0]["tokens_per_second"])]
    first = statistics.median(rates[: max(1, len(rates) // 10)])
    last = statistics.median(rates[len(rates) // 2 :])
    ratio = last / first
    return Gate(
        "throughput held", round(ratio, 3), f">= {minimum}", ratio >= minimum, f"{first:,.0f} -> {last:,.0f} tokens/s"
    )
