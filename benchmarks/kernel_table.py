"""A profiled step's GPU time, by group of kernels and by kernel."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

HEAD_FUNCTION = r"_?\w*HeadLoss"
"""dflash.objective's autograd function, as the profiler names its forward."""
OTHER = "norms, pointwise, other"
GROUPS = (
    ("attention", r"triton_tem_\w*flex_attention|flash|fmha"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem_"),
    ("copies", r"^mem(cpy|set)"),
)
"""Kernels by name, the first pattern that is found; everything else is OTHER. Inductor's fused pointwise kernels also
carry the names of operations beside them, so only its templates (tem) count as products."""


def kernel_table(events: Sequence[Mapping[str, Any]], *, steps: int) -> str:
    """Return GPU milliseconds a step by group, and of the 25 largest kernels, from a chrome trace of `steps` steps.

    What was launched while the head's autograd function ran belongs to the head, whatever its kernel is called.
    """
    head = [(e["ts"], e["ts"] + e["dur"]) for e in events if re.fullmatch(HEAD_FUNCTION, e.get("name", ""))]
    launched = {
        e["args"]["correlation"]: any(first <= e["ts"] <= last for first, last in head)
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    groups, kernels = defaultdict[str, float](float), defaultdict[tuple[str, str], list[float]](list)
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for e in ran:
        in_head = launched.get(e["args"].get("correlation"), False)
        group = next((name for name, pattern in GROUPS if re.search(pattern, e["name"], re.IGNORECASE)), OTHER)
        group = {"matmul": "matmul, head", OTHER: "head softmax and loss"}.get(group, group) if in_head else group
        groups[group] += e["dur"] / 1e3 / steps
        kernels[group, e["name"]].append(e["dur"] / 1e3 / steps)
    span = max(e["ts"] + e["dur"] for e in ran) - min(e["ts"] for e in ran) if ran else 0.0
    groups["no kernel runs"] = max(0.0, span / 1e3 / steps - sum(groups.values()))
    lines = [f"{'group':24} {'ms a step':>10}"]
    lines += [f"{name:24} {ms:10.3f}" for name, ms in sorted(groups.items(), key=itemgetter(1), reverse=True)]
    if not head:
        lines.append("The trace names no head loss: its kernels are in the other groups.")
    lines += ["", f"{'ms a step':>10} {'calls':>6}  kernel"]
    totals = {key: sum(times) for key, times in kernels.items()}
    for key, ms in sorted(totals.items(), key=itemgetter(1), reverse=True)[:25]:
        lines.append(f"{ms:10.3f} {len(kernels[key]) / steps:6.0f}  {key[1][:110]} ({key[0]})")
    return "\n".join(lines)
