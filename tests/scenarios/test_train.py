"""The whole pipeline, in order, on a tiny random target: the real stages, two drafter threads, a few steps."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import load_drafter
from pipeline import commands
from pipeline import train as train_module
from pipeline.__main__ import main
from pipeline.batches import Collator, MicroBatch
from pipeline.checkpoints import latest_checkpoint
from pipeline.errors import ConfigError, VerificationFailed
from pipeline.metrics import read
from pipeline.optim import MasterAdamW
from pipeline.replica import Replica, new_drafter
from pipeline.runs import Run
from pipeline.topology import GradientExchange
from tests.tiny_run import TinyRun, logged_losses, saved_weights

GATES = [
    "environment equals lock",
    "compiles after warm-up",
    "eager bodies",
    "replicas equal",
    "memory flat",
    "loss finite and fell",
    "throughput held",
    "export reloads strictly",
    "compiled equals dense",
    "train equals decode",
    "lossless greedy decoding",
    "tau in domain",
    "tau out of domain",
    "chained tau equals decoded",
]
TRAINED = ("cache", "train")
ONE_DRAFTER = "topology.drafters=[cpu]"


def _same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def finished(shared_bench: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, Run]]:
    """A run with all three stages done, and the bench that it belongs to."""
    bench = TinyRun(shared_bench.folder, tmp_path_factory.mktemp("finished") / "runs")
    with pytest.MonkeyPatch.context() as patch:
        bench.use(patch)
        run = bench.go("name=finished")
    yield bench, run


# -- (a) what a run leaves ---------------------------------------------------------------------------------------------


def test_a_finished_run_leaves_every_file_that_the_design_names(finished: tuple[TinyRun, Run]) -> None:
    bench, run = finished
    names = {path.name for path in run.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        "cache.json",
        "checkpoints",
        "config.yaml",
        "drafter",
        "fingerprint.json",
        "metrics.jsonl",
        "report.html",
        "stages.json",
        "train.json",
        "verify.json",
    }
    assert sorted(path.name for path in run.checkpoints_dir.iterdir()) == ["step-000006", "step-000012"]
    assert sorted(path.name for path in run.drafter_dir.iterdir()) == ["config.json", "model.safetensors"]
    assert [record["step"] for record in read(run.metrics_path)] == list(range(1, 13))
    assert (bench.runs / "latest").resolve() == run.folder.resolve()
    states = [entry["state"] for entry in json.loads(run.stages_path.read_text())["stages"]]
    assert set(states) <= {"done", "skipped"}
    leftovers = [path for root in (bench.folder, bench.runs) for path in root.rglob("*.tmp")]
    assert leftovers == []


def test_a_finished_run_passes_every_gate(finished: tuple[TinyRun, Run]) -> None:
    _, run = finished
    report = json.loads(run.verify_path.read_text())
    assert [gate["name"] for gate in report["gates"]] == GATES
    assert [gate["name"] for gate in report["gates"] if gate["verdict"] != "pass"] == []
    assert report["verdict"] == "pass"
    assert all({"name", "value", "limit", "verdict", "detail"} == gate.keys() for gate in report["gates"])
    for found in report["tau"].values():
        assert found["decoded"] >= 1
        assert found["tokens"] > found["calls"] > 0


def test_the_manifests_say_what_was_made_and_counted(finished: tuple[TinyRun, Run]) -> None:
    _, run = finished
    cache, train = (json.loads(run.manifest_path(name).read_text()) for name in ("cache", "train"))
    assert cache["answers"]["num_samples"] == 20
    assert 0 < cache["answers"]["supervised_share"] < 1
    assert Path(cache["features"]["folder"]).is_dir()
    assert (train["steps"], train["steps_per_epoch"]) == (12, 3)
    assert train["workers"] == ["drafter-0 on cpu (sdpa)", "drafter-1 on cpu (sdpa)"]
    assert train["replicas_equal"] is True
    functions = train["sessions"][0]["gate"]["functions"]
    # One graph forward and one backward for each drafter, made in its own thread.
    assert [(f["name"], f["forward_compiles"], f["backward_compiles"]) for f in functions] == [
        ("drafter-0", 1, 1),
        ("drafter-1", 1, 1),
    ]
    assert all(f["threads"] == [f["name"]] for f in functions)


def test_running_it_again_does_nothing_and_changes_no_byte(
    finished: tuple[TinyRun, Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, run = finished
    bench.use(monkeypatch)
    kept = [run.verify_path, run.metrics_path, run.drafter_dir / "model.safetensors"]
    before = [path.read_bytes() for path in kept]
    bench.go("name=finished")
    assert [path.read_bytes() for path in kept] == before
    assert capsys.readouterr().out.count("skipped, finished") == 3


def test_a_tau_under_its_limit_fails_the_run_which_is_verified_again_the_next_time(
    bench: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = (ONE_DRAFTER, "train.steps=3", "verify.min_tau=4.0")
    run = bench.go(*strict, stages=TRAINED)
    with pytest.raises(VerificationFailed, match="tau in domain"):
        bench.go(*strict, stages=("verify",))
    report = json.loads(run.verify_path.read_text())
    assert report["verdict"] == "fail"
    assert "tau in domain" in [gate["name"] for gate in report["gates"] if gate["verdict"] == "fail"]
    capsys.readouterr()
    # Again, by the command line: only the stage that failed runs; one line, exit 4.
    _fast_main(monkeypatch)
    assert main(["train", "--config", str(bench.config_path), *strict]) == 4
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.endswith(": started")] == ["verify: started"]
    assert err.strip().splitlines()[-1].startswith("verify.json: failed: ")


def _fast_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let main() run in this process: compiler caches stay where they are, and no child asks torch for their key."""
    monkeypatch.setattr(commands, "compile_factors", lambda root: {})
    monkeypatch.setattr(commands, "set_cache_variables", lambda config, caches, factors: "")


