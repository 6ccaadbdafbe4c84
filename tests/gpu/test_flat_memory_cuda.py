"""Training on a real GPU holds the same bytes after every step, and no step waits for the GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.compile import CompileGate
from pipeline.batches import Collator, MicroBatch, plan_of
from pipeline.gates import Gate, memory_flat
from pipeline.memory import memory, memory_record
from pipeline.rendering import Sample, make_sample
from pipeline.replica import Borrowed, Replica
from pipeline.target_forward import TargetForward
from pipeline.topology import OnlineFeatures
from tests.drafters import random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import tiny_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
UNTIMED, STEPS, BUCKET = 3, 300, 128
COUNTERS = (
    "allocated_bytes.all.current",
    "requested_bytes.all.current",
    "reserved_bytes.all.current",
    "num_alloc_retries",
)


def samples() -> list[Sample]:
    """Return texts of 9 to 120 tokens, so that supervised rows and padding differ from batch to batch."""
    return [
        make_sample(
            f"text-{i}",
            [10 + (37 * i + t) % 300 for t in range(3 + i % 7)],
            [10 + (41 * i + t) % 300 for t in range(6 + (29 * i) % 106)],
        )
        for i in range(90)
    ]


class Loop:
    """A training loop of one drafter, made of the trainer's own parts: two micro-batches a step."""

    def __init__(self, graphs: bool, workers: int = 1) -> None:
        target: Any = tiny_model().to(CUDA)
        self.config = tiny_config(
            data={"buckets": [BUCKET], "features": "online"},
            train={"micro_batch": 4, "batch_size": 8, "num_anchors": 12, "precision": "bf16"},
            drafter={"attention": "flex"},
            topology={"targets": [str(CUDA)], "drafters": [str(CUDA)]},
            compile={"backend": "inductor", "cuda_graphs": graphs},
        )
        start = random_drafter()
        self.gate = CompileGate(workers=workers)
        borrowed = Borrowed.of(target, CUDA, torch.bfloat16)
        self.replica = Replica("drafter-0", self.config, start.config, start, borrowed, CUDA, self.gate)
        texts = samples()
        self.plan, self.collator = plan_of(self.config, texts), Collator(self.config, start.config, texts)
        self.forward = TargetForward(target, start.config.target_layer_ids, final_state=False, packed=False)
        self.graphs, self.number, self.supervised = graphs, 0, set[int]()
        self.sums = torch.zeros(4 + 4 * start.config.block_size, device=CUDA)

    def micro_batches(self, number: int) -> list[MicroBatch]:
        """Return a step's micro-batches, on the host."""
        batches = self.collator.micro_batches(self.plan.step(number))
        self.supervised.update(int(micro.rows.valid_R.sum()) for micro in batches)
        return batches

    def warm_up(self) -> None:
        self.replica.warm_up()
        if self.graphs:
            self.forward.record([(self.config.train.micro_batch, BUCKET)], self.gate)

    def train(self, given: Iterator[tuple[MicroBatch, Tensor]], inside: Callable[[Tensor], object]) -> None:
        """Do one step; `inside` gets the loss sums in the middle of it."""
        sums = torch.zeros_like(self.sums)
        for micro, features in given:
            with self.gate.step():
                sums += self.replica.forward_backward(micro, features)
        inside(sums)
        self.replica.optimizer.step(1e-3, sums[1])
        self.sums = sums

    def step(self, inside: Callable[[Tensor], object] = lambda sums: None) -> None:
        """Do one step in which waiting for the GPU is an error."""
        batches = self.micro_batches(self.number)
        self.number += 1
        # Unrecorded, transformers' mask asks the GPU whether rows are packed; that is the target's step, not this one.
        ready = [] if self.graphs else [self.forward(micro).bfloat16() for micro in batches]
        torch.cuda.set_sync_debug_mode(
            "error" if self.number > 1 else "default"
        )  # at first libraries set themselves up
        try:
            self.train(self._given(batches, ready), inside)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _given(self, batches: list[MicroBatch], ready: list[Tensor]) -> Iterator[tuple[MicroBatch, Tensor]]:
        while batches:
            micro = batches.pop(0)
            features = ready.pop(0) if ready else self.forward(micro).bfloat16()
            yield micro.to(CUDA), features

    def boundaries(self, steps: int, inside: Callable[[Tensor], object] = lambda sums: None) -> list[tuple[int, ...]]:
        """Return COUNTERS after each of `steps` steps, following UNTIMED others."""
        found = []
        for number in range(UNTIMED + steps):
            self.step(inside)
            stats = torch.cuda.memory_stats(CUDA)
            if number >= UNTIMED:
                found.append(tuple(stats[name] for name in COUNTERS))
        return found


