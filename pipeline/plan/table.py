"""A plan in words, one line for each thing that a person would ask."""

from __future__ import annotations

from pipeline.plan.points import TARGET, Point
from pipeline.plan.report import SHOWN_SPLITS, WORTH, Plan
from pipeline.plan.shapes import named_shape

GIB = 2**30


def lines(plan: Plan) -> list[tuple[str, str]]:
    """Return (what, how much) of each line of the table."""
    work, micro, load, answers = plan.work, plan.micro, plan.workload, plan.answers
    rows = [
        ("GPUs", f"{plan.gpus} x {plan.gpu.name}: {plan.gpu.matmul / 1e12:,.0f} TFLOP/s bf16, copies "
         f"{plan.gpu.copy / 1e9:,.0f} GB/s, {plan.gpu.memory / GIB:.0f} GiB, link {plan.gpu.link / 1e9:,.0f} GB/s"),
        ("their figures", plan.gpu.basis),
        ("weights", f"target {plan.target.parameters / 1e9:.3g} billion, drafter {plan.drafter_parameters / 1e9:.3g}"),
        ("samples", f"{load.samples:,} of {load.prompt_tokens:,} + {load.answer_tokens:,} tokens"),
        ("steps", f"{load.steps:,}"),
        ("answers", f"{answers.tokens_per_second:,.0f} tokens/s a GPU, {answers.rows:,} at once ({answers.most_rows:,} "
         f"would fit)"),
        ("one step", f"{plan.pieces} x micro-batch of {micro.rows} x {micro.length:,} tokens, {micro.anchors} anchors "
         f"a row; {plan.tflop_step:,.4g} TFLOP in the drafter"),
        ("drafter, a micro-batch", f"{_ms(work.drafter.gpu)} on the GPU, {_ms(work.drafter.host)} of Python"
         + _host_basis(plan)),
    ]  # fmt: skip
    if plan.target_memory:
        rows.append(("target, a micro-batch", f"{_ms(work.target.gpu)} and {_ms(work.target.host)}"))
    rows += [
        ("optimizer, exchange", f"{_ms(work.optimizer.alone)} and {_ms(plan.placings[0].exchange)} a step"),
        ("memory of a drafter's GPU", _parts(plan.drafter_memory)),
    ]
    if plan.target_memory:
        rows += [
            ("memory of a target's GPU", _parts(plan.target_memory)),
            ("memory of a GPU with both", f"{plan.shared_bytes / GIB:.1f} GiB"),
        ]
    share = plan.feature_rate / plan.gpu.link
    rows += [
        ("features", f"{plan.feature_rate / 1e9:.2g} GB/s into each drafter"
         + (f", {share:.1%} of the link" if plan.target_memory else ", read from disk")),
        ("all features on disk", _bytes(plan.feature_storage) + (" (not kept: online)" if plan.target_memory else "")),
    ]  # fmt: skip
    for number, split in enumerate(plan.placings[:SHOWN_SPLITS]):
        name = "best placing" if number == 0 else "or"
        rows.append((name, f"{split.words()}: {_split(plan, number)}"))
    rows += [
        ("hours: answers", f"{_hours(plan.hours_answers)} on all GPUs, {_hours(answers.hours_one_gpu)} on one"),
        *([("hours: features", f"{_hours(plan.hours_features)} on one GPU")] if plan.hours_features else []),
        ("hours: training", _hours(plan.hours_training)),
        ("hours: verification", f"{_hours(plan.hours_verify)}, roughly"),
        ("hours: all", f"{_hours(plan.hours)}, {_hours(plan.hours * plan.gpus)} of GPUs"),
        ("what limits it", plan.limit),
        ("today's pipeline", _today(plan)),
    ]
    return rows + [("note", note) for note in _notes(plan)]


def check_lines(points: list[Point]) -> list[tuple[str, ...]]:
    """Return a line for each point: name, measured, predicted, error, bound, whether it was fitted."""
    return [
        (
            p.name,
            f"{p.measured:,.4g} {p.unit}" if p.measured < 1e4 else f"{p.measured:,.0f} {p.unit}",
            f"{p.predicted:,.4g}" if p.measured < 1e4 else f"{p.predicted:,.0f}",
            f"{p.error:+.1f} %",
            f"{p.bound:g} %" + ("" if p.holds else "  FAILED"),
            "fitted" if p.fitted else "check",
        )
        for p in points
    ]


def _split(plan: Plan, number: int) -> str:
    split = plan.placings[number]
    step = split.step(one_process=plan.one_process)
    waits = split.waits(one_process=plan.one_process)
    idle = "nobody waits" if waits == "nobody" else f"waiting: {waits}"
    return f"{_ms(step)} a step, {_hours(plan.hours_of(split))}; {idle}"


def _today(plan: Plan) -> str:
    if plan.today is None or plan.hours_today is None:
        return "none of these placings: the configuration refuses them"
    step = plan.today.step(one_process=plan.one_process)
    return f"{plan.today.words()}: {_ms(step)} a step; one GPU answers; {_hours(plan.hours_today)} in all"


def _notes(plan: Plan) -> list[str]:
    notes = []
    work = plan.work
    if plan.one_process and plan.step_of_processes is not None and plan.step_of_processes < WORTH * plan.step:
        apart = _ms(plan.step_of_processes)
        notes.append(f"with topology.workers=processes a step would take {apart}")
    if plan.faster_micro:
        rows, share = plan.faster_micro
        notes.append(f"train.micro_batch={rows} would take {share:.0%} of a step's time")
    if not plan.recorded:
        notes.append(f"without CUDA graphs Python takes {_ms(work.drafter.host + work.target.host)} a micro-batch")
    if plan.answers.rows < min(plan.answers.most_rows, plan.workload.samples):
        notes.append(f"data.generate_batch could be up to {plan.answers.most_rows:,}: more tokens/s in the answers")
    if plan.target.cache_width != named_shape(TARGET).cache_width:
        notes.append(f"answers and the target's forward were measured on {TARGET} only: the least certain lines here")
    return notes


def _host_basis(plan: Plan) -> str:
    return " (CUDA graphs: assumed, not measured)" if plan.recorded else ""


def _parts(parts: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return f"{sum(parts.values()) / GIB:.1f} GiB: {listed}"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def _hours(hours: float) -> str:
    if hours >= 10:
        return f"{hours:,.0f} h"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _bytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e6:,.1f} MB"
