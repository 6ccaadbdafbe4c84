"""Several targets and drafters: whoever makes features, each drafter gets its own in order, and nobody hangs."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.compile import CompileGate
from pipeline.batches import Collator, MicroBatch
from pipeline.target_forward import TargetForward, target_features
from pipeline.topology import FeatureBuffers, OnlineFeatures, Rendezvous, out_of_reach, waits
from pipeline.turns import AHEAD, Turns
from tests.gate_tools import run_threads
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config, tiny_drafter

CPU = torch.device("cpu")
LAYERS = (1, 3)
STEPS = 4


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def made(target: Any) -> list[tuple[MicroBatch, Tensor]]:
    """Return micro-batches of a session with the features that one target gives them."""
    config = tiny_config(train={"batch_size": 1, "micro_batch": 1})
    collator = Collator(config, tiny_drafter(), made_up_samples(STEPS * 6))
    batches = [collator.collate(0, 32, (i,)) for i in range(STEPS * 6)]
    return [(batch, target_features(target, batch, LAYERS, False)) for batch in batches]


def _online(
    target: Any, targets: int, drafters: int, *, shapes: Sequence[tuple[int, int]] = (), depth: int | None = None
) -> tuple[OnlineFeatures, CompileGate]:
    gate = CompileGate(workers=targets, backend="aot_eager")
    copies = [copy.deepcopy(target) for _ in range(targets)]
    forwards = [TargetForward(one, LAYERS, final_state=False, packed=False) for one in copies]
    return OnlineFeatures(forwards, gate, drafters, shapes=shapes, depth=depth), gate


def _session(
    online: OnlineFeatures, made: list[tuple[MicroBatch, Tensor]], pieces: int, pauses: random.Random
) -> list[list[tuple[tuple[int, ...], Tensor]]]:
    """Return what each drafter took in STEPS steps of `pieces` micro-batches, at whose ends all drafters meet."""
    T, W = online.turns.targets, online.turns.drafters
    rendezvous, batches = Rendezvous(W), [batch for batch, _ in made[: STEPS * pieces]]
    took: list[list[tuple[tuple[int, ...], Tensor]]] = [[] for _ in range(W)]
    naps = [[pauses.choice((0, 0, 0.004)) for _ in batches] for _ in range(T + W)]

    def drafter(worker: int) -> None:
        for step in range(STEPS):
            for number in range(worker + step * pieces, (step + 1) * pieces, W):
                batch, features = online.take(worker, CPU, torch.float32)
                time.sleep(naps[T + worker][number])  # a target that overwrote what it has lent would do it now
                took[worker].append((batch.indices, features.clone()))
            rendezvous.wait()

    def stream(target: int) -> Iterator[MicroBatch]:
        for number in range(target, len(batches), T):
            time.sleep(naps[target][number])
            yield batches[number]

    def work(index: int) -> None:
        if index < W:
            drafter(index)
        else:
            online.work(index - W, stream(index - W))

    assert run_threads(work, W + T) == [None] * (W + T)
    return took


@pytest.mark.parametrize("turns_a_step", [1, 2])
@pytest.mark.parametrize("drafters", [1, 2, 3])
@pytest.mark.parametrize("targets", [1, 2, 3])
def test_every_drafter_gets_the_same_features_in_the_same_order_whoever_makes_them(
    target: Any, made: list[tuple[MicroBatch, Tensor]], targets: int, drafters: int, turns_a_step: int
) -> None:
    pauses = random.Random(targets * 10 + drafters)
    for depth in (None, 1):
        online, _ = _online(target, targets, drafters, depth=depth)
        took = _session(online, made, drafters * turns_a_step, pauses)
        for worker, found in enumerate(took):
            expected = made[worker : STEPS * drafters * turns_a_step : drafters]
            assert [indices for indices, _ in found] == [batch.indices for batch, _ in expected]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("targets", "drafters", "fed", "met", "depth", "places"),
    [
        (1, 1, 1, 1, 2, 4),
        (1, 3, 3, 1, 2, 10),
        (2, 2, 1, 1, 2, 4),
        (2, 3, 3, 2, 1, 7),
        (5, 3, 3, 5, 1, 7),
        (8, 8, 1, 1, 2, 4),
        (4, 2, 1, 2, 1, 3),
        (4, 6, 3, 2, 1, 7),
        (2, 6, 3, 1, 2, 10),
    ],
)
def test_places_and_what_waits_are_counted_by_those_who_meet(
    targets: int, drafters: int, fed: int, met: int, depth: int, places: int
) -> None:
    """As many wait for a drafter whether one target feeds all or each has its own."""
    turns = Turns(targets=targets, drafters=drafters)
    assert (turns.fed, turns.met, turns.depth, turns.places()) == (fed, met, depth, places)
    assert turns.met * turns.depth >= AHEAD
    for target in range(targets):
        numbers = range(target, 10 * targets * drafters, targets)
        assert {turns.target_of(number) for number in numbers} == {target}
        assert len({turns.drafter_of(number) for number in numbers}) == fed
    for drafter in range(drafters):
        assert len({turns.target_of(turns.number(drafter, k)) for k in range(targets)}) == met
    for drafter in range(drafters):
        assert [turns.number(drafter, k) for k in range(3)] == [drafter, drafter + drafters, drafter + 2 * drafters]


def test_each_target_runs_ahead_as_far_as_its_own_queues_are_deep(
    target: Any, made: list[tuple[MicroBatch, Tensor]]
) -> None:
    online, _ = _online(target, 2, 1)
    begun: list[list[int]] = [[], []]

    def stream(index: int) -> Iterator[MicroBatch]:
        for number in range(index, len(made), 2):
            begun[index].append(number)
            yield made[number][0]

    def work(index: int) -> None:
        if index < 2:
            online.work(index, stream(index))
            return
        for _ in range(200):
            if all(len(numbers) >= 2 for numbers in begun):
                break
            time.sleep(0.02)
        time.sleep(0.2)  # time enough to run further ahead
        online.stopping.set()

    assert run_threads(work, 3) == [None] * 3
    assert begun == [[0, 2], [1, 3]]  # one in the queue, one that waits for room
    assert min(online.seconds_targets_waited) > 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_target_needs_all_of_its_places_and_no_more(
    target: Any, made: list[tuple[MicroBatch, Tensor]], missing: int
) -> None:
    online, _ = _online(target, 2, 1)
    online._buffers = [FeatureBuffers(online.turns.places() - missing) for _ in range(2)]
    taken = threading.Event()

    def work(index: int) -> None:
        if index < 2:
            try:
                online.work(index, [batch for batch, _ in made[index::2]])
            except RuntimeError:
                online.stopping.set()
                raise
            return
        online.take(0, CPU, torch.float32)  # and keeps it
        taken.set()
        online.stopping.wait(1.0)
        online.stopping.set()

    raised = run_threads(work, 3)
    assert taken.is_set()
    assert [str(error) for error in raised if error] == ["all 2 feature buffers of [1, 32, 128] are in use"] * missing


def test_every_target_records_in_the_warm_up_under_a_name_of_its_own(
    target: Any, made: list[tuple[MicroBatch, Tensor]]
) -> None:
    online, gate = _online(target, 2, 1, shapes=[(1, 32)])
    found: list[Tensor] = []

    def work(index: int) -> None:
        if index < 2:
            online.work(index, [batch for batch, _ in made[index:8:2]])
            return
        for _ in range(8):
            found.append(online.take(0, CPU, torch.float32)[1].clone())

    assert run_threads(work, 3) == [None] * 3
    report = gate.report()
    gate.close()
    assert [function["name"] for function in report["functions"]] == ["target-0 layer", "target-1 layer"]
    assert report["compiles"] == 2 and report["compiles_after_warmup"] == 0
    for (batch, expected), features in zip(made, found, strict=False):
        length = len(batch.tokens_bS[0].nonzero())
        torch.testing.assert_close(features[0, :length], expected[0, :length], rtol=0, atol=1e-5)


def test_waits_name_every_target(target: Any) -> None:
    online, _ = _online(target, 2, 1)
    online.seconds_drafters_waited, online.seconds_targets_waited = [1.0], [2.0, 3.0]

    class Exchange:
        def seconds_waited(self) -> dict[str, float]:
            return {"drafter-0": 0.5}

    assert waits(Exchange(), online) == {
        "drafter-0": {"others": 0.5, "features": 1.0},
        "target-0": {"room": 2.0},
        "target-1": {"room": 3.0},
    }


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    near = {("cuda:0", "cuda:2")}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in near)
    targets, drafters = (
        [torch.device(name) for name in names] for names in (("cuda:0", "cuda:1"), ("cuda:2", "cuda:1"))
    )
    assert out_of_reach(targets, drafters) == [("cuda:0", "cuda:1"), ("cuda:1", "cuda:2")]
    assert out_of_reach([CPU, torch.device("cuda:0")], [CPU, torch.device("cuda:0")]) == []
