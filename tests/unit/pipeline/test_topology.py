"""Threads that work together: sums, order, and an end for everyone when one fails."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash.compile import CompileGate, GateAborted
from dflash.taps import extract_features
from pipeline.batches import Collator, MicroBatch
from pipeline.config import TrainConfig
from pipeline.data import FeatureShards, ShardWriter
from pipeline.optim import MasterAdamW
from pipeline.target_forward import TargetForward, target_features
from pipeline.topology import CachedFeatures, FeatureBuffers, GradientExchange, OnlineFeatures, Rendezvous, waits
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config, tiny_drafter

DEADLINE_SECONDS = 20
CPU = torch.device("cpu")


def _in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run the functions side by side and return what each returned, or the exception that ended it. None may hang."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE_SECONDS
    for thread in threads:
        thread.join(timeout=max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def _replicas(gradients: list[list[Tensor]]) -> list[Any]:
    """Return stand-ins with what the exchange uses of a replica: its device and its gradients."""
    return [SimpleNamespace(device=CPU, optimizer=SimpleNamespace(gradients=g)) for g in gradients]


def _made_up_gradients(num_replicas: int) -> list[list[Tensor]]:
    """Return numbers of such different size that adding them in another order gives another float."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator)
            for shape in [(7, 5), (3,), (64, 9), (1,), (2, 2)]
        ]
        for _ in range(num_replicas)
    ]


@pytest.mark.parametrize("num", [1, 2, 3])
def test_gradients_and_sums_are_added_up_on_every_replica_in_a_fixed_order(num: int) -> None:
    original = _made_up_gradients(num)
    sums = [torch.tensor([size, float(i)]) for i, size in enumerate((1e8, 1.0, -1e8)[:num])]
    moments = random.Random(1)
    for _ in range(10):
        replicas = _replicas([[g.clone() for g in one] for one in original])
        exchange = GradientExchange(replicas)

        waits = [moments.uniform(0, 0.01) for _ in range(num)]

        def work(index: int, exchange: GradientExchange = exchange, waits: list[float] = waits) -> Tensor:
            time.sleep(waits[index])
            return exchange.total(index, sums[index])

        totals = _in_threads(*[partial(work, i) for i in range(num)])
        for replica in replicas:
            for place, gradient in enumerate(replica.optimizer.gradients):
                expected = original[0][place].clone()
                for other in original[1:]:
                    expected += other[place]
                assert torch.equal(gradient, expected)  # bit for bit, whoever came first
        assert all(torch.equal(total, torch.stack(sums).sum(0)) for total in totals)


def test_the_made_up_gradients_tell_one_order_from_another() -> None:
    a, b, c = (one[2] for one in _made_up_gradients(3))
    assert not torch.equal((a + b) + c, (c + b) + a)


def test_the_exchange_works_step_after_step() -> None:
    gradients = [[torch.zeros(4)] for _ in range(2)]
    exchange = GradientExchange(_replicas(gradients))

    def work(index: int) -> list[float]:
        seen = []
        for step in range(50):
            gradients[index][0].fill_(float(step * (index + 1)))
            total = exchange.total(index, torch.tensor([1.0, float(step)]))
            seen += [gradients[index][0][0].item(), total[1].item()]
            exchange.rendezvous.wait()  # as after the optimizer's step
        return seen

    expected = [value for step in range(50) for value in (3.0 * step, 2.0 * step)]
    assert _in_threads(lambda: work(0), lambda: work(1)) == [expected, expected]
    assert sum(exchange.rendezvous.seconds_waited.values()) > 0


class Noted(MasterAdamW):
    """Notes which worker's thread zeroed the gradients of a step that is over."""

    zeroed_by: list[str]
    looks_first = True
    """False: the first look finds them as they are, as if `total` did not look before it waits."""

    @property
    def gradients(self) -> list[Tensor]:
        if self.overwriting and not self.looks_first:
            self.looks_first = True
            return []
        if self.overwriting:
            self.zeroed_by.append(threading.current_thread().name)
        return super().gradients


