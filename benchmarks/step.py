"""What a training step costs: forward and backward, optimizer and memory, as shares of this machine's own rates.

    invoke bench [--json FILE] [--device cuda] [--sizes reference]
    python -m benchmarks.step --case reference --profile        # one step's GPU time by kernel

Random weights, features and tokens, every token supervised, fresh anchors in each step; otherwise a run's own replica,
behind the compile gate. Times are medians of TIMED steps, one right after the other. Exit code 4 when something
compiled or memory grew after the warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from benchmarks.flops import NUM_TAPS, Case, allowed_pairs, chosen_cases, optimizer_bytes, step_flops
from benchmarks.header import check_record, header
from benchmarks.kernel_table import kernel_table
from benchmarks.peaks import Peaks, Stopwatch, measure_peaks
from dflash.compile import CompileGate, CompileMiss
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from pipeline.batches import Collator, MicroBatch
from pipeline.config import PromptSource, RunConfig
from pipeline.rendering import Sample
from pipeline.replica import DTYPES, Borrowed, Replica

UNTIMED, TIMED, PROFILED = 2, 8, 3
"""Steps of each kind; untimed ones follow the warm-up and make the optimizer's moments."""


@dataclass(frozen=True)
class Row:
    """What one case gave. Memory is None on the CPU, where torch does not count it."""

    case: Case
    rows: int
    """Supervised slots of a step, the mean."""
    tflop: float
    tflop_quoted: float
    """By the other convention of benchmarks/flops.py."""
    ms_forward_backward: float
    ms_optimizer: float
    mfu: float
    """tflop over what the matmul rate would do in the time of forward and backward."""
    optimizer_share: float
    """The least traffic of an optimizer step over what the copy rate would move in its time."""
    gib_forward_backward: float | None
    """Peak of forward and backward above float32 weights, gradients and moments."""
    gib_optimizer: float | None
    """The same of an optimizer step."""
    gib_at_rest: float | None
    """The same between steps: rounded weights and gradients, the target's tables, features and batches."""
    memory_constant: bool | None
    """Allocated and reserved bytes were the same after every timed step."""
    compiles_after_warmup: int
    """By torch.compile, as the gate counts them."""
    jitted_after_warmup: tuple[str, ...]
    """Triton kernels that were compiled or loaded after the warm-up, which the gate does not see."""
    warm_up_seconds: float
    all_ms: tuple[float, ...]
    """Forward and backward of each timed step."""


def run_config(case: Case, device: torch.device, recorded: bool = True) -> RunConfig:
    """Return the configuration of a run with such steps; its target and prompts are never read."""
    nothing, place = PromptSource(source="none", count=1), str(device)
    limits = {"max_prompt_tokens": 1, "max_answer_tokens": 1, "buckets": (case.context_len,)}
    rows = {"batch_size": case.sequences, "micro_batch": case.sequences, "num_anchors": case.num_anchors}
    shape = {"num_layers": case.num_layers, "block_size": case.block_size, "num_taps": NUM_TAPS}
    return RunConfig.model_validate(
        {
            "name": "bench",
            "target": {"source": "none"},
            "data": {"train": (nothing,), "out_of_domain": nothing, **limits},
            "drafter": {**shape, "mask_token_id": case.drafter().mask_token_id},
            "train": {"steps": UNTIMED + TIMED, "precision": case.precision, **rows},
            "topology": {"targets": (place,), "drafters": (place,)},
            "compile": {"cuda_graphs": recorded},
        }
    )


def make_replica(case: Case, device: torch.device, gate: CompileGate, recorded: bool = True) -> Replica:
    """Return a replica with torch's random initial weights and a random head, all of it made on `device`."""
    config, drafter = run_config(case, device, recorded), case.drafter()
    shape, dtype = (drafter.vocab_size, drafter.hidden_size), DTYPES[case.precision]
    head = torch.randn(shape, device=device, dtype=dtype).mul_(0.02)
    embedding = head if case.target == "smollm2" else torch.randn(shape, device=device, dtype=dtype).mul_(0.02)
    with device:
        start = DFlashDraftModel(drafter)
        return Replica("bench", config, drafter, start, Borrowed(embedding, head), device, gate)


