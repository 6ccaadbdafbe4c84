"""report.html: what a run proved, on one page that needs nothing else (no scripts, no assets, no network)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from pipeline.errors import DataError
from pipeline.files import atomic_write_text
from pipeline.metrics import duration, read
from pipeline.runs import Run, read_manifest

Points = Sequence[tuple[float, float]]

_CURVES = (
    ("Loss", {"": ("loss",)}),
    ("Tau on held-out text", {kind: ("tau", kind) for kind in ("chained", "uniform", "marginals")}),
    ("Accepted length (tokens per target call, estimated on the training batch)", {"": ("accepted_length",)}),
    ("Tokens per second", {"": ("tokens_per_second",)}),
)
"""Title, and for each line its name and the keys that lead to its values in a record of metrics.jsonl."""
_STROKES = (("#2457a6", "none"), ("#b35c00", "6 4"), ("#2f7d4f", "2 3"))
"""Colour and dashes of a chart's first, second and third line."""

_REASONS = {"others": "the other drafters", "features": "features", "room": "room ahead of the drafters"}
"""What a thread waits for, by its name in pipeline/topology.py's `waits`."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2024; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #eee; vertical-align: top;
  overflow-wrap: anywhere }
th { font-weight: 600; color: #555 }
td.number { font-variant-numeric: tabular-nums }
.pass { color: #11692f; font-weight: 600 }
.fail { color: #b3261e; font-weight: 600 }
.quiet { color: #666 }
pre { background: #f6f7f8; padding: .8rem; overflow-x: auto; font-size: .82rem; line-height: 1.4 }
svg { width: 100%; height: auto }
summary { cursor: pointer; color: #555 }
figure { margin: 1.2rem 0 }
figcaption { font-weight: 600 }
"""


def write_report(run: Run, path: Path) -> Path:
    """Write the page for whatever the run has so far and return `path`. It says which parts are not there yet."""
    verify = read_manifest(run.verify_path)
    parts = [
        f"<h1>{escape(run.id)}</h1>",
        _verdict(verify),
        "<h2>Gates</h2>",
        _gates(verify),
        "<h2>Training</h2>",
        _training(run),
        "<h2>Stages</h2>",
        _stages(read_manifest(run.stages_path)),
        "<h2>Configuration</h2>",
        _text_file(run.config_path),
        "<h2>Environment</h2>",
        f"<details><summary>fingerprint.json</summary>{_text_file(run.fingerprint_path)}</details>",
    ]
    body = "\n".join(parts)
    atomic_write_text(
        path,
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(run.id)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n",
    )
    return path


