"""The same steps in several precisions on a run's own data: loss by step, accepted length, chained tau, time.

    python -m benchmarks.precision RUN [--arms bf16,fp8,bf16~] [--steps 500] [--json FILE]

RUN has its cache stage done (`invoke train --stage cache`). Every arm trains a new drafter from the run's seed on the
same micro-batches in the same order, one a step, with the run's own learning rate; tau is what decoding the run's
prompt sets must have (pipeline.proofs.chained_tau), on texts that the target wrote once, in float32. An arm that ends
in ~ starts from weights changed by 1e-4 of each: how far two runs of one precision come apart, without which a
difference means nothing. Shares are of the first arm's values. Exit code 4 when something compiled after the warm-up
or a loss is not finite.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.header import ROOT, check_record, header
from dflash.compile import CompileGate, CompileMiss
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from dflash.taps import extract_features
from env.caches import CacheDirs
from env.errors import EnvError
from pipeline.batches import Collator, plan_of
from pipeline.cache import CachedData, load_cached
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, PipelineError
from pipeline.optim import learning_rate
from pipeline.proofs import DecodedSet, chained_tau
from pipeline.regenerate import stop_ids
from pipeline.replica import DTYPES, Borrowed, Replica, new_drafter
from pipeline.runs import find_run
from pipeline.static_decode import StaticDecoder
from pipeline.target_forward import TargetForward, recorded_shapes
from pipeline.targets import load_target, load_tokenizer

LAST = 100
"""Steps at the end whose mean is compared."""
CHANGED = 1e-4


@dataclass(frozen=True)
class Arm:
    """What one precision gave."""

    name: str
    precision: str
    changed: float
    """Standard deviation of what its first weights were multiplied by."""
    ms_step: float
    """Of all steps, the batch's making and the target's forward included."""
    loss: tuple[float, ...]
    accepted: tuple[float, ...]
    """Per step: tokens that the drafter's blocks would have given, accepted + 1."""
    tau: dict[str, float]
    compiles_after_warmup: int

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.loss[-LAST:])

    @property
    def last_accepted(self) -> float:
        return statistics.fmean(self.accepted[-LAST:])


class Trial:
    """What all arms share: data, target, and the texts that tau is measured on."""

    def __init__(self, config: RunConfig, data: CachedData, device: torch.device, new_tokens: int) -> None:
        self.config, self.data, self.device = config, data, device
        self.plan, self.collator = plan_of(config, data.samples), Collator(config, data.drafter, data.samples)
        exact = load_target(data.target, torch.float32, device)
        self.stops = sorted(set(stop_ids(exact, load_tokenizer(data.target))))
        self.exact = exact
        self.sets = [self._texts(name, new_tokens) for name in data.prompts]

    def _texts(self, name: str, new_tokens: int) -> DecodedSet:
        prompts = [sample.input_ids for sample in self.data.prompts[name]]
        decoder = StaticDecoder(self.exact, self.stops, len(prompts), max(map(len, prompts)) + new_tokens)
        found = DecodedSet(name, prompts, decoder.answers(prompts, new_tokens), [], [])
        for prompt, answer in zip(prompts, found.plain, strict=True):
            ids = torch.tensor([[*prompt, *answer]], device=self.device)
            found.features.append(extract_features(self.exact, ids, self.data.drafter.target_layer_ids))
        return found

    def run(self, name: str, steps: int) -> Arm:
        """Train one arm. Raises ConfigError for a precision that there is not."""
        precision, changed = name.removesuffix("~"), CHANGED if name.endswith("~") else 0.0
        if precision not in DTYPES:
            raise ConfigError(f"{precision!r} is no precision", where="--arms", fix=f"Use {', '.join(DTYPES)}.")
        train = self.config.train.model_copy(update={"precision": precision, "steps": steps})
        config = self.config.model_copy(update={"train": train})
        dtype = DTYPES[precision]
        target = load_target(self.data.target, dtype, self.device)
        start = new_drafter(config, self.data.drafter, target.get_output_embeddings().weight)
        if changed:
            noise = torch.Generator().manual_seed(1)
            for parameter in start.parameters():
                parameter.data.mul_(1 + changed * torch.randn(parameter.shape, generator=noise))
        forward = TargetForward.of(config, self.data.drafter, target)
        gate = CompileGate(workers=1, backend=config.compile.backend)
        borrowed = Borrowed.of(target, self.device, dtype)
        replica = Replica("drafter", config, self.data.drafter, start, borrowed, self.device, gate)

        def warm_up() -> None:
            forward.record(recorded_shapes(config), gate)
            replica.warm_up()

        sums = []
        with gate.worker("drafter"):
            gate.warm_up(warm_up)
            begin = self._now()
            for step in range(steps):
                chosen = self.plan.step(step)
                rows = chosen.indices[: train.micro_batch]
                batch = self.collator.collate(chosen.epoch, chosen.bucket, rows).to(self.device)
                with gate.step():
                    found = replica.forward_backward(batch, forward(batch).to(dtype)).clone()
                replica.optimizer.step(learning_rate(train, step), found[1])
                sums.append(found)
            seconds = self._now() - begin
        totals = torch.stack(sums).double().cpu()
        trained = DFlashDraftModel(self.data.drafter)
        masters = zip(replica.optimizer.names, replica.optimizer.masters, strict=True)
        trained.load_state_dict({name: master.detach().float() for name, master in masters})
        trained = trained.to(self.device).eval()
        with torch.no_grad():
            tau = {s.name: round(chained_tau(s, trained, self.exact), 4) for s in self.sets}
        compiles = gate.report()["compiles_after_warmup"]
        gate.close()
        return Arm(
            name,
            precision,
            changed,
            ms_step=1e3 * seconds / steps,
            loss=tuple((totals[:, 0] / totals[:, 1]).tolist()),
            accepted=tuple((totals[:, 2] / totals[:, 3] + 1).tolist()),
            tau=tau,
            compiles_after_warmup=compiles,
        )

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def described(arms: Sequence[Arm]) -> str:
    """Return the arms as a table: values, and in brackets how far each is from the first arm's."""
    sets = list(arms[0].tau)
    titles = [("loss", 18), ("accepted + 1", 18), *((f"tau {name}", 24) for name in sets), ("ms step", 10)]
    lines = [" " * 8 + "".join(f"{title:>{width}}" for title, width in titles)]
    for arm in arms:
        values = [(arm.last_loss, arms[0].last_loss, 18), (arm.last_accepted, arms[0].last_accepted, 18)]
        values += [(arm.tau[name], arms[0].tau[name], 24) for name in sets]
        told = [f"{f'{mine:.4f} ({mine / first - 1:+.2%})':>{width}}" for mine, first, width in values]
        lines.append(f"{arm.name:8}{''.join(told)}{arm.ms_step:10.2f}")
    return "\n".join(lines)


