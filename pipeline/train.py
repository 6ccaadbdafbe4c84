"""Stage 2: the training loop. One worker thread per drafter; the first one also writes metrics and checkpoints."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dflash.checkpoint import save_drafter
from dflash.compile import CompileGate, CompileMiss, GateAborted
from dflash.compile.counters import disk_counts
from dflash.config import SLIDING
from dflash.config_json import to_json
from pipeline.batches import Collator, MicroBatch, StepBatch, plan_of
from pipeline.cache import CachedData, load_cached
from pipeline.checkpoints import check_contract, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from pipeline.compile_lock import cache_folder, compiling, explained
from pipeline.errors import Interrupted, PipelineError, VerificationFailed
from pipeline.held_out import HeldOutTau
from pipeline.interrupts import StopRequest
from pipeline.memory import memory
from pipeline.metrics import MetricsLog, Progress
from pipeline.optim import learning_rate
from pipeline.pace import Pace, summed
from pipeline.replica import DTYPES, Borrowed, Replica, feature_width, new_drafter
from pipeline.runs import Run
from pipeline.target_forward import TargetForward, recorded_shapes
from pipeline.targets import load_target
from pipeline.topology import CachedFeatures, GradientExchange, OnlineFeatures, waits
from pipeline.warmup import set_threads

UNBOUND = {"checkpoint_every", "evaluate_every", "keep_checkpoints", "log_every", "head_chunk_rows"}
"""Fields of the train section that a resumed run may change: they do not touch what is computed."""


def train(run: Run) -> dict[str, Any]:
    """Return the manifest: steps, seconds, what the gate counted, and whether the replicas ended equal.

    Resumes from the newest complete checkpoint. Raises Interrupted after saving when asked to stop, CompileMiss for a
    compile after the warm-up, VerificationFailed for a loss that is not finite.
    """
    trainer = Trainer(run, load_cached(run))
    with StopRequest() as stop:
        trainer.fit(stop)
    if trainer.step < run.config.train.steps:
        raise Interrupted(
            f"stopped after step {trainer.step} of {run.config.train.steps}, saved",
            where=run.id,
            fix="invoke train again resumes there.",
        )
    trainer.export()
    return trainer.manifest()


class Trainer:
    """Holds the replicas and drives them; `fit` returns when the last step is done or a stop was asked for."""

    def __init__(self, run: Run, data: CachedData) -> None:
        self.run, self.config, self.data = run, run.config, data
        self._began, self.pace = time.perf_counter(), Pace(data.drafter.block_size)
        config = self.config
        devices = [torch.device(name) for name in config.topology.drafters]
        set_threads(len(devices), devices[0])
        self.plan = plan_of(config, data.samples)
        self.collator = Collator(config, data.drafter, data.samples)
        online = config.data.features == "online"
        self.gate = CompileGate(
            workers=len(devices) + bool(recorded_shapes(config)),
            on_miss=config.compile.on_miss,
            backend=config.compile.backend,
            log=self._say,
        )
        dtype = DTYPES[config.train.precision]
        target = load_target(
            data.target, getattr(torch, config.target.dtype), config.topology.targets[0] if online else "cpu"
        )
        start = new_drafter(config, data.drafter, target.get_output_embeddings().weight)
        shared: dict[torch.device, Borrowed] = {}
        for device in devices:
            if device not in shared:
                shared[device] = Borrowed.of(target, device, dtype)
        self.replicas = [
            Replica(f"drafter-{i}", config, data.drafter, start, shared[d], d, self.gate) for i, d in enumerate(devices)
        ]
        self.exchange = GradientExchange(self.replicas, self.pace.clock)
        self.online = self._beside(target) if online else None
        width = feature_width(config, data.drafter)
        self.cached = None if online else CachedFeatures(_required(data.features), width)
        self.held_out = HeldOutTau(config, data, target) if config.train.evaluate_every else None
        self._tau_at_start: dict[str, Any] | None = None
        self.metrics = MetricsLog(run.metrics_path)
        self.step = 0
        self.sessions: list[dict[str, Any]] = []
        self.warmup_seconds = 0.0
        self._stop_at_step: int | None = None
        self._failures: list[BaseException] = []
        self._replicas_equal = True
        self._resume()

    def _beside(self, target: Any) -> OnlineFeatures:
        config = self.config
        forward, shapes = TargetForward.of(config, self.data.drafter, target), recorded_shapes(config)
        if shapes and (reason := forward.why_not_compiled()):
            self._say(f"train: the target runs uncompiled, slower by half or more: {reason}")
        return OnlineFeatures(forward, self.gate, len(config.topology.drafters), shapes=shapes, clock=self.pace.clock)

    # -- resume and save ---------------------------------------------------------------------------------------------

    def contract(self) -> dict[str, Any]:
        """Return what a resume must find unchanged: it decides the meaning of weights, moments and step numbers."""
        d = self.data.drafter
        return {
            "target": self.data.target.identity,
            "answers": self.data.answers_key,
            "drafter": {k: v for k, v in to_json(d).items() if k != "dtype"},
            "train": self.config.train.model_dump(mode="json", exclude=UNBOUND),
            "buckets": list(self.config.data.buckets),
            "samples_per_row": self.config.data.samples_per_row,
            "seed": self.config.seed,
        }

    def _resume(self) -> None:
        path = latest_checkpoint(self.run.checkpoints_dir, self._say)
        if path is not None:
            found = load_checkpoint(path)
            check_contract(found.state["contract"], self.contract(), path.name)
            for replica in self.replicas:
                replica.optimizer.load(found.tensors)
            self.step, self.sessions = found.step, found.state["sessions"]
            self._say(f"train: resuming from {path.name}")
        self.metrics.truncate_after(self.step)
        self._session_start, self._counts_before = self.step, disk_counts()

    def _save(self) -> None:
        self._replicas_equal = self._replicas_equal and self._compare_replicas()
        state = {"contract": self.contract(), "sessions": [*self.sessions, self._session()]}
        save_checkpoint(self.run.checkpoints_dir, self.step, self.replicas[0].optimizer.tensors(), state)
        prune_checkpoints(self.run.checkpoints_dir, self.config.train.keep_checkpoints)

    def _compare_replicas(self) -> bool:
        """Return whether all replicas hold the same float32 weights, bit for bit. All have stepped, and wait."""
        first, *others = [replica.optimizer.masters for replica in self.replicas]
        return all(torch.equal(a, b.to(a.device)) for other in others for a, b in zip(first, other, strict=True))

    def _session(self) -> dict[str, Any]:
        """Return what one process's part of the training did; a resumed run has several."""
        return {
            "from_step": self._session_start,
            "to_step": self.step,
            "warmup_seconds": round(self.warmup_seconds, 2),
            "tau_at_start": self._tau_at_start,
            "gate": self.gate.report(),
            **disk_counts(self._counts_before),
            "replicas_equal": self._replicas_equal,
            "wall_seconds": round(time.perf_counter() - self._began, 2),
            "training": self.pace.record(self.step - self._session_start, waits(self.exchange, self.online)),
        }

    # -- the loop ----------------------------------------------------------------------------------------------------

    def fit(self, stop: StopRequest) -> None:
        """Run the remaining steps in worker threads; the main thread only waits, so that it can take signals."""
        self._stop = stop
        if self.step >= self.config.train.steps:
            return
        drafter = self.data.drafter
        if any(drafter.layer_causal(i) != (kind == SLIDING) for i, kind in enumerate(drafter.layer_types)):
            self._say("train: SGLang runs full layers bidirectionally and sliding ones causally; this one differs.")
        threads = [
            threading.Thread(target=self._guarded, args=(self._work, i), name=r.name)
            for i, r in enumerate(self.replicas)
        ]
        if self.online:
            threads.append(threading.Thread(target=self._guarded, args=(self._target_work, 0), name="target-0"))
        with Progress(self.config.train.steps, start=self.step) as self.progress:
            with compiling(cache_folder(), self._say, lambda: self.gate.sealed):
                for thread in threads:
                    thread.start()
                while not self.gate.sealed and all(thread.is_alive() for thread in threads):
                    time.sleep(0.05)
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)
        self.gate.close()
        if self._failures:
            raise self._cause()

    def _guarded(self, work: Any, index: int) -> None:
        """Run a thread's work; whatever it raises ends the other threads too."""
        try:
            work(index)
        except BaseException as error:
            self._failures.append(error)
            self.exchange.rendezvous.abort()
        finally:
            if self.online and (self._failures or work == self._work):
                self.online.stopping.set()

    def _cause(self) -> BaseException:
        """Return the failure that began it: the others only report that a partner was gone."""
        real = [error for error in self._failures if not isinstance(error, GateAborted)]
        first = (real or self._failures)[0]
        if isinstance(first, CompileMiss):
            return VerificationFailed(str(first), where=f"step {self.step + 1}")
        return explained(first, cache_folder())

    def _work(self, index: int) -> None:
        replica, config = self.replicas[index], self.config
        begin = time.perf_counter()
        if replica.device.type == "cuda":
            torch.cuda.set_device(replica.device)
        with self.gate.worker(replica.name):
            self.gate.warm_up(replica.warm_up)
            if index == 0:
                self.warmup_seconds = time.perf_counter() - begin
                if self.held_out:  # before the steps, so that later evaluations find their memory reserved
                    self._tau_at_start = self.held_out(replica)
                self.pace.clock.start()
            self.exchange.rendezvous.wait()
            for step in range(self.step, config.train.steps):
                batch = self.plan.step(step)
                total = self.exchange.total(index, self._forward_backward(batch, index))
                rate = learning_rate(config.train, step)
                norm = replica.optimizer.step(rate, total[1])
                self.exchange.rendezvous.wait()  # everyone has stepped: the first may now compare the replicas
                if index == 0:
                    self._after_step(step + 1, batch, total, norm, rate)
                self.exchange.rendezvous.wait()
                if self._stop_at_step == step + 1:
                    break
            if index == 0:
                self.pace.clock.stop()

    def _forward_backward(self, batch: StepBatch, index: int) -> Tensor:
        """Return a worker's loss sums of a step. When it returns, nothing of a micro-batch is held any more: they are
        of different sizes, and memory is compared between steps."""
        replica = self.replicas[index]
        sums = torch.zeros(4 + 4 * self.data.drafter.block_size, device=replica.device)
        for micro, features in self._own_micro_batches(batch, index):
            with self.gate.step():
                sums += replica.forward_backward(micro, features)
        return sums

    def _own_micro_batches(self, batch: StepBatch, worker: int) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield this worker's micro-batches of a step, every n-th one, with their features, on its device."""
        size, num, replica = self.config.train.micro_batch, len(self.replicas), self.replicas[worker]
        for start in range(worker * size, self.config.train.batch_size, num * size):
            indices = batch.indices[start : start + size]
            if self.online:
                micro, features = self.online.take(worker, replica.device, replica.dtype)
                if micro.indices != indices:
                    raise RuntimeError(f"the target made features of rows {micro.indices}, not of {indices}")
                yield micro, features
            else:
                assert self.cached is not None
                micro = self.collator.collate(batch.epoch, batch.bucket, indices)
                yield micro.to(replica.device), self.cached(micro, size, replica.device, replica.dtype)

    def _target_work(self, index: int) -> None:
        """The target's thread: the same micro-batches, in the order the workers will ask for them."""
        assert self.online is not None

        def stream() -> Iterator[tuple[int, MicroBatch]]:
            size, num = self.config.train.micro_batch, len(self.replicas)
            for step in range(self._session_start, self.config.train.steps):
                batch = self.plan.step(step)
                for number, start in enumerate(range(0, self.config.train.batch_size, size)):
                    yield (
                        number % num,
                        self.collator.collate(batch.epoch, batch.bucket, batch.indices[start : start + size]),
                    )

        self.online.work(f"target-{index}", stream())

    def _after_step(self, step: int, batch: StepBatch, total: Tensor, norm: Tensor, rate: float) -> None:
        """Only the first worker: metrics, progress, checkpoints, and whether to stop."""
        config = self.config.train
        self.step = step
        last = step == config.steps
        stopping = self._stop.requested
        self.pace.add(self.collator.num_tokens(batch.indices), total)
        evaluating = bool(config.evaluate_every) and (step % config.evaluate_every == 0 or last)
        logging = step % config.log_every == 0 or last or stopping or evaluating
        saving = step % config.checkpoint_every == 0 or last or stopping
        if logging or saving:
            _check_finite(step, total, norm)
        if logging:
            self._log_step(step, batch, total.tolist(), float(norm), rate, evaluating)
        if saving:
            with self.pace.clock.stopped():
                self._save()
        if stopping:
            self._stop_at_step = step

    def _log_step(
        self, step: int, batch: StepBatch, sums: list[float], norm: float, rate: float, evaluating: bool
    ) -> None:
        K = self.data.drafter.block_size
        numerator, denominator, accepted, blocks = sums[:4]
        loss = numerator / denominator
        rate_tokens = self.pace.tokens_per_second()
        with self.pace.clock.stopped():
            tau = {"tau": self.held_out(self.replicas[0])} if self.held_out and evaluating else {}
        correct, counts, runs, reached = (sums[4 + i * K : 4 + (i + 1) * K] for i in range(4))
        report = self.gate.report()
        with self.online.at_rest() if self.online else nullcontext():
            held = memory({replica.device for replica in self.replicas})
        record = {
            "step": step,
            "epoch": batch.epoch,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": round(rate_tokens, 1),
            "accepted_length": 1 + accepted / blocks if blocks else math.nan,
            "slot_accuracy": _ratios(correct, counts),
            "slot_conditional_accuracy": _ratios(runs, reached),
            **tau,
            "supervised_slots": int(sum(counts)),
            "compiles_after_warmup": report["compiles_after_warmup"],
            "eager_bodies": report["eager_bodies"],
            "seconds_parked": report["seconds_parked"],
            **held,
        }
        self.metrics.append(record)
        self.progress.update(step, loss=loss, tokens_per_second=rate_tokens, accepted=record["accepted_length"])

    # -- the end -----------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Write the drafter in the dtype it was trained in: the working weights, bit for bit."""
        weights = dict(self.replicas[0].model.named_parameters())
        save_drafter(self.run.drafter_dir, self.data.drafter, weights, self.replicas[0].dtype)

    def manifest(self) -> dict[str, Any]:
        sessions = self.sessions if self._session_start == self.step else [*self.sessions, self._session()]
        gates = [session["gate"] for session in sessions]
        return {
            "steps": self.step,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "workers": [f"{r.name} on {r.device} ({r.attention})" for r in self.replicas],
            "replicas_equal": all(session["replicas_equal"] for session in sessions),
            **{name: sum(session.get(name, 0) for session in sessions) for name in ("built", "loaded")},
            "compiles_after_warmup": sum(g["compiles_after_warmup"] for g in gates),
            "eager_bodies": sum(g["eager_bodies"] for g in gates),
            "misses": sum(g["misses"] for g in gates),
            "training": summed(sessions),
            "sessions": sessions,
        }

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _ratios(hits: list[float], counts: list[float]) -> list[float | None]:
    """Return hits / counts of slots 1.. (slot 0 is never drafted); None for a slot that no block reached."""
    return [round(hit / count, 4) if count else None for hit, count in zip(hits[1:], counts[1:], strict=True)]


def _check_finite(step: int, sums: Tensor, norm: Tensor) -> None:
    """Raise VerificationFailed when the loss or the gradient is not a number: before it is logged, and before it is
    saved, so that a run can always go on from its last checkpoint."""
    numerator, denominator = sums[:2].tolist()
    loss = numerator / denominator if denominator else math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise VerificationFailed(
            f"the loss is {loss} and the gradient's norm {float(norm)}",
            where=f"step {step}",
            fix="Lower train.learning_rate; the last checkpoint is from before it.",
        )


def _required(features: Any) -> Any:
    if features is None:
        raise PipelineError(
            "cached features are missing", where="data.features", fix="Rebuild them: invoke train --from-stage cache."
        )
    return features
