"""Stage 2: the training loop. One worker thread per drafter, and one per target where features are made beside them;
the first drafter's also writes metrics and checkpoints."""

from __future__ import annotations

import itertools
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
from pipeline.batches import Collator, MicroBatch, StepBatch, plan_of
from pipeline.cache import CachedData, check_devices, load_cached
from pipeline.checkpoints import check_contract, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from pipeline.compile_lock import cache_folder, compiling, explained
from pipeline.errors import Interrupted, PipelineError, VerificationFailed
from pipeline.held_out import HeldOutTau
from pipeline.interrupts import StopRequest
from pipeline.launch import launch
from pipeline.memory import memory, memory_record
from pipeline.metrics import MetricsLog, Progress
from pipeline.optim import learning_rate
from pipeline.own_gpus import Names, places_of, see_only
from pipeline.pace import Pace
from pipeline.ranks import Ranks
from pipeline.replica import DTYPES, Borrowed, Replica, feature_width, new_drafter
from pipeline.runs import Run
from pipeline.sessions import COUNTED_BY_GATE, check_finite, contract_of, merged, step_record, totals, whereabouts
from pipeline.sharded import Shard, exchange_of
from pipeline.target_forward import TargetForward, recorded_shapes
from pipeline.targets import load_target
from pipeline.topology import CachedFeatures, OnlineFeatures, out_of_reach, target_name, waits
from pipeline.warmup import set_threads


def train(run: Run) -> dict[str, Any]:
    """Return the manifest: steps, seconds, what the gate counted, and whether the replicas ended equal.

    Resumes from the newest complete checkpoint. Raises ConfigError for a GPU that is not there, Interrupted after
    saving when asked to stop, CompileMiss for a compile after the warm-up, VerificationFailed for a loss that is not
    finite.
    """
    if run.config.topology.workers == "processes":
        return launch(run)
    return train_as(run, None)


def train_as(run: Run, ranks: Ranks | None) -> dict[str, Any]:
    """Train with a thread for each drafter, or as one of `ranks`; return the manifest, which is that of all ranks."""
    check_devices(run.config, ("targets", "drafters") if run.config.data.features == "online" else ("drafters",))
    called = Names()
    if ranks:
        called = Names(see_only(places_of(run.config, ranks.local), ranks.say), ranks.host, ranks.rank)
    trainer = Trainer(run, load_cached(run), ranks, called)
    with StopRequest() as stop:
        trainer.fit(stop)
    if trainer.step < run.config.train.steps:
        raise Interrupted(
            f"stopped after step {trainer.step} of {run.config.train.steps}, saved",
            where=run.id,
            fix="invoke train again resumes there.",
        )
    if trainer.leads:
        trainer.export()
    return trainer.manifest()


