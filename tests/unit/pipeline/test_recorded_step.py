"""Steps on tensors that never move. On a CPU nothing is recorded: the same inputs and the same gradients are used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.compile import CompileGate
from dflash.compile.gate import GateError
from pipeline import target_forward
from pipeline.batches import Collator, MicroBatch
from pipeline.config import ROW_LEVELS
from pipeline.errors import PipelineError
from pipeline.replica import Borrowed, Replica
from pipeline.target_forward import TargetForward, causal_layer, target_features
from tests.drafters import random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "packed", "final"),
    [("qwen3", False, True), ("qwen3", True, True), ("qwen2", False, False), ("llama", False, True)],
)
def test_the_targets_recorded_forward_gives_the_same_features(kind: str, packed: bool, final: bool) -> None:
    """It stands before the tests with the fixture: a process has one gate at a time."""
    target: Any = tiny_model(kind)
    data = {"buckets": [64], "samples_per_row": 3 if packed else 1}
    config = tiny_config(data=data, train={"micro_batch": 4, "batch_size": 4})
    drafter, samples = random_drafter().config, made_up_samples(20)
    collator = Collator(config, drafter, samples)
    gate = CompileGate(workers=1, backend="aot_eager")
    forward = TargetForward(target, drafter.target_layer_ids, final_state=final, packed=packed)
    assert forward.why_not_compiled() == ("rows are packed" if packed else None)
    with gate.worker("target"):
        gate.warm_up(lambda: forward.record([(4, 64)], gate).clear())
        for start in (0, 1):
            batch = collator.collate(0, 64, tuple(range(start, start + 4)))
            with gate.step():
                found = forward(batch)
            expected = target_features(target, batch, drafter.target_layer_ids, final)
            for row, held in enumerate(batch.samples):
                length = sum(len(samples[i].input_ids) for i, _ in held)
                torch.testing.assert_close(found[row, :length], expected[row, :length], rtol=0, atol=1e-5)
        short = Collator(tiny_config(data=data), drafter, samples).collate(0, 64, (0, 1))
        with pytest.raises(GateError, match=r"the target has no graph for tokens"), gate.step():
            forward(short)
        assert gate.report()["compiles"] == (0 if packed else 1)  # one graph for all layers
    gate.close()


def test_a_target_whose_compiled_layers_compute_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, layer: Any, rope: Any) -> Tensor:
        return causal_layer(x, layer, rope) + 0.01

    monkeypatch.setattr(target_forward, "causal_layer", wrong)
    gate = CompileGate(workers=1, backend="aot_eager")
    forward = TargetForward(tiny_model(), (0, 2), final_state=False, packed=False)
    with pytest.raises(PipelineError, match=r"features are .* from transformers' own"), gate.worker("target"):
        gate.warm_up(lambda: [*forward.record([(2, 16)], gate)].clear())
    gate.close()


def test_a_target_with_angles_that_depend_on_the_length_is_not_recorded() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    target: Any = tiny_model("llama", rope_parameters=rope)
    gate = CompileGate(workers=1, backend="aot_eager")
    forward = TargetForward(target, (0, 2), final_state=False, packed=False)
    assert "rope_type" in str(forward.why_not_compiled()) and forward.record([(2, 16)], gate) == []


class _Made:
    """A replica of bf16 weights whose configuration says that steps are recorded, and one that runs them plainly."""

    def __init__(self) -> None:
        target: Any = tiny_model()
        settings: Any = {
            "data": {"buckets": [64], "features": "online"},
            "train": {"micro_batch": 4, "batch_size": 8, "num_anchors": 6, "precision": "bf16"},
            "drafter": {"attention": "sdpa"},
        }
        self.config = tiny_config(**settings, topology={"targets": ["cuda:0"], "drafters": ["cuda:0"]})
        assert self.config.recorded and not tiny_config(**settings).recorded
        drafter = random_drafter()
        self.gate = CompileGate(workers=1, backend="aot_eager")
        borrowed = Borrowed.of(target, CPU, torch.bfloat16)
        self.replica = Replica("one", self.config, drafter.config, drafter, borrowed, CPU, self.gate)
        collator = Collator(self.config, drafter.config, made_up_samples(20))
        self.batches = [collator.collate(0, 64, tuple(range(4 * i, 4 * i + 4))) for i in range(4)]
        taps = drafter.config.target_layer_ids
        self.features = [target_features(target, batch, taps, False).bfloat16() for batch in self.batches]

    def gradients(self, run: Any, *numbers: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the sums of some micro-batches of one step, and copies of the gradients after them."""
        sums = [run(self.batches[i], self.features[i]) for i in numbers]
        gradients = [g.clone() for g in self.replica.optimizer.gradients]
        self.replica.optimizer.forget()
        return sums, gradients


@pytest.fixture(scope="module")
def made() -> Any:
    found = _Made()
    with found.gate.worker("one"):
        found.gate.warm_up(found.replica.warm_up)
        with found.gate.step():
            yield found
    found.gate.close()


def test_a_replayed_step_has_the_sums_and_gradients_of_a_plain_one(made: _Made) -> None:
    replica = made.replica
    assert len(replica.recordings) == 2 * ROW_LEVELS
    for numbers in ((0,), (1, 2), (3, 0, 1)):
        sums, gradients = made.gradients(replica.forward_backward, *numbers)
        expected, exact = made.gradients(replica._run, *numbers)
        assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
        assert max(float(g.abs().max()) for g in gradients) > 0
    assert replica.recorded.replays == 6


def test_a_steps_sums_outlive_the_next_replay(made: _Made) -> None:
    """The same graph again: another shape, or a second micro-batch of the step, would be another graph."""
    made.replica.optimizer.forget()
    first = made.replica.forward_backward(made.batches[0], made.features[0])
    kept = first.clone()
    made.replica.optimizer.forget()
    second = made.replica.forward_backward(made.batches[0], made.features[1])
    made.replica.optimizer.forget()
    assert torch.equal(first, kept) and not torch.equal(first, second)


def test_a_shape_that_was_not_recorded_is_an_error(made: _Made) -> None:
    rows = made.batches[0].rows
    odd: MicroBatch = Collator(made.config, made.replica.drafter, made_up_samples(20)).collate(0, 64, (0, 1, 2, 3))
    few: Any = {name: tensor[:4] for name, tensor in rows.tensors().items()}
    odd = replace(odd, rows=replace(rows, **few, chunks=((0, 4, 1),)))
    with pytest.raises(GateError, match=r"no graph for micro-batches of bucket 64 and 4 rows"):
        made.replica.forward_backward(odd, made.features[0])
