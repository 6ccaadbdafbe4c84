"""The model against every point that was measured, with the error in percent and what it may be.

The points are one H200's: benchmarks/records/2026-11-30-step-h200.json (invoke bench), and NOTES.md for the rest. Most
of them are what the constants of costs.py were fitted to, which shows only that a few constants describe many points.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.flops import Case
from pipeline.plan import costs
from pipeline.plan.costs import Micro
from pipeline.plan.gpus import GPUS, Gpu
from pipeline.plan.memory import decode_memory, drafter_memory
from pipeline.plan.shapes import named_shape

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "2026-11-30-step-h200.json"
HEAD_ROWS = 2048
"""Of every case in the record."""
TARGET = "smollm2"
"""What wrote the answers of NOTES.md: 36 tokens of prompt, 256 of answer."""
PROMPT, ANSWER = 36, 256


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured number and the model's."""

    name: str
    unit: str
    measured: float
    predicted: float
    bound: float
    """Largest error that passes, in percent."""
    fitted: bool
    """A constant was chosen by this point, among others; else it is a check."""

    @property
    def error(self) -> float:
        """In percent of what was measured."""
        return 100 * (self.predicted / self.measured - 1)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.bound


def points(record: Path = RECORD) -> list[Point]:
    """Return every point, in the order in which a person would read them."""
    found = json.loads(record.read_text(encoding="utf-8"))
    gpu = replace(GPUS["h200"], matmul=found["peaks"]["matmul_flops"], copy=found["peaks"]["copy_bytes"])
    steps = [point for row in found["rows"] if row["case"]["precision"] == "bf16" for point in _of_step(row, gpu)]
    order = {"ms": 0, "GiB": 1}
    return [
        *sorted(steps, key=lambda point: order[point.unit]),
        *_earlier(),
        *_recorded(),
        *_of_a_run(),
        *_of_answers(),
        *_of_training(),
    ]


def _of_step(row: dict[str, Any], gpu: Gpu) -> Iterator[Point]:
    """Yield forward and backward, the optimizer and the peak of one case of invoke bench."""
    case = Case(**row["case"])
    drafter, micro, target = case.drafter(), _micro(case), named_shape(case.target)
    small = case.target == "smollm2"
    seconds = costs.drafter_seconds(drafter, micro, gpu).alone
    name = f"forward + backward, {case.name}, N {case.num_anchors}, B {case.block_size}"
    yield Point(
        name=name + (" (Python)" if small else ""),
        unit="ms",
        measured=row["ms_forward_backward"],
        predicted=1e3 * seconds,
        bound=3,
        fitted=True,
    )
    yield Point(
        name=f"AdamW, {case.name}",
        unit="ms",
        measured=row["ms_optimizer"],
        predicted=1e3 * costs.optimizer_seconds(drafter, gpu).alone,
        bound=15 if small else 2,
        fitted=True,
    )
    parts = drafter_memory(drafter, target, micro, head_rows=HEAD_ROWS)
    held = 16.0 * costs.drafter_parameters(drafter)
    yield Point(
        name=f"peak above float32 weights, gradients, moments, {case.name}",
        unit="GiB",
        measured=row["gib_forward_backward"],
        predicted=(sum(parts.values()) - held) / 2**30,
        bound=10,
        fitted=True,
    )


def _micro(case: Case) -> Micro:
    return Micro(rows=case.sequences, length=case.context_len, anchors=case.num_anchors, block=case.block_size)


def _earlier() -> Iterator[Point]:
    """Yield the steps of an earlier tree, a little slower, in processes with other matmul rates."""
    for name, shape, rate, measured in (
        ("reference, earlier tree", (1, 3072, 512, 16), 683.7, 118.4),
        ("qwen3-8b 8 x 1024, earlier tree", (8, 1024, 64, 8), 688.9, 61.8),
    ):
        case = Case(name, "qwen3-8b", *shape)
        gpu = replace(GPUS["h200"], matmul=rate * 1e12)
        seconds = costs.drafter_seconds(case.drafter(), _micro(case), gpu).alone
        named = f"forward + backward, {name}"
        yield Point(name=named, unit="ms", measured=measured, predicted=1e3 * seconds, bound=5, fitted=False)