def _optimizers(dtype: torch.dtype) -> tuple[list[nn.Module], list[Any]]:
    """Return two equal models and their optimizers after a step; in each gradient is a 5 that no longer counts."""
    models: list[nn.Module] = [nn.Linear(3, 2).to(dtype) for _ in range(2)]
    optimizers = [Noted(model, TrainConfig(steps=10)) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        _give(model, optimizer, 5.0)
        optimizer.step(1e-3, torch.tensor(1.0))
        optimizer.zeroed_by = []
    return models, optimizers


def _give(model: nn.Module, optimizer: MasterAdamW, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.collect()


def _exchange(optimizers: list[Any]) -> None:
    """Let two workers, named by their index, exchange; the second is late after each wait."""
    exchange = GradientExchange([SimpleNamespace(device=CPU, optimizer=o) for o in optimizers])  # type: ignore[misc]
    wait = exchange.rendezvous.wait

    def late() -> None:
        wait()
        time.sleep(0.2 * (threading.current_thread().name == "1"))

    exchange.rendezvous.wait = late  # type: ignore[method-assign]

    def work(index: int) -> None:
        threading.current_thread().name = str(index)
        exchange.total(index, torch.zeros(2))

    assert _in_threads(partial(work, 0), partial(work, 1)) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_without_a_micro_batch_adds_zeros_and_not_its_last_gradient(dtype: torch.dtype) -> None:
    """An epoch's last step may have fewer micro-batches than there are workers."""
    models, optimizers = _optimizers(dtype)
    _give(models[0], optimizers[0], 2.0)
    _exchange(optimizers)
    for optimizer in optimizers:
        assert [set(gradient.flatten().tolist()) for gradient in optimizer.gradients] == [{2.0}, {2.0}]


def test_a_worker_zeroes_its_own_spent_gradients_before_another_can_read_them() -> None:
    """Left to whoever reads first, two threads find them spent, and the second zeroes what the first has added."""
    models, optimizers = _optimizers(torch.bfloat16)
    _give(models[0], optimizers[0], 2.0)
    _exchange(optimizers)
    assert [optimizer.zeroed_by for optimizer in optimizers] == [[], ["1"]]

    models, optimizers = _optimizers(torch.bfloat16)
    _give(models[0], optimizers[0], 2.0)
    optimizers[1].looks_first = False
    _exchange(optimizers)
    assert optimizers[1].zeroed_by == ["0"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_worker_that_fails_ends_the_others_with_a_message(failing: int) -> None:
    exchange = GradientExchange(_replicas(_made_up_gradients(3)))

    def work(index: int) -> None:
        try:
            for step in range(5):
                if index == failing and step == 2:
                    raise ValueError("out of memory")
                exchange.total(index, torch.zeros(2))
                exchange.rendezvous.wait()
        except ValueError:
            exchange.rendezvous.abort()
            raise

    results = _in_threads(*[partial(work, i) for i in range(3)])
    for index, result in enumerate(results):
        assert isinstance(result, ValueError if index == failing else GateAborted)
        assert str(result) == ("out of memory" if index == failing else "another worker failed")


def test_without_the_abort_the_others_would_wait_for_ever() -> None:
    rendezvous = Rendezvous(2)
    thread = threading.Thread(target=lambda: _swallow(rendezvous.wait), daemon=True)
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive()
    rendezvous.abort()
    thread.join(timeout=DEADLINE_SECONDS)
    assert not thread.is_alive()


def _swallow(function: Callable[[], Any]) -> None:
    with pytest.raises(GateAborted):
        function()


def _micro_batches(num: int, size: int = 2, bucket: int = 32) -> list[MicroBatch]:
    config = tiny_config(train={"batch_size": size, "micro_batch": size})
    collator = Collator(config, tiny_drafter(), made_up_samples(20))
    return [collator.collate(0, bucket, (2 * i, 2 * i + 1)) for i in range(num)]


def test_cached_features_are_padded_with_zeros_to_the_bucket_and_the_micro_batch(tmp_path: Path) -> None:
    samples = made_up_samples(5)
    writer = ShardWriter(tmp_path, 2)
    made = [torch.randn(len(s.input_ids), 6) for s in samples]
    for features in made:
        writer.add(features)
    writer.flush()
    source = CachedFeatures(FeatureShards(tmp_path, {"places": writer.places}), 6)
    config = tiny_config(train={"batch_size": 3, "micro_batch": 3})
    batch = Collator(config, tiny_drafter(), samples).collate(0, 32, (4, 1))
    out = source(batch, 3, CPU, torch.float32)
    assert out.shape == (3, 32, 6)
    for row, index in enumerate((4, 1)):
        length = len(samples[index].input_ids)
        assert torch.equal(out[row, :length], made[index])
        assert (out[row, length:] == 0).all()
    assert (out[2] == 0).all()
    assert torch.equal(source(batch, 3, CPU, torch.bfloat16), out.to(torch.bfloat16))


LAYERS = (1, 3)


def _online(num_workers: int, depth: int = 2, target: Any = None) -> OnlineFeatures:
    gate = CompileGate(workers=num_workers, backend="aot_eager")
    forward = TargetForward(target or tiny_model(), LAYERS, final_state=False, packed=False)
    return OnlineFeatures([forward], gate, num_workers, depth=depth)


def test_online_features_are_those_of_the_target_in_the_order_of_use() -> None:
    target, batches = tiny_model(), _micro_batches(7)
    online = _online(2, target=target)

    def drafter(worker: int) -> list[Tensor]:
        taken = [online.take(worker, CPU, torch.float32) for _ in batches[worker::2]]
        assert [got.indices for got, _ in taken] == [batch.indices for batch in batches[worker::2]]
        return [features for _, features in taken]

    first, second, ended = _in_threads(lambda: drafter(0), lambda: drafter(1), lambda: online.work(0, batches))
    assert ended is None
    for worker, got in enumerate((first, second)):
        expected = [extract_features(target, b.tokens_bS, LAYERS) for b in batches[worker::2]]
        assert len(got) == len(expected) > 0
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert min(online.seconds_drafters_waited) > 0


def test_the_target_runs_only_as_far_ahead_as_the_queue_is_deep() -> None:
    taken = []

    def stream() -> Iterator[MicroBatch]:
        for number, batch in enumerate(_micro_batches(8)):
            taken.append(number)
            yield batch

    online = _online(1, depth=2)

    def stop_later() -> None:
        end = time.monotonic() + DEADLINE_SECONDS / 2
        while len(taken) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # time enough to run further ahead
        online.stopping.set()

    _in_threads(lambda: online.work(0, stream()), stop_later)
    assert taken == [0, 1, 2]  # two in the queue, one that waits for room


def test_a_target_that_waits_for_room_stops_when_asked_and_that_is_no_failure() -> None:
    online = _online(1, depth=1)

    def stop_later() -> None:
        time.sleep(0.5)
        online.stopping.set()

    ended, _ = _in_threads(lambda: online.work(0, _micro_batches(5)), stop_later)
    assert ended is None


def test_a_drafter_that_waits_for_features_ends_when_the_target_is_gone() -> None:
    online = _online(1)

    def stop_later() -> None:
        time.sleep(0.5)
        online.stopping.set()

    ended, _ = _in_threads(lambda: online.take(0, CPU, torch.float32), stop_later)
    assert isinstance(ended, GateAborted)
    assert str(ended) == "the run is stopping"


def test_features_stay_as_they_are_until_the_worker_asks_for_the_next_and_come_in_the_same_tensors() -> None:
    online, batches = _online(1, depth=1), _micro_batches(8)
    thread = threading.Thread(target=online.work, args=(0, batches), daemon=True)
    thread.start()
    places = set()
    for batch in batches:
        _, features = online.take(0, CPU, torch.float32)
        time.sleep(0.05)  # the target goes as far ahead as it may
        assert torch.equal(features, target_features(online._forwards[0].target, batch, LAYERS, False))
        places.add(features.data_ptr())
    thread.join(DEADLINE_SECONDS)
    assert len(places) <= 3  # lent, waiting, being made


def test_more_features_than_there_are_places_for_are_an_error_and_not_more_memory() -> None:
    buffers = FeatureBuffers(2)
    first = buffers.fill(torch.ones(3))
    buffers.fill(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"all 2 feature buffers of \[3\] are in use"):
        buffers.fill(torch.ones(3))
    buffers.give_back(first)
    assert buffers.fill(torch.zeros(3)) is first and not first.any()
    assert buffers.fill(torch.ones(4)).shape == (4,)


def test_waits_are_told_by_thread_and_reason_and_in_the_clocks_seconds() -> None:
    """A clock that stands still, as during an evaluation, makes a wait of no time."""
    ticks = itertools.count()
    replicas = [SimpleNamespace(device=CPU, name=f"drafter-{i}") for i in range(2)]
    for clock, each in ((lambda: 7.0, 0.0), (lambda: float(next(ticks)), None)):
        exchange = GradientExchange(replicas, clock)  # type: ignore[arg-type]

        def wait(index: int, exchange: GradientExchange = exchange) -> None:
            threading.current_thread().name = f"drafter-{index}"
            exchange.rendezvous.wait()

        assert _in_threads(partial(wait, 0), partial(wait, 1)) == [None, None]
        found = waits(exchange, None)
        assert list(found) == ["drafter-0", "drafter-1"]
        assert all(
            reasons == {"others": each} or (each is None and reasons["others"] > 0) for reasons in found.values()
        )
    online = _online(2)
    online.seconds_drafters_waited, online.seconds_targets_waited = [1.0, 2.0], [4.0]
    assert [found["features"] for name, found in waits(exchange, online).items() if name != "target-0"] == [1.0, 2.0]
    assert waits(exchange, online)["target-0"] == {"room": 4.0}