def make_batches(case: Case, replica: Replica, count: int) -> list[MicroBatch]:
    """Return `count` micro-batches of the same random tokens with anchors of their own, on the replica's device."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, replica.drafter.mask_token_id, (case.sequences, case.context_len))
    mask = [False] + [True] * (case.context_len - 1)
    samples = [Sample(id=f"random-{i}", input_ids=ids, loss_mask=mask) for i, ids in enumerate(tokens.tolist())]
    collator = Collator(replica.config, replica.drafter, samples)
    chosen = tuple(range(case.sequences))
    return [collator.collate(epoch, case.context_len, chosen).to(replica.device) for epoch in range(count)]


class Bench:
    """A replica behind its gate, with batches to step through."""

    def __init__(self, case: Case, device: torch.device, *, recorded: bool = True) -> None:
        self.case, self.device = case, device
        self.gate = CompileGate(workers=1, backend="inductor" if device.type == "cuda" else "aot_eager")
        self.replica = make_replica(case, device, self.gate, recorded)
        self.batches = make_batches(case, self.replica, UNTIMED + TIMED)
        shape = (case.sequences, case.context_len, self.replica.drafter.feature_size)
        self.features = torch.randn(shape, device=device, dtype=self.replica.dtype)
        self.sums = torch.zeros(4, device=device)
        self.warm_up_seconds, self._warm_up_peak = 0.0, 0
        _forget_unused()

    def warm_up(self) -> None:
        """Compile and record. In replays nothing is allocated, so their memory is seen here."""
        begin = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.gate.warm_up(self.replica.warm_up)
        self._warm_up_peak = torch.cuda.max_memory_allocated() - self._optimizer_bytes()
        self.warm_up_seconds = time.perf_counter() - begin

    def forward_backward(self, batch: MicroBatch) -> None:
        with self.gate.step():
            self.sums = self.replica.forward_backward(batch, self.features)

    def optimizer_step(self) -> None:
        self.replica.optimizer.step(1e-4, self.sums[1])

    def measure(self, peaks: Peaks, jitted: list[str]) -> Row:
        """Return the row of TIMED steps. `jitted` grows with every Triton kernel that is compiled meanwhile."""
        for batch in self.batches[:UNTIMED]:
            self.forward_backward(batch)
            self.optimizer_step()
        held, watch = self._optimizer_bytes(), Stopwatch(self.device)
        memory, high = list[tuple[int, int]](), list[tuple[int, int]]()
        watch.mark()
        for batch in self.batches[UNTIMED:]:
            peaked = []
            for work in (lambda batch=batch: self.forward_backward(batch), self.optimizer_step):
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                work()
                watch.mark()
                peaked.append(torch.cuda.max_memory_allocated() - held)  # the host's account: needs no waiting
            high.append((peaked[0], peaked[1]))
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))  # 0 without a GPU
        times = watch.seconds()
        body, update = times[::2], times[1::2]
        case, cuda, batches = self.case, self.device.type == "cuda", self.batches[UNTIMED:]
        rows = round(statistics.mean(len(batch.rows.index_R) for batch in batches))
        flops = step_flops(
            self.replica.drafter,
            sequences=case.sequences,
            context_len=case.context_len,
            num_anchors=case.num_anchors,
            num_rows=rows,
            pairs=statistics.mean(allowed_pairs(batch.anchors_bN, case.block_size) for batch in batches),
        )
        parameters = sum(p.numel() for p in self.replica.optimizer.masters)
        traffic = optimizer_bytes(parameters, rounded_copy=case.precision != "fp32")
        forward_seconds, update_seconds = statistics.median(body), statistics.median(update)
        return Row(
            case=case,
            rows=rows,
            tflop=flops.total / 1e12,
            tflop_quoted=flops.quoted / 1e12,
            ms_forward_backward=forward_seconds * 1e3,
            ms_optimizer=update_seconds * 1e3,
            mfu=flops.total / forward_seconds / peaks.matmul_flops,
            optimizer_share=traffic / update_seconds / peaks.copy_bytes,
            gib_forward_backward=max(self._warm_up_peak, *(h[0] for h in high)) / 2**30 if cuda else None,
            gib_optimizer=max(h[1] for h in high) / 2**30 if cuda else None,
            gib_at_rest=(memory[0][0] - held) / 2**30 if cuda else None,
            memory_constant=len(set(memory)) == 1 if cuda else None,
            compiles_after_warmup=self.gate.report()["compiles_after_warmup"],
            jitted_after_warmup=tuple(jitted),
            warm_up_seconds=self.warm_up_seconds,
            all_ms=tuple(round(seconds * 1e3, 3) for seconds in body),
        )

    def profile(self) -> str:
        """Return the GPU time of a forward and backward by group and by kernel."""

        with torch.profiler.profile() as recorded:
            for batch in self.batches[:PROFILED]:
                self.forward_backward(batch)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
            recorded.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        return kernel_table(events, steps=PROFILED)

    def _optimizer_bytes(self) -> int:
        """Return the bytes of float32 weights, gradients and moments."""
        optimizer = self.replica.optimizer
        held = [*optimizer.masters, *optimizer.gradients, *optimizer.tensors()["optimizer"].values()]
        return sum(t.nbytes for t in held)


@contextmanager
def jitted_kernels() -> Iterator[list[str]]:
    """Give a list that gets the name of every Triton kernel that is compiled, or loaded from disk, in the block."""
    names = list[str]()
    if find_spec("triton") is None:  # no GPU build of torch, no kernels
        yield names
        return
    from triton import knobs  # type: ignore[import-untyped]

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **about: names.append(about["fn"].name)
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def run_case(case: Case, device: torch.device, peaks: Peaks, *, profile: bool = False) -> tuple[Row, str]:
    """Return a case's row and, when asked for, its kernels. Raises CompileMiss when a step would compile."""
    bench = Bench(case, device, recorded=not profile)  # kernels of a graph carry no names of what launched them
    gate = bench.gate
    try:
        with gate.worker(case.name):
            bench.warm_up()
            with jitted_kernels() as names:
                row = bench.measure(peaks, names)
            return row, bench.profile() if profile else ""
    finally:
        gate.close()
        del bench
        torch._dynamo.reset()  # compiled code holds the model, and the next one needs the room
        _forget_unused()