def shown(value: Any) -> str:
    """Return a gate's value as a person would write it: 4 significant digits, lists and mappings as JSON."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _verdict(verify: Mapping[str, Any] | None) -> str:
    if verify is None:
        return '<p class="quiet">Not verified yet.</p>'
    verdict = str(verify.get("verdict"))
    bad = [str(gate.get("name")) for gate in _gate_list(verify) if gate.get("verdict") != "pass"]
    reason = f" ({escape(', '.join(bad))})" if bad else ""
    return f'<p>Verdict: <span class="{_class(verdict)}">{escape(verdict)}</span>{reason}</p>'


def _gates(verify: Mapping[str, Any] | None) -> str:
    gates = _gate_list(verify or {})
    if not gates:
        return '<p class="quiet">No verify.json yet.</p>'
    rows = []
    for gate in gates:
        verdict = str(gate.get("verdict"))
        rows.append(
            f"<tr><td>{escape(str(gate.get('name')))}</td>"
            f'<td class="number">{escape(shown(gate.get("value")))}</td>'
            f'<td class="number">{escape(shown(gate.get("limit")))}</td>'
            f'<td class="{_class(verdict)}">{escape(verdict)}</td>'
            f'<td class="quiet">{escape(shown(gate.get("detail") or ""))}</td></tr>'
        )
    head = "<tr><th>gate</th><th>value</th><th>limit</th><th>verdict</th><th>detail</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _training(run: Run) -> str:
    try:
        records = read(run.metrics_path)
    except DataError as error:
        return f'<p class="fail">{escape(str(error))}</p>'
    manifest = read_manifest(run.manifest_path("train")) or {}
    for session in manifest.get("sessions", [])[:1]:
        records.insert(0, {"step": session.get("from_step"), "tau": session.get("tau_at_start")})
    figures = [_pace(manifest["training"])] if "training" in manifest else []
    for title, lines in _CURVES:
        found = {name: _points(records, keys) for name, keys in lines.items()}
        if any(found.values()):
            chart = _chart({name: points for name, points in found.items() if points}, title)
            figures.append(f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>")
    return "".join(figures) or '<p class="quiet">No step was logged yet.</p>'


def _pace(training: Mapping[str, Any]) -> str:
    """Return what the training did in how many seconds, without warm-up, evaluations and checkpoints, and what share
    of them each thread waited for what."""
    rows = [
        ("steps", f"{training['steps']:,}"),
        ("tokens", f"{training['tokens']:,} in {duration(training['seconds'])} of training"),
        ("anchors, supervised slots", f"{training['anchors']:,}, {training['supervised_slots']:,}"),
        ("tokens per second", f"{training['tokens_per_second']:,.0f}"),
    ]
    for thread, reasons in training["waited_share"].items():
        waits = ", ".join(f"{share:.1%} for {_REASONS.get(why, why)}" for why, share in reasons.items())
        rows.append((thread, f"busy {1 - sum(reasons.values()):.1%}, waited {waits}"))
    cells = "".join(f'<tr><th>{escape(name)}</th><td class="number">{escape(text)}</td></tr>' for name, text in rows)
    return f"<table>{cells}</table>"


def _points(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[float, float]]:
    """Return (step, value) of the finite values; a not finite loss is a gate's business, not a picture's."""
    points = []
    for record in records:
        step = record.get("step")
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if _is_number(value) and _is_number(step):
            points.append((float(step), float(value)))
    return points


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _thinned(points: Points, most: int) -> Points:
    """Return at most `most` points; more are averaged in groups of neighbours."""
    group = -(-len(points) // most)
    return [_mean(points[start : start + group]) for start in range(0, len(points), group)]


def _chart(series: Mapping[str, Points], title: str, *, most: int = 400) -> str:
    """Return a chart of 860 by 220 units with a line for each series, of `most` points at most; several are named."""
    series = {name: _thinned(points, most) for name, points in series.items()}
    everything = [point for points in series.values() for point in points]
    left, right, top, bottom = 70.0, 850.0, 12.0, 190.0
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
    y_low, y_high = min(y for _, y in everything), max(y for _, y in everything)
    if y_low == y_high:
        y_low, y_high = y_low - 0.5, y_high + 0.5
    x_span = (x_high - x_low) or 1.0

    def at_x(x: float) -> float:
        return left + (x - x_low) / x_span * (right - left)

    def at_y(y: float) -> float:
        return bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    lines = []
    for tick in range(5):
        y = y_low + (y_high - y_low) * tick / 4
        lines.append(f'<line x1="{left}" x2="{right}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" stroke="#e4e6e8"/>')
        lines.append(f'<text x="{left - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end">{escape(_axis(y))}</text>')
    for x, anchor in ((x_low, "start"), (x_high, "end")):
        lines.append(f'<text x="{at_x(x):.1f}" y="{bottom + 20}" text-anchor="{anchor}">step {x:.0f}</text>')
    labels = []
    for number, ((name, points), (colour, dashes)) in enumerate(zip(series.items(), _STROKES, strict=False)):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        if len(points) == 1:
            lines.append(f'<circle cx="{at_x(points[0][0]):.1f}" cy="{at_y(points[0][1]):.1f}" r="3" fill="{colour}"/>')
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"/>'
        )
        if len(series) > 1:
            x = (left + right) / 2 + 110 * (number - (len(series) - 1) / 2)
            text = f'x="{x:.0f}" y="{bottom + 20}" text-anchor="middle" fill="{colour}"'
            lines.append(f"<text {text}>{escape(name)}</text>")
        labels.append(f"{name} from {shown(points[0][1])} to {shown(points[-1][1])}".strip())
    label = f"{title}: {', '.join(labels)}, steps {x_low:.0f} to {x_high:.0f}"
    return (
        f'<svg viewBox="0 0 860 220" role="img" aria-label="{escape(label)}" font-size="12" fill="#555">'
        f"{''.join(lines)}</svg>"
    )


def _mean(points: Points) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _axis(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _stages(book: Mapping[str, Any] | None) -> str:
    entries = (book or {}).get("stages") or []
    if not entries:
        return '<p class="quiet">No stage ran yet.</p>'
    rows = []
    for entry in entries:
        seconds = entry.get("seconds")
        rows.append(
            f"<tr><td>{escape(str(entry.get('name')))}</td><td>{escape(str(entry.get('state')))}</td>"
            f'<td class="number">{escape(duration(seconds)) if _is_number(seconds) else "-"}</td>'
            f"<td>{escape(str(entry.get('finished') or '-'))}</td>"
            f'<td class="quiet">{escape(str(entry.get("error") or ""))}</td></tr>'
        )
    head = "<tr><th>stage</th><th>state</th><th>time</th><th>finished</th><th>error</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _text_file(path: Path) -> str:
    try:
        return f"<pre>{escape(path.read_text(encoding='utf-8'))}</pre>"
    except OSError:
        return f'<p class="quiet">{escape(path.name)} is not there.</p>'


def _gate_list(verify: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    gates = verify.get("gates")
    return [gate for gate in gates if isinstance(gate, Mapping)] if isinstance(gates, list) else []


def _class(verdict: str) -> str:
    return {"pass": "pass", "fail": "fail"}.get(verdict, "quiet")
