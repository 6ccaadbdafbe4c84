"""Tau in metrics.jsonl: the tau of decoding, at its steps, at no cost for the training beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.acceptance import pooled_tau
from dflash.checkpoint import load_drafter
from dflash.decode import speculative_decode
from dflash.model import DFlashDraftModel
from pipeline import cache
from pipeline import train as train_module
from pipeline.cache import load_cached
from pipeline.checkpoints import latest_checkpoint, load_checkpoint
from pipeline.errors import Interrupted
from pipeline.held_out import HeldOutTau
from pipeline.metrics import read
from pipeline.replica import new_drafter
from pipeline.runs import Run
from pipeline.targets import load_target
from tests.tiny import EOS_ID, tiny_target
from tests.tiny_run import TinyRun

TRAINED = ("cache", "train")
SETTINGS = (
    "topology.drafters=[cpu]",
    "train.steps=24",
    "train.log_every=8",
    "train.evaluate_every=10",
    "train.checkpoint_every=10",
    "train.learning_rate=0.01",
    "verify.num_prompts=3",
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """A tiny target and its prompts. It is less random than usual, so that a drafter guesses some of its tokens.

    Only the workers compile, not the cache stage too; all on one thread, which is faster for matrices of this size.
    """
    made = TinyRun.make(tmp_path_factory.mktemp("bench"))
    tiny_target(made.folder, initializer_range=0.1)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        made.use(patch)
        patch.setattr(cache, "compile_once", lambda config, folder, drafter: {})
        for module in (cache, train_module):
            patch.setattr(module, "set_threads", lambda *workers, **how: torch.set_num_threads(1))
        yield made
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(bench: TinyRun) -> Run:
    return bench.go(*SETTINGS, stages=TRAINED)


def _taus(run: Run) -> dict[int, dict[str, Any]]:
    return {record["step"]: record["tau"] for record in read(run.metrics_path) if "tau" in record}


def _sessions(run: Run) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = json.loads(run.manifest_path("train").read_text())["sessions"]
    return sessions


def _decoded_tau(run: Run, drafter: DFlashDraftModel) -> float:
    """Return the pooled tau of really decoding the held-out prompts, as far as the stored answers go."""
    data = load_cached(run)
    target = load_target(data.target, torch.float32, "cpu")
    decoded = []
    for prompt, text in list(zip(data.prompts["held_out"], data.held_out, strict=True))[:3]:
        assert not any(prompt.loss_mask)
        found = speculative_decode(target, drafter, prompt.input_ids, max_new_tokens=16, eos_ids={EOS_ID})
        assert [*prompt.input_ids, *found.tokens] == text.input_ids
        decoded.append(found)
    return pooled_tau([len(d.tokens) for d in decoded], [len(d.accepted) for d in decoded])


def test_tau_is_logged_at_its_steps_and_the_last_one_and_compiles_nothing(run: Run) -> None:
    records = read(run.metrics_path)
    assert [record["step"] for record in records] == [8, 10, 16, 20, 24]
    taus = _taus(run)
    assert list(taus) == [10, 20, 24]
    for tau in taus.values():
        assert list(tau) == ["chained", "uniform", "marginals", "prompts"]
        assert tau["prompts"] == 3
        assert all(1 <= tau[name] <= 4 for name in ("chained", "uniform", "marginals"))
    assert {(record["compiles_after_warmup"], record["eager_bodies"]) for record in records} == {(0, 0)}
    gate = _sessions(run)[0]["gate"]
    assert [(f["forward_compiles"], f["backward_compiles"], f["cache_entries"]) for f in gate["functions"]] == [
        (1, 1, 1)
    ]


def test_the_logged_tau_is_the_tau_of_decoding_with_the_weights_of_that_step(bench: TinyRun, run: Run) -> None:
    """No public trainer logs it (anatomy 2.6)."""
    trained = load_drafter(run.drafter_dir)
    last = _taus(run)[24]
    assert last["chained"] == _decoded_tau(run, trained) > 1.1
    assert last["chained"] != last["uniform"] and last["chained"] != last["marginals"]

    data = load_cached(run)
    head_VD = load_target(data.target, torch.float32, "cpu").get_output_embeddings().weight
    untrained = new_drafter(run.config, data.drafter, head_VD)
    start = _sessions(run)[0]["tau_at_start"]
    assert start["chained"] == _decoded_tau(run, untrained) < last["chained"]

    earlier = DFlashDraftModel(data.drafter)
    earlier.load_state_dict(load_checkpoint(run.checkpoints_dir / "step-000020").tensors["weights"])
    assert _taus(run)[20]["chained"] == _decoded_tau(run, earlier)


def test_measuring_tau_changes_no_bit_of_the_training_and_zero_measures_none(bench: TinyRun, run: Run) -> None:
    never = bench.go(*SETTINGS, "train.evaluate_every=0", stages=TRAINED)
    assert (_taus(never), _sessions(never)[0]["tau_at_start"]) == ({}, None)
    often, losses = ({record["step"]: record["loss"] for record in read(r.metrics_path)} for r in (run, never))
    assert list(losses) == [8, 16, 24]
    assert losses == {step: often[step] for step in losses}
    files = [(r.drafter_dir / "model.safetensors").read_bytes() for r in (run, never)]
    assert files[0] == files[1]


def test_a_resumed_run_logs_the_same_taus(bench: TinyRun, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = (*SETTINGS, "name=stopped")
    with pytest.MonkeyPatch.context() as patch:
        original = train_module.Trainer._after_step

        def asked(self: train_module.Trainer, step: int, *rest: Any) -> None:
            self._stop.requested = step == 20
            original(self, step, *rest)

        patch.setattr(train_module.Trainer, "_after_step", asked)
        with pytest.raises(Interrupted, match="stopped after step 20"):
            bench.go(*stopped, stages=TRAINED)
    resumed = bench.go(*stopped, stages=TRAINED)
    assert _taus(resumed) == _taus(run)
    first, second = _sessions(resumed)
    assert first["tau_at_start"] == _sessions(run)[0]["tau_at_start"]
    assert second["tau_at_start"] == _taus(run)[20]
    # Another interval is no other training: the checkpoint is not refused.
    path = latest_checkpoint(resumed.checkpoints_dir, print)
    assert path is not None
    assert "evaluate_every" not in load_checkpoint(path).state["contract"]["train"]


def test_the_time_of_measuring_is_not_training_time(bench: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """The real one, and an hour for each measurement."""

        ahead = 0.0
        sleep = staticmethod(time.sleep)

        @classmethod
        def perf_counter(cls) -> float:
            return time.perf_counter() + cls.ahead

    def an_hour(self: HeldOutTau, replica: Any) -> dict[str, Any]:
        Clock.ahead += 3600
        return {"chained": 1.0}

    monkeypatch.setattr(train_module, "time", Clock)
    monkeypatch.setattr(HeldOutTau, "__call__", an_hour)
    slow = ("topology.drafters=[cpu]", "train.steps=4", "train.evaluate_every=2", "name=slow")
    run = bench.go(*slow, stages=TRAINED)
    assert Clock.ahead == 3 * 3600
    records = read(run.metrics_path)
    # A step has some 200 tokens: with an hour in it, it would train less than one a second.
    assert [record["tokens_per_second"] > 10 for record in records] == [True] * 4
    assert _sessions(run)[0]["warmup_seconds"] < 3600


def test_features_made_online_give_the_same_tau(bench: TinyRun, run: Run) -> None:
    online = bench.config(*SETTINGS, "data.features=online")
    data = load_cached(run)
    assert data.features is not None
    target = load_target(data.target, torch.float32, "cpu")
    cached, made = HeldOutTau(run.config, data, target), HeldOutTau(online, replace(data, features=None), target)
    assert len(cached._features) == len(made._features) == 3
    for found, other, text in zip(cached._features, made._features, data.held_out, strict=False):
        assert found.shape == (len(text.input_ids), data.drafter.feature_size)
        torch.testing.assert_close(found, other)


def test_held_out_prompts_are_answered_without_moving_the_answers_of_training(bench: TinyRun, run: Run) -> None:
    """A batch's company can move a near-tie, so the sets are not answered in the same batches."""
    data = load_cached(run)
    pairs = zip(data.prompts["held_out"], data.held_out, strict=True)
    lengths = [len(text.input_ids) - len(prompt.input_ids) for prompt, text in pairs]
    assert len(lengths) == 4 and min(lengths) >= 1
    assert all(not any(sample.loss_mask) for sample in data.prompts["out_of_domain"])
    more = bench.go(*SETTINGS, "data.held_out=7", stages=("cache",))
    folders = [Path(json.loads(r.manifest_path("cache").read_text())["answers"]["folder"]) for r in (run, more)]
    assert folders[0] != folders[1]
    assert (folders[0] / "train.jsonl").read_bytes() == (folders[1] / "train.jsonl").read_bytes()