def _forget_unused() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def faults(row: Row) -> list[str]:
    """Return a line for everything after the warm-up that a run would refuse."""
    found = []
    if row.compiles_after_warmup:
        found.append(f"{row.case.name}: {row.compiles_after_warmup} compiles after the warm-up")
    if names := row.jitted_after_warmup:
        found.append(f"{row.case.name}: {len(names)} Triton kernels after the warm-up: {', '.join(sorted(set(names)))}")
    if row.memory_constant is False:
        found.append(f"{row.case.name}: memory was not the same after each of the {TIMED} timed steps")
    return found


def cells(row: Row) -> dict[str, str]:
    """Return a row's cells under their headings."""
    case = row.case
    return {
        "case": case.name,
        "seqs": str(case.sequences),
        "S": str(case.context_len),
        "N": str(case.num_anchors),
        "B": str(case.block_size),
        "rows": str(row.rows),
        "TFLOP": f"{row.tflop:.3g}",
        "ms f+b": f"{row.ms_forward_backward:.1f}",
        "MFU": f"{row.mfu:.1%}",
        "GiB f+b": "-" if row.gib_forward_backward is None else f"{row.gib_forward_backward:.2f}",
        "ms opt": f"{row.ms_optimizer:.1f}",
        "of copy": f"{row.optimizer_share:.1%}",
        "GiB opt": "-" if row.gib_optimizer is None else f"{row.gib_optimizer:.2f}",
        "memory": {True: "constant", False: "CHANGED", None: "-"}[row.memory_constant],
        "compiles": str(row.compiles_after_warmup + len(row.jitted_after_warmup)),
    }


def table_line(values: Iterable[str]) -> str:
    """Return one line of the table: the name to the left, all else to the right."""
    first, *rest = values
    return f"{first:18} {' '.join(f'{value:>8}' for value in rest)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file, after each case")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sizes", choices=("reference", "all", "small"), default="", help="default: all there are")
    parser.add_argument("--case", action="append", default=[], help="only this case; may be repeated")
    parser.add_argument("--profile", action="store_true", help="only the first case, with its kernels (CUDA)")
    options = parser.parse_args(arguments)
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise DFlashError("torch sees no GPU here", where="--device", fix="Leave the option out.")
        device = torch.device("cuda:0" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
        cases = chosen_cases(device, options.sizes, options.case)
        if options.profile and device.type != "cuda":
            raise DFlashError("the CPU has no kernels to show", where="--profile", fix="Use --device cuda.")
        check_record(options.json)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    words = sys.argv[1:] if arguments is None else arguments
    return run(cases[:1] if options.profile else cases, device, shlex.join(words), options.json, options.profile)


def run(cases: Sequence[Case], device: torch.device, words: str, record: Path | None, profile: bool) -> int:
    """Run the cases, print the table as it grows, write the record, and return the exit code."""
    about, peaks = header(f"python -m benchmarks.step {words}", device), measure_peaks(device)
    _forget_unused()
    rates = f"{peaks.matmul} {peaks.matmul_flops / 1e12:.4g} TFLOP/s, copy {peaks.copy_bytes / 1e9:.4g} GB/s"
    print(f"{about['device']}, torch {torch.__version__}: {rates}", flush=True)
    rows, found = list[Row](), list[str]()
    for case in cases:
        try:
            row, kernels = run_case(case, device, peaks, profile=profile)
        except (CompileMiss, torch.OutOfMemoryError) as error:
            found.append(f"{case.name}: {str(error).splitlines()[0]}")
        else:
            head, line = ([] if rows else [table_line(cells(row))]), table_line(cells(row).values())
            print(*head, line, *filter(None, [kernels]), sep="\n", flush=True)
            rows.append(row)
            found += faults(row)
        if record:
            result = {
                **about,
                "peaks": asdict(peaks),
                "rows": [asdict(row) for row in rows],
                "faults": found,
            }
            record.write_text(json.dumps(result, indent=2) + "\n")
    for fault in found:
        print(fault, file=sys.stderr)
    return 4 if found else 0


if __name__ == "__main__":
    sys.exit(main())
