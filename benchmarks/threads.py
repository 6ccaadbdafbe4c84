"""Three drafter threads on one device against one drafter with three times the micro-batch: time, memory, gradient.

    python -m benchmarks.threads [--json FILE] [--device cuda] [--layers 5]

Both train on the same rows in the same order with the training loop's own parts: replicas behind one compile gate, the
exchange of gradients, AdamW on every replica. Features and tokens are random; batches are made ahead and sent in the
step, as where the target runs beside. The gradient is that of the first step, from the same weights. Exit code 4 when
something compiled after the warm-up, replicas ended different or gradients differ by more than rounding does.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.flops import Case
from benchmarks.header import check_record, header
from benchmarks.step import run_config
from dflash.compile import CompileGate, CompileMiss, GateAborted
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from pipeline.batches import Collator
from pipeline.config import RunConfig
from pipeline.rendering import Sample
from pipeline.replica import DTYPES, Borrowed, Replica
from pipeline.topology import GradientExchange, waits

THREADS = 3
CASES = {
    "cuda": Case("smollm2 48 x 384", "smollm2", 48, 384, 32, 16),
    "cpu": Case("tiny 6 x 64", "tiny", 6, 64, 8, 4, num_layers=1, precision="fp32"),
}
"""All rows of a step; each of the threads takes its share of them."""
UNTIMED, TIMED = 3, 20
LARGEST_DIFFERENCE = {"fp32": 1e-5, "bf16": 5e-2}
"""Of a gradient over its largest value. In bf16 a thread's sums over a third of the rows are rounded before they are
added, to 2**-9 of their value, and a sum that cancels is small beside what was rounded."""


@dataclass(frozen=True)
class Side:
    """What one arrangement gave."""

    threads: int
    sequences: int
    """Of a thread's micro-batch."""
    ms_step: float
    """The mean of TIMED steps, one right after the other."""
    tokens_per_second: float
    gib_reserved: float | None
    """The most that the allocator held; None on the CPU."""
    warm_up_seconds: float
    waited_share: dict[str, float]
    """Of the timed and untimed steps' time, by thread: for the others."""
    compiles_after_warmup: int
    replicas_equal: bool