def _recorded() -> Iterator[Point]:
    """Yield steps of a small drafter as CUDA graphs, with AdamW."""
    for anchors, measured in ((32, 25.3), (64, 47.0)):
        case = Case("small", TARGET, 64, 384, anchors, 16)
        parts = (
            costs.drafter_seconds(case.drafter(), _micro(case), GPUS["h200"], recorded=True),
            costs.optimizer_seconds(case.drafter(), GPUS["h200"]),
        )
        predicted = 1e3 * sum(part.alone for part in parts)
        name = f"step with AdamW, {TARGET} 64 x 384, N {anchors}, CUDA graph"
        yield Point(name=name, unit="ms", measured=measured, predicted=predicted, bound=8, fitted=True)


def _of_a_run() -> Iterator[Point]:
    """Yield what a run of 12,000 such steps with 32 anchors took, the target beside it on the same GPU, both graphs."""
    case, gpu, target = (
        Case("run", TARGET, 64, 384, 32, 16),
        replace(GPUS["h200"], matmul=687.65e12),
        named_shape(TARGET),
    )
    forward = costs.target_seconds(target, _micro(case), gpu, recorded=True)
    work = costs.drafter_seconds(case.drafter(), _micro(case), gpu, recorded=True)
    step = forward.gpu + work.gpu + costs.optimizer_seconds(case.drafter(), gpu).gpu
    for name, measured, predicted, bound in (
        (f"target's forward, {TARGET} 64 x 384, CUDA graph (28 of 30 layers)", 14.46, forward.gpu * 28 / 30, 10),
        (f"a step of a run, {TARGET} 64 x 384, N 32, CUDA graphs", 40.2, step, 5),
    ):
        yield Point(name=name, unit="ms", measured=measured, predicted=1e3 * predicted, bound=bound, fitted=False)


def _of_answers() -> Iterator[Point]:
    target, gpu = named_shape(TARGET), GPUS["h200"]
    steps = {1024: (6.4, 8.3, 10.2), 2048: (9.8, 13.4, 17.1)}
    for rows, measured in steps.items():
        for slots, ms in zip((128, 256, 384), measured, strict=True):
            predicted = 1e3 * costs.decode_seconds(target, rows, slots, gpu)
            name = f"decoding step, {TARGET}, {rows:,} rows, {slots} slots"
            yield Point(name=name, unit="ms", measured=ms, predicted=predicted, bound=4, fitted=True)
    for rows, rate, fitted in ((512, 83_800, False), (1024, 119_700, True), (2048, 148_600, True)):
        predicted = rows * ANSWER / costs.answer_seconds(target, rows, PROMPT, ANSWER, gpu)
        name = f"answers, {TARGET}, {rows:,} rows"
        yield Point(name=name, unit="tokens/s", measured=rate, predicted=predicted, bound=8, fitted=fitted)
    gib = decode_memory(target, 2048, PROMPT + ANSWER) / 2**30
    yield Point(name=f"answers, {TARGET}, 2,048 rows", unit="GiB", measured=18, predicted=gib, bound=10, fitted=False)


def _of_training() -> Iterator[Point]:
    """Yield the whole training that was measured: 4,000 samples of 266 tokens, 64 rows of 384 with 32 anchors a step,
    target and drafter on one GPU, kernels launched by Python; 165,000 to 199,000 tokens/s."""
    case = Case("training", TARGET, 64, 384, 32, 16)
    drafter, micro, gpu = case.drafter(), _micro(case), GPUS["h200"]
    work = (costs.drafter_seconds(drafter, micro, gpu), costs.target_seconds(named_shape(TARGET), micro, gpu))
    seconds = max(sum(w.gpu for w in work), sum(w.host for w in work))
    rate = 64 * 1_065_547 / 4000 / seconds
    name = "training, smollm2, one GPU (Python)"
    yield Point(name=name, unit="tokens/s", measured=175_000, predicted=rate, bound=14, fitted=True)
