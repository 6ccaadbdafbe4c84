"""Three drafter threads and one drafter with three times the micro-batch are the same training."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dflash.compile import CompileGate
from pipeline.batches import Collator, plan_of
from pipeline.config import RunConfig
from pipeline.replica import Borrowed, Replica
from pipeline.target_forward import target_features
from pipeline.topology import GradientExchange
from tests.drafters import random_drafter
from tests.gate_tools import run_threads
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config

CPU = torch.device("cpu")
ROUNDING = 32 * torch.finfo(torch.float32).eps
"""Of a gradient's largest value: the same float32 terms, added up in threes or all at once."""


def _config(threads: int) -> RunConfig:
    rows = {"batch_size": 6, "micro_batch": 6 // threads, "num_anchors": 5}
    return tiny_config(train=rows, data={"features": "online"}, topology={"drafters": ["cpu"] * threads})


def _trained(threads: int, steps: int) -> tuple[list[list[Tensor]], list[Tensor], list[Replica]]:
    """Return each step's averaged gradient and loss sums, and the replicas after it; each step has six rows."""
    torch.set_num_threads(1)
    config, target, start = _config(threads), tiny_model(), random_drafter()
    gate = CompileGate(workers=threads, backend="aot_eager")
    borrowed = Borrowed.of(target, CPU, torch.float32)
    replicas = [Replica(f"drafter-{i}", config, start.config, start, borrowed, CPU, gate) for i in range(threads)]
    exchange, samples = GradientExchange(replicas), made_up_samples(18)
    plan, collator = plan_of(config, samples), Collator(config, start.config, samples)
    taps, reading = start.config.target_layer_ids, threading.Lock()  # one thread at a time may tap a target
    gradients: list[list[Tensor]] = []
    totals: list[Tensor] = []

    def work(index: int) -> None:
        replica = replicas[index]
        with gate.worker(replica.name):
            gate.warm_up(replica.warm_up)
            for number in range(steps):
                step = plan.step(number)
                size = config.train.micro_batch
                micro = collator.collate(step.epoch, step.bucket, step.indices[index * size : (index + 1) * size])
                with reading:
                    features = target_features(target, micro, taps, False)
                with gate.step():
                    sums = replica.forward_backward(micro, features)
                total = exchange.total(index, sums)
                if index == 0:
                    gradients.append([gradient / total[1] for gradient in replica.optimizer.gradients])
                    totals.append(total)
                exchange.rendezvous.wait()
                replica.optimizer.step(1e-3, total[1])
                exchange.rendezvous.wait()

    raised = run_threads(work, threads)
    gate.close()
    assert raised == [None] * threads
    return gradients, totals, replicas


def test_three_threads_average_the_gradient_of_one_with_three_times_the_micro_batch() -> None:
    """Within rounding, step after step; and the threads' weights stay equal bit for bit."""
    three, sums_three, replicas = _trained(3, steps=3)
    one, sums_one, (whole,) = _trained(1, steps=3)
    for a, b in zip(sums_three, sums_one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert b[3] > 20, "hardly a block was supervised"
    for name, a, b in zip(whole.optimizer.names, three[0], one[0], strict=True):
        assert b.abs().max() > 0, name
        assert (a - b).abs().max() <= ROUNDING * b.abs().max(), name
    for first, *others in zip(*(replica.optimizer.masters for replica in replicas), strict=True):
        assert all(torch.equal(first, other) for other in others)
    for name, a, b in zip(whole.optimizer.names, replicas[0].optimizer.masters, whole.optimizer.masters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_one_threads_rows_alone_have_another_gradient() -> None:
    """Else the comparison above would say nothing of the exchange."""
    (one, *_), _, _ = _trained(1, steps=1)
    (three, *_), _, replicas = _trained(3, steps=1)
    assert len(replicas) == 3
    alone = _of_rows_alone()
    assert any((a - b).abs().max() > 0.05 * b.abs().max() for a, b in zip(alone, one, strict=True))
    assert all((a - b).abs().max() <= ROUNDING * b.abs().max() for a, b in zip(three, one, strict=True))


def _of_rows_alone() -> list[Tensor]:
    """Return the averaged gradient of the first thread's two rows."""
    config, target, start = _config(3), tiny_model(), random_drafter()
    gate = CompileGate(workers=1, backend="aot_eager")
    replica = Replica("alone", config, start.config, start, Borrowed.of(target, CPU, torch.float32), CPU, gate)
    samples = made_up_samples(18)
    step = plan_of(config, samples).step(0)
    micro = Collator(config, start.config, samples).collate(step.epoch, step.bucket, step.indices[:2])
    features = target_features(target, micro, start.config.target_layer_ids, False)
    found: list[Tensor] = []

    def run() -> None:
        sums = replica.forward_backward(micro, features)
        found.extend(gradient / sums[1] for gradient in replica.optimizer.gradients)

    with gate.worker("alone"):
        gate.warm_up(run)
    gate.close()
    return found