class Trial:
    """One arrangement: its replicas, and the loop that they run."""

    def __init__(self, case: Case, threads: int, device: torch.device) -> None:
        self.case, self.threads, self.device = case, threads, device
        self.config, drafter = config_of(case, threads, device), case.drafter()
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        self.gate = CompileGate(workers=threads, backend=backend)
        generator = torch.Generator().manual_seed(0)
        dtype = DTYPES[case.precision]
        shape = (drafter.vocab_size, drafter.hidden_size)
        head = (torch.randn(shape, generator=generator) * 0.02).to(device, dtype)
        start = DFlashDraftModel(drafter)
        start.initialise(0, head)
        borrowed = Borrowed(head, head)
        self.replicas = [
            Replica(f"drafter-{i}", self.config, drafter, start, borrowed, device, self.gate) for i in range(threads)
        ]
        self.exchange = GradientExchange(self.replicas)
        self._marks = threading.Barrier(threads)
        self.collator = Collator(self.config, drafter, samples_of(case))
        size = case.sequences // threads
        features = torch.randn(case.sequences, case.context_len, drafter.feature_size, generator=generator)
        self.features = [part.to(device, dtype) for part in features.split(size)]
        self.batches = [
            [
                self.collator.collate(step, case.context_len, tuple(range(i * size, (i + 1) * size)))
                for step in range(UNTIMED + TIMED)
            ]
            for i in range(threads)
        ]
        self.gradients: list[Tensor] = []
        self._times: list[float] = []
        self._began = time.perf_counter()
        self.warm_up_seconds = 0.0

    def run(self) -> Side:
        """Run all steps in threads and return what they took. Raises what a thread raised."""
        raised: list[BaseException] = []

        def guarded(index: int) -> None:
            try:
                self._work(index)
            except BaseException as error:
                raised.append(error)
                self.exchange.rendezvous.abort()
                self._marks.abort()

        workers = [
            threading.Thread(target=guarded, args=(i,), name=replica.name) for i, replica in enumerate(self.replicas)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.gate.close()
        if raised:  # the others only report that a partner was gone
            gone = GateAborted, threading.BrokenBarrierError
            raise next((error for error in raised if not isinstance(error, gone)), raised[0])
        first, last = self._times
        size, cuda = self.case.sequences // self.threads, self.device.type == "cuda"
        whole = last - self._began - self.warm_up_seconds
        return Side(
            threads=self.threads,
            sequences=size,
            ms_step=(last - first) / TIMED * 1e3,
            tokens_per_second=self.case.sequences * self.case.context_len * TIMED / (last - first),
            gib_reserved=torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
            warm_up_seconds=self.warm_up_seconds,
            waited_share={
                name: round(reasons["others"] / whole, 4) for name, reasons in waits(self.exchange, None).items()
            },
            compiles_after_warmup=self.gate.report()["compiles_after_warmup"],
            replicas_equal=self._equal(),
        )

    def _work(self, index: int) -> None:
        replica = self.replicas[index]
        with self.gate.worker(replica.name):
            self.gate.warm_up(replica.warm_up)
            if index == 0:
                self.warm_up_seconds = time.perf_counter() - self._began
            for step, batch in enumerate(self.batches[index]):
                if step == UNTIMED:
                    self._mark(index)
                with self.gate.step():
                    sums = replica.forward_backward(batch.to(self.device), self.features[index])
                total = self.exchange.total(index, sums)
                if step == 0 and index == 0:
                    self.gradients = [gradient / total[1] for gradient in replica.optimizer.gradients]
                replica.optimizer.step(1e-4, total[1])
                self.exchange.rendezvous.wait()
                self.exchange.rendezvous.wait()  # the trainer has two: the first worker logs between them
            self._mark(index)

    def _mark(self, index: int) -> None:
        """Let the first worker take the time at which all have done their work so far, the device's as well."""
        self._marks.wait()  # not the exchange's own, which counts the waits of steps
        if index == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._times.append(time.perf_counter())
        self._marks.wait()

    def _equal(self) -> bool:
        first, *others = (replica.optimizer.masters for replica in self.replicas)
        return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def config_of(case: Case, threads: int, device: torch.device) -> RunConfig:
    """Return the configuration of a run in which `threads` drafters share the rows of `case`."""
    given = run_config(replace(case, sequences=case.sequences // threads), device).model_dump()
    given["train"]["batch_size"] = case.sequences
    given["topology"]["drafters"] = (str(device),) * threads
    return RunConfig.model_validate(given)


def samples_of(case: Case) -> list[Sample]:
    """Return one text of random tokens for each row: half to all of context_len long, its first quarter the prompt."""
    rng = np.random.default_rng(0)
    mask_token_id = case.drafter().mask_token_id
    samples = []
    for row in range(case.sequences):
        length = int(rng.integers(case.context_len // 2, case.context_len + 1))
        ids, prompt = rng.integers(0, mask_token_id, length).tolist(), case.context_len // 4
        samples.append(Sample(id=f"random-{row}", input_ids=ids, loss_mask=[i >= prompt for i in range(length)]))
    return samples


def largest_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest of max |a - b| / max |b| over all gradients; infinity when one is not finite."""
    found = [float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in zip(a, b, strict=True)]
    return max(value if np.isfinite(value) else float("inf") for value in found)


def compare(case: Case, device: torch.device) -> dict[str, Any]:
    """Return both sides, the ratio of their tokens per second (threads over one) and the gradients' difference."""
    sides, gradients = list[Side](), list[list[Tensor]]()
    for threads in (THREADS, 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trial = Trial(case, threads, device)
        sides.append(trial.run())
        gradients.append([gradient.cpu() for gradient in trial.gradients])
        del trial
        torch._dynamo.reset()  # compiled code holds the models, and the next ones need the room
        gc.collect()
        torch.cuda.empty_cache()  # nothing without a GPU
    several, one = sides
    return {
        "case": asdict(case),
        "sides": [asdict(side) for side in sides],
        "throughput_ratio": round(several.tokens_per_second / one.tokens_per_second, 4),
        "memory_ratio": round(several.gib_reserved / one.gib_reserved, 4)
        if several.gib_reserved and one.gib_reserved
        else None,
        "gradient_difference": largest_difference(*gradients),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Return a line for everything that a run would refuse."""
    lines = []
    for side in found["sides"]:
        if side["compiles_after_warmup"]:
            lines.append(f"{side['threads']} threads: {side['compiles_after_warmup']} compiles after the warm-up")
        if not side["replicas_equal"]:
            lines.append(f"{side['threads']} threads: the replicas ended different")
    limit = LARGEST_DIFFERENCE[found["case"]["precision"]]
    if not found["gradient_difference"] <= limit:
        lines.append(f"the averaged gradients differ by {found['gradient_difference']:.2e}, more than {limit:g}")
    return lines


def described(found: dict[str, Any]) -> str:
    """Return the comparison in a few lines."""
    lines = [f"{'':24} {'ms step':>9} {'tokens/s':>10} {'GiB reserved':>13} {'warm-up s':>10}  waited for others"]
    for side in found["sides"]:
        name = f"{side['threads']} x {side['sequences']} sequences"
        gib = "-" if side["gib_reserved"] is None else f"{side['gib_reserved']:.2f}"
        waited = ", ".join(f"{share:.1%}" for share in side["waited_share"].values())
        lines.append(
            f"{name:24} {side['ms_step']:9.2f} {side['tokens_per_second']:10,.0f} {gib:>13} "
            f"{side['warm_up_seconds']:10.1f}  {waited}"
        )
    memory = "" if found["memory_ratio"] is None else f", memory {found['memory_ratio']:.2f} x"
    lines.append(
        f"threads over one: {found['throughput_ratio']:.3f} x tokens/s{memory}; "
        f"averaged gradient differs by {found['gradient_difference']:.1e} of its largest value"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.threads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--layers", type=int, default=0, help="of the drafter; fewer compile sooner")
    options = parser.parse_args(arguments)
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise DFlashError("torch sees no GPU here", where="--device", fix="Leave the option out.")
        if options.layers < 0:
            raise DFlashError(f"{options.layers} is no number of layers", where="--layers", fix="Use 1 to 5.")
        check_record(options.json)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device("cuda:0" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    case = CASES[device.type]
    try:
        found = compare(replace(case, num_layers=options.layers or case.num_layers), device)
    except CompileMiss as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 4
    print(described(found), flush=True)
    lines = faults(found)
    if options.json:
        words = shlex.join(sys.argv[1:] if arguments is None else arguments)
        result = {
            **header(f"python -m benchmarks.threads {words}", device),
            **found,
            "faults": lines,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    for line in lines:
        print(line, file=sys.stderr)
    return 4 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