class Trainer:
    """Holds the replicas of this process and drives them; `fit` returns when the last step is done or a stop was asked
    for. Workers are numbered over all processes; `first` is this one's first, `total` is how many there are."""

    def __init__(self, run: Run, data: CachedData, ranks: Ranks | None = None, called: Names | None = None) -> None:
        self.run, self.config, self.data, self.ranks = run, run.config, data, ranks
        self._began, self.pace = time.perf_counter(), Pace(data.drafter.block_size)
        config = self.config
        online, called = config.data.features == "online", called or Names()
        names, target_names = config.topology.drafters, config.topology.targets if online else ("cpu",)
        self.first, self.total, self.leads = (ranks.rank, ranks.world, ranks.leads) if ranks else (0, len(names), True)
        set_threads(len(names), torch.device(names[0]), apart=ranks is not None)
        if ranks:
            own = places_of(config, ranks.local)
            names, target_names = (own.drafter,), (own.target or "cpu",)
        self.called = called
        devices, homes = ([called.device(name) for name in some] for some in (names, target_names))
        self.plan = plan_of(config, data.samples)
        self.collator = Collator(config, data.drafter, data.samples)
        self.gate = CompileGate(
            workers=len(devices) + (len(homes) if recorded_shapes(config) else 0),
            on_miss=config.compile.on_miss,
            backend=config.compile.backend,
            log=self._say,
        )
        dtype = DTYPES[config.train.precision]
        targets = [load_target(data.target, getattr(torch, config.target.dtype), home) for home in homes]
        start = new_drafter(config, data.drafter, targets[0].get_output_embeddings().weight)
        at_home = {target.device: target for target in targets}  # equal copies: a GPU's own need not be copied to it
        shared: dict[torch.device, Borrowed] = {}
        for device in devices:
            if device not in shared:
                shared[device] = Borrowed.of(at_home.get(device, targets[0]), device, dtype)
        shard = Shard(ranks.rank, ranks.world) if ranks and config.topology.shard_optimizer else None
        keeps = shard.keeps if shard else None
        self.replicas = [
            Replica(f"drafter-{i}", config, data.drafter, start, shared[d], d, self.gate, keeps)
            for i, d in enumerate(devices, self.first)
        ]
        self.exchange = exchange_of(self.replicas, ranks, shard, self.pace.clock)
        self.online = self._beside(targets) if online else None
        width = feature_width(config, data.drafter)
        self.cached = None if online else CachedFeatures(data.required_features(), width)
        self.held_out = HeldOutTau(config, data, targets[0]) if config.train.evaluate_every and self.leads else None
        self._tau_at_start: dict[str, Any] | None = None
        self.metrics = MetricsLog(run.metrics_path)
        self.step = 0
        self.sessions: list[dict[str, Any]] = []
        self.warmup_seconds = 0.0
        self._stop_at_step: int | None = None
        self._contract = contract_of(config, data)
        self._parts: list[dict[str, Any]] = []
        self._failures: list[BaseException] = []
        self._replicas_equal = True
        self._resume()

    def _beside(self, targets: list[Any]) -> OnlineFeatures:
        config, shapes = self.config, recorded_shapes(self.config)
        forwards = [TargetForward.of(config, self.data.drafter, target) for target in targets]
        if shapes and (reason := forwards[0].why_not_compiled()):
            self._say(f"train: the target runs uncompiled, slower by half or more: {reason}")
        drafters = [replica.device for replica in self.replicas]
        for pair in out_of_reach((target.device for target in targets), drafters):
            way = " to ".join(self.called.name(torch.device(device)) for device in pair)
            self._say(f"train: features go from {way} by way of the host: they do not reach each other")
        return OnlineFeatures(forwards, self.gate, len(drafters), shapes=shapes, clock=self.pace.clock)

    # -- resume and save ---------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        path = latest_checkpoint(self.run.checkpoints_dir, self._say) if self.leads else None
        if self.ranks:  # rank 0 chooses for all
            name = self.ranks.shared("checkpoint", path and path.name)
            path = self.run.checkpoints_dir / name if name else None
            if self.ranks.shared("contract", self._contract) != self._contract:
                raise PipelineError("has other data or another configuration than rank 0", where=f"rank {self.first}")
        if path is not None:
            found = load_checkpoint(path)
            check_contract(found.state["contract"], self._contract, path.name)
            for replica in self.replicas:
                replica.optimizer.load(found.tensors)
            self.step, self.sessions = found.step, found.state["sessions"]
            if self.leads:
                self._say(f"train: resuming from {path.name}")
        if self.leads:
            self.metrics.truncate_after(self.step)
        self._session_start, self._counts_before = self.step, disk_counts()

    def _save(self) -> None:
        """All processes come here together: they compare replicas and tell what they did, and the first one writes."""
        self._replicas_equal = self._replicas_equal and self.exchange.equal()
        self._parts = self.exchange.gathered(self._part())
        tensors = self.exchange.tensors()
        if self.leads:
            state = {"contract": self._contract, "sessions": [*self.sessions, self._session(self._parts)]}
            save_checkpoint(self.run.checkpoints_dir, self.step, tensors, state)
            prune_checkpoints(self.run.checkpoints_dir, self.config.train.keep_checkpoints)
        self.exchange.settle()

    def _part(self) -> dict[str, Any]:
        """Return what this process did of the session."""
        waited = waits(self.exchange, self.online)
        if self.ranks and self.online:  # the one target of this rank, by its number over all
            waited[target_name(self.first)] = waited.pop(target_name(0))
        counts, warmup = disk_counts(self._counts_before), round(self.warmup_seconds, 2)
        place = {"host": self.called.host, "warmup_seconds": warmup}
        return {"gate": self.gate.report(), **place, **counts, "waited": waited}

    def _session(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what one start's part of the training did; a resumed run has several."""
        found = merged(parts)
        waited = found.pop("waited")
        return {
            "from_step": self._session_start,
            "to_step": self.step,
            "tau_at_start": self._tau_at_start,
            **found,
            "replicas_equal": self._replicas_equal,
            "wall_seconds": round(time.perf_counter() - self._began, 2),
            "training": self.pace.record(self.step - self._session_start, waited),
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
        threads += [
            threading.Thread(target=self._guarded, args=(self._target_work, t), name=target_name(t))
            for t in range(len(self.online.devices) if self.online else 0)
        ]
        self.progress = Progress(self.config.train.steps, start=self.step)
        with self.progress if self.leads else nullcontext():  # one bar, of the process that moves it
            self._tell("waits to compile")
            with compiling(cache_folder(), self._say, lambda: self.gate.sealed):
                self._tell("compiles")
                for thread in threads:
                    thread.start()
                while not self.gate.sealed and not self._failures:  # a target's thread may have nothing to do
                    self._watch()
                    time.sleep(0.05)
            for thread in threads:
                while thread.is_alive():
                    self._watch()
                    thread.join(timeout=0.2)
        self.gate.close()
        if self._failures:
            raise self._cause()

    def _tell(self, state: str) -> None:
        if self.ranks:
            self.ranks.state(state)

    def _watch(self) -> None:
        if self.ranks:
            self.ranks.watch(self._stop)

    def _guarded(self, work: Any, index: int) -> None:
        """Run a thread's work; whatever it raises ends the other threads too."""
        try:
            work(index)
        except BaseException as error:
            self._failures.append(error)
            self.exchange.abort()
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
                    self._tell("measures tau")
                    self._tau_at_start = self.held_out(replica)
                self.exchange.join()
                self.pace.clock.start()
            self.exchange.wait()
            for step in range(self.step, config.train.steps):
                batch = self.plan.step(step)
                total = self.exchange.total(index, self._forward_backward(batch, index))
                rate = learning_rate(config.train, step)
                norm = replica.optimizer.step(rate, total[1])
                self.exchange.wait()  # everyone has stepped: the first may now compare the replicas
                if index == 0:
                    self._after_step(step + 1, batch, total, norm, rate)
                self.exchange.wait()
                if self._stop_at_step == step + 1:
                    break
            if index == 0:
                self.pace.clock.stop()
        if index == 0:
            self.exchange.close()

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
        size, num, replica = self.config.train.micro_batch, self.total, self.replicas[worker]
        for start in range((self.first + worker) * size, self.config.train.batch_size, num * size):
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
        """A target's thread: its share of the micro-batches, in the order the workers will ask for them."""
        assert self.online is not None
        turns = self.online.turns

        def stream() -> Iterator[MicroBatch]:
            size, numbers = self.config.train.micro_batch, itertools.count()
            for step in range(self._session_start, self.config.train.steps):
                batch = self.plan.step(step)
                for number, start in enumerate(range(0, self.config.train.batch_size, size)):
                    here = 0 <= number % self.total - self.first < len(self.replicas)
                    if here and turns.target_of(next(numbers)) == index:
                        yield self.collator.collate(batch.epoch, batch.bucket, batch.indices[start : start + size])

        self.online.work(index, stream())

    def _after_step(self, step: int, batch: StepBatch, total: Tensor, norm: Tensor, rate: float) -> None:
        """Only the first worker of each process, all together: metrics, progress, checkpoints, and whether to stop."""
        config = self.config.train
        self.step = step
        last = step == config.steps
        stopping = self.exchange.agreed(self._stop.requested)
        self.pace.add(self.collator.num_tokens(batch.indices), total)
        evaluating = bool(config.evaluate_every) and (step % config.evaluate_every == 0 or last)
        logging = step % config.log_every == 0 or last or stopping or evaluating
        saving = step % config.checkpoint_every == 0 or last or stopping
        if logging or saving:
            check_finite(step, total, norm)
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
        rate_tokens, tau = self.pace.tokens_per_second(), {}
        if evaluating:
            with self.pace.clock.stopped():
                tau = {"tau": self.held_out(self.replicas[0])} if self.held_out else {}
                self.exchange.settle()
        report = self.gate.report()
        devices = {replica.device for replica in self.replicas} | set(self.online.devices if self.online else ())
        with self.online.at_rest() if self.online else nullcontext():
            held = memory(devices, self.called.of_process)
        parts = self.exchange.gathered((report, held))
        if not self.leads:
            return
        counts = {name: sum(gate[name] for gate, _ in parts) for name in COUNTED_BY_GATE}
        counts |= memory_record(held for _, held in parts)
        more = {"learning_rate": rate, "gradient_norm": norm, "tokens_per_second": round(rate_tokens, 1), **tau}
        record = step_record(step, batch.epoch, sums, self.data.drafter.block_size, **more, **counts)
        self.metrics.append(record)
        loss, accepted = record["loss"], record["accepted_length"]
        self.progress.update(step, loss=loss, tokens_per_second=rate_tokens, accepted=accepted)

    # -- the end -----------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Write the drafter in the dtype it was trained in: the working weights, bit for bit."""
        weights = dict(self.replicas[0].model.named_parameters())
        save_drafter(self.run.drafter_dir, self.data.drafter, weights, self.replicas[0].dtype)

    def manifest(self) -> dict[str, Any]:
        parts = self._parts if self.ranks else [self._part()]  # other processes were last heard when all saved
        sessions = self.sessions if self._session_start == self.step else [*self.sessions, self._session(parts)]
        return {
            "steps": self.step,
            "steps_per_epoch": self.plan.steps_per_epoch,
            **whereabouts(self.replicas, self.online.devices if self.online else [], self.ranks, self.called),
            **totals(sessions),
            "sessions": sessions,
        }

    def _say(self, line: str) -> None:
        if self.ranks:
            self.ranks.say(line)
        else:
            print(line, file=sys.stderr, flush=True)
