"""Stage 2: the training loop. One worker thread per drafter; the first one also writes metrics and checkpoints."""

from __future__ import annotations

import math
import resource
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dflash.checkpoint import save_drafter
from dflash.compile import CompileGate, CompileMiss, GateAborted
from pipeline.batches import BatchPlan, Collator, MicroBatch, StepBatch
from pipeline.cache import CachedData, load_cached
from pipeline.checkpoints import check_contract, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from pipeline.errors import Interrupted, PipelineError, VerificationFailed
from pipeline.interrupts import StopRequest
from pipeline.metrics import MetricsLog, Progress
from pipeline.optim import learning_rate
from pipeline.replica import DTYPES, Borrowed, Replica, new_drafter
from pipeline.runs import Run
from pipeline.targets import load_target
from pipeline.topology import CachedFeatures, GradientExchange, OnlineFeatures
from pipeline.warmup import set_threads


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
        config = self.config
        devices = [torch.device(name) for name in config.topology.drafters]
        set_threads(len(devices), devices[0])
        self.plan = BatchPlan(
            [len(s.input_ids) for s in data.samples], config.data.buckets, config.train.batch_size, config.seed
        )
        self.collator = Collator(config, data.drafter, data.samples)
        self.gate = CompileGate(
            workers=len(devices), on_miss=config.compile.on_miss, backend=config.compile.backend, log=self._say
        )
        dtype = DTYPES[config.train.precision]
        online = config.data.features == "online"
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
        self.exchange = GradientExchange(self.replicas)
        self.online = OnlineFeatures(target, data.drafter.target_layer_ids, self.gate, len(devices)) if online else None
        self.features = self.online or CachedFeatures(_required(data.features), data.drafter.feature_size)
        self.metrics = MetricsLog(run.metrics_path)
        self.step = 0
        self.sessions: list[dict[str, Any]] = []
        self.warmup_seconds = 0.0
        self._stop_at_step: int | None = None
        self._failures: list[BaseException] = []
        self._resume()

    # -- resume and save ---------------------------------------------------------------------------------------------

    def contract(self) -> dict[str, Any]:
        """Return what a resume must find unchanged: it decides the meaning of weights, moments and step numbers."""
        d, t = self.data.drafter, self.config.train
        return {
            "target": self.data.target.identity,
            "answers": self.data.answers_key,
            "drafter": {k: v for k, v in d.to_json().items() if k != "dtype"},
            "train": {
                k: getattr(t, k)
                for k in (
                    "steps",
                    "batch_size",
                    "num_anchors",
                    "learning_rate",
                    "loss",
                    "gamma",
                    "dpace_alpha",
                    "precision",
                )
            },
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
        self._session_start = self.step

    def _save(self) -> None:
        state = {"contract": self.contract(), "sessions": [*self.sessions, self._session()]}
        save_checkpoint(self.run.checkpoints_dir, self.step, self.replicas[0].optimizer.tensors(), state)
        prune_checkpoints(self.run.checkpoints_dir, self.config.train.keep_checkpoints)

    def _session(self) -> dict[str, Any]:
        """Return what one process's part of the training did; a resumed run has several."""
        return {
            "from_step": self._session_start,
            "to_step": self.step,
            "warmup_seconds": round(self.warmup_seconds, 2),
            "gate": self.gate.report(),
            "seconds_waited_for_each_other": round(self.exchange.rendezvous.seconds_waited, 2),
        }

    # -- the loop ----------------------------------------------------------------------------------------------------

    def fit(self, stop: StopRequest) -> None:
        """Run the remaining steps in worker threads; the main thread only waits, so that it can take signals."""
        self._stop = stop
        if self.step >= self.config.train.steps:
            return
        threads = [
            threading.Thread(target=self._guarded, args=(self._work, i), name=r.name)
            for i, r in enumerate(self.replicas)
        ]
        if self.online:
            threads.append(threading.Thread(target=self._guarded, args=(self._target_work, 0), name="target-0"))
        begin = self._last = time.perf_counter()
        with Progress(self.config.train.steps, start=self.step) as self.progress:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)
        self.seconds = time.perf_counter() - begin
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
        return first

    def _work(self, index: int) -> None:
        replica, config = self.replicas[index], self.config
        begin = time.perf_counter()
        with self.gate.worker(replica.name):
            self.gate.warm_up(replica.warm_up)
            if index == 0:
                self.warmup_seconds = time.perf_counter() - begin
                self._last = time.perf_counter()
            for step in range(self.step, config.train.steps):
                batch = self.plan.step(step)
                sums = torch.zeros(4 + 2 * self.data.drafter.block_size, device=replica.device)
                for micro in self._own_micro_batches(batch, index):
                    on_device = micro.to(replica.device)
                    features = self.features(index, micro, config.train.micro_batch, replica.device, replica.dtype)
                    with self.gate.step():
                        sums += replica.forward_backward(on_device, features)
                total = self.exchange.total(index, sums)
                rate = learning_rate(config.train, step)
                norm = replica.optimizer.step(rate, total[1])
                if index == 0:
                    self._after_step(step + 1, batch, total, norm, rate)
                self.exchange.rendezvous.wait()
                if self._stop_at_step == step + 1:
                    return

    def _own_micro_batches(self, batch: StepBatch, worker: int) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches of a step: every n-th one."""
        size, num = self.config.train.micro_batch, len(self.replicas)
        for start in range(worker * size, self.config.train.batch_size, num * size):
            yield self.collator.collate(batch.epoch, batch.bucket, batch.indices[start : start + size])

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
        if step % config.log_every == 0 or last or stopping:
            self._log_step(step, batch, total.tolist(), float(norm), rate)
        if step % config.checkpoint_every == 0 or last or stopping:
            self._save()
            self._last = time.perf_counter()
        if stopping:
            self._stop_at_step = step

    def _log_step(self, step: int, batch: StepBatch, sums: list[float], norm: float, rate: float) -> None:
        K = self.data.drafter.block_size
        numerator, denominator, accepted, blocks = sums[:4]
        loss = numerator / denominator if denominator else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise VerificationFailed(
                f"the loss is {loss} and the gradient's norm {norm}",
                where=f"step {step}",
                fix="Lower train.learning_rate; the last checkpoint is from before it.",
            )
        now = time.perf_counter()
        steps = min(self.config.train.log_every, step - self._session_start)
        tokens = sum(len(self.data.samples[i].input_ids) for i in batch.indices)
        rate_tokens = tokens * steps / (now - self._last)
        self._last = now
        counts = sums[4 + K :]
        report = self.gate.report()
        record = {
            "step": step,
            "epoch": batch.epoch,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": round(rate_tokens, 1),
            "accepted_length": 1 + accepted / blocks if blocks else math.nan,
            "slot_accuracy": [round(c / n, 4) if n else None for c, n in zip(sums[4 : 4 + K], counts, strict=True)][1:],
            "supervised_slots": int(sum(counts)),
            "compiles_after_warmup": report["compiles_after_warmup"],
            "eager_bodies": report["eager_bodies"],
            **memory(self.replicas[0].device),
        }
        self.metrics.append(record)
        self.progress.update(step, loss=loss, tokens_per_second=rate_tokens, accepted=record["accepted_length"])

    # -- the end -----------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Write the drafter in the dtype it was trained in: the working weights, bit for bit."""
        weights = dict(self.replicas[0].model.named_parameters())
        save_drafter(self.run.drafter_dir, self.data.drafter, weights, self.replicas[0].dtype)

    def manifest(self) -> dict[str, Any]:
        first, *others = [list(r.model.parameters()) for r in self.replicas]
        equal = all(torch.equal(a, b.to(a.device)) for other in others for a, b in zip(first, other, strict=True))
        sessions = self.sessions if self._session_start == self.step else [*self.sessions, self._session()]
        gates = [session["gate"] for session in sessions]
        waits = (
            {"target": self.online.seconds_target_waited, "drafters": self.online.seconds_drafters_waited}
            if self.online
            else {}
        )
        return {
            "steps": self.step,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "workers": [f"{r.name} on {r.device} ({r.attention})" for r in self.replicas],
            "replicas_equal": equal,
            "compiles_after_warmup": sum(g["compiles_after_warmup"] for g in gates),
            "eager_bodies": sum(g["eager_bodies"] for g in gates),
            "misses": sum(g["misses"] for g in gates),
            "seconds_waited": {k: round(v, 2) for k, v in waits.items()},
            "sessions": sessions,
        }

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def memory(device: torch.device) -> dict[str, int]:
    """Return what is allocated at a step boundary: on CUDA by the allocator, on the CPU the resident set, in bytes."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "allocated_bytes": stats["allocated_bytes.all.current"],
            "reserved_bytes": stats["reserved_bytes.all.current"],
            "allocator_retries": stats["num_alloc_retries"],
        }
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return {"resident_bytes": int(file.read().split()[1]) * resource.getpagesize()}
    except OSError:  # not Linux: the peak is all there is
        return {"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def _required(features: Any) -> Any:
    if features is None:
        raise PipelineError(
            "cached features are missing", where="data.features", fix="Rebuild them: invoke train --from-stage cache."
        )
    return features