def faults(arms: Sequence[Arm]) -> list[str]:
    """Return a line for everything that a run would refuse."""
    lines = [f"{a.name}: {a.compiles_after_warmup} compiles after the warm-up" for a in arms if a.compiles_after_warmup]
    return lines + [f"{a.name}: a loss is not finite" for a in arms if not all(map(math.isfinite, a.loss))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run's folder or id, or latest")
    parser.add_argument("--arms", default="bf16,fp8,bf16~", help="precisions, in order; default bf16,fp8,bf16~")
    parser.add_argument("--steps", type=int, default=500, help="of each arm, default 500")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each text that tau is measured on")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    arms = list[Arm]()
    try:
        for name, value in (("--steps", options.steps), ("--max-new-tokens", options.max_new_tokens)):
            if value < 1:
                raise ConfigError(f"{value} is not at least 1", where=name, fix="Use a larger number.")
        check_record(options.json)
        run = find_run(options.run, CacheDirs.from_environment(ROOT).runs)
        config = run.config
        device = torch.device(config.topology.drafters[0])
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"torch sees no {device} here", where=run.id, fix="Run it on a machine that has it.")
        if config.data.features != "online":
            raise ConfigError(
                "its features are cached in one precision", where=run.id, fix="Use data.features: online."
            )
        trial = Trial(config, load_cached(run), device, options.max_new_tokens)
        for name in options.arms.split(","):
            arms.append(trial.run(name.strip(), options.steps))
            last = arms[-1]
            print(f"{last.name}: loss {last.last_loss:.4f}, tau {last.tau}, {last.ms_step:.2f} ms a step", flush=True)
            torch._dynamo.reset()  # compiled code holds the models
            gc.collect()
            torch.cuda.empty_cache()  # nothing without a GPU
    except (DFlashError, PipelineError, EnvError) as error:
        print(error, file=sys.stderr)
        return 2
    except CompileMiss as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 4
    print(described(arms))
    found = faults(arms)
    if options.json:
        words = shlex.join(sys.argv[1:] if arguments is None else arguments)
        tokens = {s.name: sum(map(len, s.plain)) for s in trial.sets}
        about = {"run": run.id, "steps": options.steps, "samples": len(trial.data.samples), "tau_tokens": tokens}
        result: dict[str, Any] = {**header(f"python -m benchmarks.precision {words}", device), **about}
        options.json.write_text(json.dumps(result | {"arms": [asdict(a) for a in arms], "faults": found}) + "\n")
    for fault in found:
        print(fault, file=sys.stderr)
    return 4 if found else 0


if __name__ == "__main__":
    sys.exit(main())
