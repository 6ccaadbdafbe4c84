"""A shape that nobody declared, met in the middle of training (design.md section 5)."""

from __future__ import annotations

import json

import pytest

from pipeline import train as train_module
from pipeline.batches import BatchPlan, Collator, MicroBatch
from pipeline.errors import VerificationFailed
from pipeline.metrics import read
from tests.tiny_run import TinyRun


@pytest.fixture
def one_other_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second micro-batch of step 3 longer than any bucket; drafter-1 takes it."""
    third = BatchPlan([1] * 20, (64,), batch_size=8, seed=0).step(2)  # as tests/tiny_run.py sets it

    class Longer(Collator):
        def collate(self, epoch: int, bucket: int, indices: tuple[int, ...]) -> MicroBatch:
            chosen = (epoch, indices) == (third.epoch, third.indices[2:4])
            return super().collate(epoch, 96 if chosen else bucket, indices)

    monkeypatch.setattr(train_module, "Collator", Longer)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("features", ["cached", "online"])
def test_an_undeclared_shape_ends_the_run_and_names_drafter_and_shape(
    bench: TinyRun, one_other_bucket: None, features: str
) -> None:
    online = f"data.features={features}"
    with pytest.raises(VerificationFailed) as caught:
        bench.go(online, stages=("cache", "train"))
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message.startswith("step 3: drafter-1 would compile after the warm-up for float32[2, 96, 128] on cpu, ")
    assert message.endswith("Declare the shape, or set compile.on_miss: park.")
    run = bench.run(online)
    assert [record["step"] for record in read(run.metrics_path)] == [1, 2]
    assert not run.manifest_path("train").exists()


@pytest.mark.timeout(120)
def test_with_park_the_run_goes_on_and_the_gate_counts_what_was_compiled(
    bench: TinyRun, one_other_bucket: None, capsys: pytest.CaptureFixture[str]
) -> None:
    park = "compile.on_miss=park"
    run = bench.go(park, stages=("cache", "train"))
    manifest = json.loads(run.manifest_path("train").read_text())
    assert manifest["steps"] == 12
    assert (manifest["misses"], manifest["compiles_after_warmup"], manifest["eager_bodies"]) == (1, 2, 0)
    assert manifest["replicas_equal"] is True
    counted = [record["compiles_after_warmup"] for record in read(run.metrics_path)]
    assert counted == [0, 0] + [2] * 10  # one graph forward, one backward
    with pytest.raises(VerificationFailed, match="failed: compiles after warm-up"):
        bench.go(park, stages=("verify",))
    gates = {gate["name"]: gate for gate in json.loads(run.verify_path.read_text())["gates"]}
    assert (gates["compiles after warm-up"]["verdict"], gates["compiles after warm-up"]["value"]) == ("fail", 2)
    assert gates["eager bodies"]["verdict"] == "pass"
