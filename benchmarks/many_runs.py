"""The runs of benchmarks/many.py: where targets and drafters are, what they train, and how one is started and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.flops import NUM_TAPS, TARGETS
from benchmarks.header import ROOT
from env.caches import environment_for_compile
from pipeline.config import load_config
from pipeline.gates import memory_flat
from pipeline.metrics import read
from pipeline.runs import read_manifest
from pipeline.tiny_target import VOCAB_SIZE, tiny_target

TEMPLATE_TOKENS = 25
"""Of a prompt, at most."""


@dataclass(frozen=True)
class Size:
    """What a run trains; `target` changes pipeline/tiny_target.py's."""

    target: dict[str, Any]
    rows: int
    """Of a micro-batch."""
    prompt_tokens: int
    answer_tokens: int
    anchors: int
    block: int
    layers: int
    taps: int
    steps: int
    log_every: int
    precision: str
    backend: str
    cold: tuple[str, ...]
    """Overrides of a cold start: fewer layers compile sooner."""


_SMOLLM2 = TARGETS["smollm2"]
SIZES = {
    "cuda": Size(
        target={
            **{name: _SMOLLM2[name] for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")},
            **{name: _SMOLLM2[name] for name in ("num_attention_heads", "num_key_value_heads")},
            "num_hidden_layers": _SMOLLM2["num_target_layers"],
            "initializer_range": 0.02,
        },
        rows=64, prompt_tokens=128, answer_tokens=256, anchors=32, block=16, layers=5, taps=NUM_TAPS,
        steps=60, log_every=5, precision="bf16", backend="inductor",
        # No graphs: without the gate two threads would record at once, which CUDA refuses: not what is asked here.
        cold=("train.steps=6", "drafter.num_layers=1", "train.log_every=1", "compile.cuda_graphs=false"),
    ),
    "cpu": Size(
        target={"num_hidden_layers": 8},
        rows=2, prompt_tokens=48, answer_tokens=16, anchors=8, block=4, layers=1, taps=2,
        steps=8, log_every=1, precision="fp32", backend="aot_eager",
        cold=("train.steps=2",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arrangement:
    """Where a run's targets and drafters are; `pieces` micro-batches make a step."""

    name: str
    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    workers: str
    pieces: int
    sharded: bool = False

    def overrides(self, size: Size) -> list[str]:
        return [
            f"name={re.sub('[^a-z]+', '-', self.name)}",
            f"topology.targets={json.dumps(self.targets)}",
            f"topology.drafters={json.dumps(self.drafters)}",
            f"topology.workers={self.workers}",
            f"topology.shard_optimizer={json.dumps(self.sharded)}",
            f"train.batch_size={self.pieces * size.rows}",
        ]


@dataclass
class Line:
    """What one arrangement gave; all but its name and `failed` are nothing when it failed."""

    name: str
    drafters: int
    gpus: int
    """Those of targets and of drafters; of the CPU as many as drafters."""
    rows: int
    """Of a step."""
    failed: str = ""
    tokens_per_second: float = 0.0
    """The median of the last two thirds of the lines of metrics.jsonl."""
    waited: dict[str, float] = field(default_factory=dict)
    """Mean share of the training's time, by who waited for what; what a GPU waits inside NCCL is not in it."""
    memory: dict[str, Any] | None = None
    """The gate "memory flat"; None on the CPU."""
    allocated_gib: float | None = None
    """Of all GPUs together, after the last step; None on the CPU."""
    losses: list[float] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """All of it: start, warm-up, training."""

    @property
    def compiled(self) -> tuple[int, int]:
        """Graphs built, and loaded from disk."""
        return self.manifest.get("built", 0), self.manifest.get("loaded", 0)


class Laboratory:
    """A folder with the target, the prompts and the configuration, in which runs are started one after another."""

    def __init__(self, folder: Path, device: str, count: int, limit: float) -> None:
        self.folder, self.size, self.device, self.count, self.limit = folder, SIZES[device], device, count, limit
        self.config = folder / "config.yaml"
        target = tiny_target(folder, "llama", **self.size.target)
        for name, many in (("train", 8 * count * self.size.rows + 8), ("other", 8)):
            length = self.size.prompt_tokens - TEMPLATE_TOKENS  # a byte is a token
            lines = (json.dumps({"prompt": f"{name} {i} {'and more ' * length}"[:length]}) for i in range(many))
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.config.write_text(yaml.safe_dump(self._settings(str(target))), encoding="utf-8")

    def _settings(self, target: str) -> dict[str, Any]:
        size, count = self.size, 4 * self.count * self.size.rows
        taken = {"source": str(self.folder / "train.jsonl"), "count": count}
        return {
            "name": "many",
            "target": {"source": target, "dtype": "bfloat16" if size.precision == "bf16" else "float32"},
            "data": {
                "train": [taken],
                "held_out": 4,
                "out_of_domain": {"source": str(self.folder / "other.jsonl"), "count": 4},
                "max_prompt_tokens": size.prompt_tokens,
                "max_answer_tokens": size.answer_tokens,
                "buckets": [size.prompt_tokens + size.answer_tokens],
                "features": "online",
            },
            "drafter": {
                "num_layers": size.layers,
                "block_size": size.block,
                "num_taps": size.taps,
                "mask_token_id": size.target.get("vocab_size", VOCAB_SIZE) - 1,
            },
            "train": {
                "steps": size.steps,
                "batch_size": size.rows,
                "micro_batch": size.rows,
                "num_anchors": size.anchors,
                "precision": size.precision,
                "checkpoint_every": size.steps // 2,
                "evaluate_every": 0,
                "log_every": size.log_every,
                "keep_checkpoints": 1,
            },
            "compile": {"backend": size.backend},
            "verify": {"num_prompts": 4},
        }

    def start(self, overrides: list[str], cache: Path, *flags: str) -> tuple[str, Path]:
        """Run a training; return why it failed, or "", and the run's folder."""
        run = self.folder / "runs" / load_config(self.config, overrides).run_id()
        environ = {
            **os.environ,
            **environment_for_compile(cache / "compile" / "many"),
            "DFLASH_CACHE": str(cache),
            "DFLASH_RUNS": str(run.parent),
        }
        command = [sys.executable, "-m", "benchmarks.many_child", *flags, str(self.config), *overrides]
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            child = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
            try:
                code = child.wait(self.limit)
            except subprocess.TimeoutExpired:
                return f"no result in {self.limit:.0f} s", run
            finally:
                kill_tree(child)
            output.seek(0)
            said = [line.strip() for line in output if line.strip()]
        if code:
            return f"ended with {code}: {' '.join((said or ['it said nothing'])[-1].split())[:200]}", run
        return "", run

    def measure(self, arrangement: Arrangement) -> Line:
        """Return what an arrangement gives. All share one cache: what one GPU compiled is there for the next run."""
        rows, drafters = arrangement.pieces * self.size.rows, len(arrangement.drafters)
        gpus = max(drafters, len({*arrangement.targets, *arrangement.drafters}))
        line, begin = Line(arrangement.name, drafters, gpus, rows), time.perf_counter()
        line.failed, run = self.start(arrangement.overrides(self.size), self.folder / "cache")
        line.seconds = round(time.perf_counter() - begin, 1)
        if line.failed:
            return line
        manifest, metrics = read_manifest(run / "train.json"), read(run / "metrics.jsonl")
        assert manifest is not None  # a stage that ended well has one
        line.manifest = manifest
        line.tokens_per_second = statistics.median(m["tokens_per_second"] for m in metrics[len(metrics) // 3 :])
        line.losses = [m["loss"] for m in metrics]
        line.waited = waited(manifest["training"]["waited_share"])
        if self.device == "cuda":
            line.memory = memory_flat(metrics, manifest["sessions"]).record()
            line.allocated_gib = round(metrics[-1]["allocated_bytes"] / 2**30, 2)
        return line


def kill_tree(child: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started, if it still lives."""
    if child.poll() is None:
        for pid in [*descendants(child.pid), child.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    child.wait()


def descendants(pid: int) -> list[int]:
    """Return the children of a process, theirs and so on."""
    found = []
    for place in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for own in map(int, place.read_text().split()):
                found += [own, *descendants(own)]
    return found


def arrangements(device: str, count: int, apart: bool) -> list[Arrangement]:
    """Return what is compared: the bases of strong and of weak scaling, then all GPUs."""
    names = devices(device, count)
    one = names[:1]
    found = [
        Arrangement("one", one, one, "threads", count),
        Arrangement("one, few rows", one, one, "threads", 1),
        by_threads(device, count),
        Arrangement("processes", names, names, "processes", count),
        Arrangement("sharded", names, names, "processes", count, sharded=True),
    ]
    if apart:
        few = max(number for number in range(1, count // 2 + 1) if count % number == 0)
        found.append(Arrangement("apart", once(names[few:]), names[:few], "threads", count))
    return found


def by_threads(device: str, count: int) -> Arrangement:
    names = devices(device, count)
    return Arrangement("threads", once(names), names, "threads", count)


def once(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets of threads: a CPU has one however many drafters it has."""
    return tuple(dict.fromkeys(names))


def devices(device: str, count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{i}" for i in range(count)) if device == "cuda" else ("cpu",) * count


def waited(shares: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of what a run's threads waited, as "drafters for features": share."""
    found: dict[str, list[float]] = {}
    for thread, reasons in shares.items():
        for reason, share in reasons.items():
            found.setdefault(f"{thread.split('-')[0]}s for {reason}", []).append(share)
    return {what: round(statistics.fmean(values), 4) for what, values in found.items()}