# -- (i), (k), (l) using a drafter -------------------------------------------------------------------------------------


def test_generate_prints_the_targets_text_and_tokens_per_target_call(
    finished: tuple[TinyRun, Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, run = finished
    bench.use(monkeypatch)
    _fast_main(monkeypatch)
    command = ["generate", "--prompt", "Tell me about 3.", "--max-new-tokens", "9", "--run"]
    assert main([*command, str(run.folder)]) == 0
    *text, counts, histogram, shares = capsys.readouterr().out.strip().split("\n")
    assert "".join(text).strip()
    assert main([*command, "latest"]) == 0
    again = capsys.readouterr().out.strip().split("\n")
    assert (again[:-3], again[-2:]) == (text, [histogram, shares])
    tokens, calls = int(counts.split()[0]), int(counts.split()[3])
    assert f"{(tokens - 1) / calls:.2f} tokens per target call" in counts
    assert histogram.startswith("calls by accepted tokens: ") and histogram.endswith("3.0 slots drafted a call")
    assert shares.startswith("accepted when every earlier slot was, by slot: ")

    # However many slots are drafted, greedy text is the target's; a sampled one follows from its seed.
    for length in ("1", "adaptive"):
        assert main([*command, "latest", "--block-length", length]) == 0
        assert capsys.readouterr().out.strip().split("\n")[:-3] == text
    sampled = []
    for seed in ("1", "1", "2"):
        assert main([*command, "latest", "--temperature", "1.5", "--seed", seed]) == 0
        sampled.append(capsys.readouterr().out.strip().split("\n")[:-3])
    assert sampled[0] == sampled[1] != sampled[2]
    for option, line in (("--block-length=4", "4 slots are more than the 3"), ("--temperature=-1", "-1.0 is not 0 or")):
        assert main([*command, "latest", option]) == 2
        assert line in capsys.readouterr().err


def test_training_goes_on_from_an_exported_drafter(finished: tuple[TinyRun, Run], bench: TinyRun) -> None:
    _, before = finished
    further = f"train.init_from={before.drafter_dir}"
    exported = load_drafter(before.drafter_dir)
    start = new_drafter(bench.config(further), exported.config, torch.zeros(1))
    assert _same_bits(start.state_dict(), exported.state_dict())

    run = bench.go(further, ONE_DRAFTER, "train.steps=2", stages=TRAINED)
    first_epoch, last_epoch = logged_losses(before)[:3], logged_losses(before)[-3:]
    assert logged_losses(run)[0] < sum(first_epoch) / 3
    assert abs(logged_losses(run)[0] - sum(last_epoch) / 3) < abs(logged_losses(run)[0] - first_epoch[0])


def test_an_exported_drafter_of_another_shape_is_refused(
    finished: tuple[TinyRun, Run], bench: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before = finished
    overrides = (f"train.init_from={before.drafter_dir}", "drafter.block_size=5")
    with pytest.raises(ConfigError) as caught:
        bench.go(*overrides, stages=TRAINED)
    assert str(caught.value) == (
        f"train.init_from: {before.drafter_dir}: has block_size 4, this run 5. Change the run's drafter section."
    )


def test_bfloat16_trains_on_the_cpu_and_exports_the_working_weights(bench: TinyRun) -> None:
    run = bench.go("train.precision=bf16", "train.steps=4")
    assert all(math.isfinite(loss) for loss in logged_losses(run))
    exported = dict(load_drafter(run.drafter_dir).named_parameters())
    masters = saved_weights(run)
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert _same_bits({n: p.detach() for n, p in exported.items()}, {n: m.bfloat16() for n, m in masters.items()})
    assert not _same_bits(masters, {n: m.bfloat16().float() for n, m in masters.items()})


# -- (c), (d) the same numbers whoever computes them -------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """Return a list that training's collators write (epoch, samples) to; the warm-up's are others."""
    noted: list[tuple[int, tuple[int, ...]]] = []

    class Noting(Collator):
        def collate(self, epoch: int, bucket: int, indices: tuple[int, ...]) -> MicroBatch:
            noted.append((epoch, indices))
            return super().collate(epoch, bucket, indices)

    monkeypatch.setattr(train_module, "Collator", Noting)
    return noted


def test_any_number_of_drafters_gives_the_same_losses_over_the_same_samples(
    bench: TinyRun, seen: list[tuple[int, tuple[int, ...]]]
) -> None:
    losses: dict[int, list[float]] = {}
    samples: dict[int, list[set[tuple[int, tuple[int, ...]]]]] = defaultdict(list)
    for num in (1, 2, 4):
        seen.clear()
        run = bench.go(f"topology.drafters={['cpu'] * num}", "train.steps=6", stages=TRAINED)
        losses[num] = logged_losses(run)
        # Four micro-batches a step, by whichever worker; a barrier keeps the steps apart.
        assert len(seen) == 6 * 4
        samples[num] = [set(seen[i : i + 4]) for i in range(0, len(seen), 4)]
        manifest = json.loads(run.manifest_path("train").read_text())
        assert len(manifest["workers"]) == num
        assert manifest["replicas_equal"] is True
    first_epoch = sorted(i for step in samples[1][:3] for _, indices in step for i in indices)
    assert first_epoch == list(range(20))
    for num in (2, 4):
        assert samples[num] == samples[1]
        assert losses[num] == pytest.approx(losses[1], rel=1e-5)


def test_two_threads_give_the_same_bits_each_time_and_online_features_the_same_losses(bench: TinyRun) -> None:
    first, second = (bench.go(f"name={name}", "train.steps=6", stages=TRAINED) for name in ("one", "two"))
    assert first.folder != second.folder
    assert logged_losses(first) == logged_losses(second)
    assert _same_bits(saved_weights(first), saved_weights(second))

    # Beside the drafters instead of from the cache: the same losses, within the rounding of another batch.
    online = bench.go("train.steps=6", "data.features=online", stages=TRAINED)
    assert json.loads(online.manifest_path("cache").read_text())["features"]["folder"] is None
    shares = json.loads(online.manifest_path("train").read_text())["training"]["waited_share"]
    assert {thread: set(reasons) for thread, reasons in shares.items()} == {
        "drafter-0": {"others", "features"},
        "drafter-1": {"others", "features"},
        "target-0": {"room"},
    }
    assert all(0 <= share <= 1 for reasons in shares.values() for share in reasons.values())
    assert logged_losses(online) == pytest.approx(logged_losses(first), rel=1e-6)


# -- (f) and what else ends a training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_in_no_checkpoint(bench: TinyRun, log_every: int) -> None:
    wild = (ONE_DRAFTER, "train.learning_rate=1.0e+30", "train.checkpoint_every=2", f"train.log_every={log_every}")
    with pytest.raises(VerificationFailed) as caught:
        bench.go(*wild, stages=TRAINED)
    assert str(caught.value).startswith("step 2: the loss is nan")
    assert "Lower train.learning_rate" in str(caught.value)
    assert latest_checkpoint(bench.run(*wild).checkpoints_dir, print) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("features", "when"), [("cached", "training"), ("online", "training"), ("online", "warm-up")])
def test_an_exception_in_one_worker_ends_all_of_them_and_is_the_one_that_is_told(
    bench: TinyRun, monkeypatch: pytest.MonkeyPatch, features: str, when: str
) -> None:
    fail_at = {"warm-up": 1, "training": 4}[when]
    original: Callable[..., Any] = Replica.forward_backward
    calls = 0

    def failing(self: Replica, *arguments: Any) -> Any:
        nonlocal calls
        if self.name == "drafter-1":
            calls += 1
            if calls == fail_at:
                raise RuntimeError("out of memory")
        return original(self, *arguments)

    online = f"data.features={features}"
    bench.go(online, stages=("cache",))
    monkeypatch.setattr(Replica, "forward_backward", failing)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        bench.go(online, stages=("train",))
    assert not bench.run(online).manifest_path("train").exists()


@pytest.mark.parametrize(("broken", "equal"), [("a drafter lags behind", True), ("gradients are not exchanged", False)])
def test_replicas_are_compared_when_all_have_stepped(
    bench: TinyRun, monkeypatch: pytest.MonkeyPatch, broken: str, equal: bool
) -> None:
    def lagging(self: MasterAdamW, *arguments: Any) -> Any:
        if threading.current_thread().name == "drafter-1":
            time.sleep(0.1)
        return whole_step(self, *arguments)

    whole_step = MasterAdamW.step
    if equal:
        monkeypatch.setattr(MasterAdamW, "step", lagging)
    else:
        monkeypatch.setattr(GradientExchange, "total", lambda self, index, sums: sums)
    run = bench.go("train.steps=2", "train.checkpoint_every=1", stages=TRAINED)
    assert json.loads(run.manifest_path("train").read_text())["replicas_equal"] is equal