def _judged(records: list[dict[str, int]]) -> Gate:
    metrics = [{"step": number, **record} for number, record in enumerate(records, start=1)]
    return memory_flat(metrics, [{"from_step": 0, "to_step": len(metrics)}])


def test_beside_a_target_that_runs_ahead_the_gate_finds_the_memory_flat_and_a_leak() -> None:
    """What a run with features: online writes to metrics.jsonl, at a step's end, while the target works on.

    It stands before the fixture's tests: a process has one gate at a time.
    """
    loop = Loop(True, workers=2)
    online = OnlineFeatures([loop.forward], loop.gate, 1, shapes=[(loop.config.train.micro_batch, BUCKET)])
    stream = (micro for number in range(10_000) for micro in loop.micro_batches(number))
    thread = threading.Thread(target=online.work, args=(0, stream), daemon=True)
    thread.start()
    kept: list[Tensor] = []

    def given() -> Iterator[tuple[MicroBatch, Tensor]]:
        for _ in range(loop.config.train.batch_size // loop.config.train.micro_batch):
            yield online.take(0, CUDA, torch.bfloat16)

    def records(steps: int, inside: Callable[[Tensor], object]) -> list[dict[str, int]]:
        found = []
        for _ in range(steps):
            loop.train(given(), inside)
            loop.sums.tolist()  # as a step that is logged
            found.append(memory_record([memory({CUDA})]))
        return found

    try:
        with loop.gate.worker("drafter-0"):
            loop.gate.warm_up(loop.replica.warm_up)
            flat = _judged(records(STEPS, lambda sums: None))
            leaking = _judged(records(40, lambda sums: kept.append(sums.clone())))
    finally:
        online.stopping.set()
        thread.join(30)
        loop.gate.close()
    assert not thread.is_alive()
    assert flat.holds, flat
    assert not leaking.holds, leaking


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "no graphs"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    made = Loop(request.param)
    with made.gate.worker("drafter-0"):
        made.gate.warm_up(made.warm_up)
        yield made
    made.gate.close()


def test_300_steps_hold_the_same_bytes_and_none_waits_for_the_gpu(loop: Loop) -> None:
    found = loop.boundaries(STEPS)
    for place, name in enumerate(COUNTERS):
        values = [boundary[place] for boundary in found]
        changed = [number for number, (a, b) in enumerate(pairwise(values)) if a != b]
        assert not changed, f"{name}: {values[0]} to {values[-1]}, first changed in step {changed[0] + 1} of {STEPS}"
    assert loop.sums.isfinite().all()
    assert len(loop.supervised) > 15, "the batches had the same number of supervised slots"
    report = loop.gate.report()
    assert (report["compiles_after_warmup"], report["eager_bodies"]) == (0, 0)


def test_a_step_that_asks_for_a_value_is_caught(loop: Loop) -> None:
    loop.step()
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        loop.step(lambda sums: sums[0].item())
    assert torch.cuda.get_sync_debug_mode() == 0
    loop.step()


def test_a_tensor_that_is_kept_is_caught(loop: Loop) -> None:
    kept: list[Tensor] = []
    found = loop.boundaries(10, lambda sums: kept.append(sums.clone()))
    allocated, requested, _, retries = zip(*found, strict=True)
    assert all(a < b for counter in (allocated, requested) for a, b in pairwise(counter))
    assert set(retries) == {0}
