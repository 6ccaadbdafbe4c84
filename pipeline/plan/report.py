"""The plan of one run: what each part takes, how to place it, and what limits it; as one table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from dflash.config import DrafterConfig
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.plan import costs, memory
from pipeline.plan.costs import Micro
from pipeline.plan.gpus import Gpu
from pipeline.plan.shapes import TargetShape, drafter_of
from pipeline.plan.split import Split, Work, best, splits
from pipeline.turns import Turns

SHOWN_SPLITS = 5
WORTH = 0.97
"""Another micro-batch or placing is mentioned when it takes less than this share of the time."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much there is to do. Tokens are means over the samples; training pads them to a bucket."""

    samples: int
    prompt_tokens: int
    answer_tokens: int
    rows: int
    """Of an epoch: samples, or several packed in each."""
    steps: int
    own_prompts: int = 0
    """Of the samples: those whose prompt the target writes as well."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The target's answers."""

    rows: int
    """Prompts at once on each GPU."""
    most_rows: int
    tokens_per_second: float
    """Of one GPU."""
    hours_one_gpu: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds and bytes of a run on `gpus` GPUs of one kind."""

    gpu: Gpu
    gpus: int
    target: TargetShape
    drafter_parameters: int
    workload: Workload
    micro: Micro
    pieces: int
    one_process: bool
    recorded: bool
    tflop_step: float
    """Forward and backward of all micro-batches, drafter only."""
    work: Work
    placings: list[Split]
    """That fit, the fastest first; one for each number of targets that have GPUs of their own."""
    today: Split | None
    """The fastest that pipeline/config.py accepts, among those that fit."""
    step_of_processes: float | None
    """Of the best placing with topology.workers: processes, if one fits."""
    faster_micro: tuple[int, float] | None
    """Another train.micro_batch and what its best placing takes of this one's time."""
    drafter_memory: memory.Parts
    target_memory: memory.Parts
    shared_bytes: float
    """Of a GPU with both; the tables are there once."""
    feature_rate: float
    """Bytes a second that one drafter of the best placing takes in."""
    feature_storage: float
    """Bytes of all features, if they were kept."""
    answers: Answers
    hours_features: float
    """Of making all features once on one GPU; 0 when they are made beside the training."""
    hours_verify: float

    @property
    def step(self) -> float:
        return self.placings[0].step(one_process=self.one_process)

    @property
    def hours_answers(self) -> float:
        """On all GPUs, each answering its share."""
        return self.answers.hours_one_gpu / self.gpus

    @property
    def hours_training(self) -> float:
        return self.hours_of(self.placings[0])

    @property
    def hours(self) -> float:
        return self.hours_answers + self.hours_features + self.hours_training + self.hours_verify

    @property
    def hours_today(self) -> float | None:
        """With the placing of today and one GPU that answers, as the pipeline has it."""
        if self.today is None:
            return None
        return self.answers.hours_one_gpu + self.hours_features + self.hours_of(self.today) + self.hours_verify

    def hours_of(self, split: Split) -> float:
        return self.workload.steps * split.step(one_process=self.one_process) / 3600

    @property
    def limit(self) -> str:
        """What limits the run, in one line."""
        parts = {
            f"training, by {self.placings[0].limit(one_process=self.one_process)}": self.hours_training,
            "the target's answers, by reading its key-value cache and weights": self.hours_answers,
            "making the features": self.hours_features,
            "verification, by Python": self.hours_verify,
        }
        name, hours = max(parts.items(), key=lambda item: item[1])
        return f"{name} ({hours / self.hours:.0%} of the time)"

    def record(self) -> dict[str, Any]:
        """Return the plan for JSON, with what it derives."""
        derived = ("step", "hours_answers", "hours_training", "hours", "hours_today", "limit")
        placings = [
            {**asdict(s), "step": s.step(one_process=self.one_process), "words": s.words()} for s in self.placings
        ]
        return asdict(self) | {"placings": placings} | {name: getattr(self, name) for name in derived}


def make_plan(config: RunConfig, target: TargetShape, gpu: Gpu, gpus: int, workload: Workload) -> Plan:
    """Return the plan. Raises ConfigError for what the model does not cover or no GPU of this kind could hold."""
    _check_covered(config)
    drafter = drafter_of(config, target)
    micro = _micro(config, drafter, workload, config.train.micro_batch)
    soft, cached = config.train.soft_weight > 0, config.data.features == "cached"
    one_process, recorded = config.topology.workers == "threads", config.compile.cuda_graphs
    usable = memory.USABLE * gpu.memory
    work, found = _placings(config, drafter, target, micro, gpu, gpus)
    on_target = memory.target_memory(drafter, target, micro, turns=Turns(targets=1, drafters=1), soft=soft)
    if not found:
        most = max(count for count in range(1, gpus + 1) if work.pieces % count == 0)
        on_drafter = _held(config, drafter, target, micro, most)
        need = max(sum(on_drafter.values()), 0.0 if cached else sum(on_target.values()))
        raise ConfigError(
            f"a micro-batch of {micro.rows} rows needs {need / 2**30:.0f} GiB, {gpu.name} has {usable / 2**30:.0f}",
            where="train.micro_batch",
            fix=f"Lower it or train.num_anchors, {_sharding(config, drafter, target, micro, gpu, gpus)}or plan for "
            "another --gpu.",
        )
    chosen = best(found, one_process=one_process)
    on_drafter = _held(config, drafter, target, micro, chosen.drafters)
    step = chosen.step(one_process=one_process)
    runnable = [split for split in found if runs_today(config, split)]
    feature = memory.feature_bytes(drafter, micro, soft=soft)
    tokens = workload.samples * (workload.prompt_tokens + workload.answer_tokens)
    # The cache stage runs transformers' forward over one sample at a time.
    one = costs.Micro(rows=1, length=workload.prompt_tokens + workload.answer_tokens, anchors=0, block=1)
    once = costs.target_seconds(target, one, gpu).alone
    return Plan(
        gpu=gpu,
        gpus=gpus,
        target=target,
        drafter_parameters=costs.drafter_parameters(drafter),
        workload=workload,
        micro=micro,
        pieces=work.pieces,
        one_process=one_process,
        recorded=recorded,
        tflop_step=work.pieces * costs.drafter_flops(drafter, micro).total / 1e12,
        work=work,
        placings=_best_for_each(found, one_process=one_process),
        today=best(runnable, one_process=one_process) if runnable else None,
        step_of_processes=min((s.step(one_process=False) for s in found if _for_processes(s)), default=None),
        faster_micro=_faster_micro(config, drafter, target, gpu, gpus, workload, step),
        drafter_memory=on_drafter,
        target_memory={} if cached else on_target,
        shared_bytes=sum(on_drafter.values()) + sum(on_target.values()) - memory.table_bytes(target),
        feature_rate=feature * work.pieces / chosen.drafters / step,
        feature_storage=tokens * feature / micro.tokens,
        answers=_answers(config, target, gpu, workload, usable),
        hours_features=workload.samples * once / 3600 if cached else 0.0,
        hours_verify=_verify_seconds(config, drafter, target, gpu) / 3600,
    )


def _check_covered(config: RunConfig) -> None:
    wrong = {
        "train.precision": (config.train.precision, "bf16"),
        "target.dtype": (config.target.dtype, "bfloat16"),
    }
    for key, (value, wanted) in wrong.items():
        if value != wanted:
            what = f"is {value}, and the model knows GPUs with {wanted} only"
            raise ConfigError(what, where=key, fix=f"Plan with --set {key}={wanted}.")


def _head_rows(config: RunConfig) -> int:
    """Return config.head_rows as it is on a GPU."""
    return config.train.head_chunk_rows or (512 if config.train.soft_weight else 2048)


def samples_in_row(config: RunConfig, tokens: int) -> int:
    """Return how many samples of `tokens` tokens share a row."""
    return max(1, min(config.data.samples_per_row, config.data.buckets[-1] // tokens))


def _micro(config: RunConfig, drafter: DrafterConfig, workload: Workload, rows: int) -> Micro:
    """Return a micro-batch of `rows` rows in the bucket of a mean row; config.py makes sure that one holds it."""
    tokens = workload.prompt_tokens + workload.answer_tokens
    in_row = samples_in_row(config, tokens) * tokens
    length = next(bucket for bucket in config.data.buckets if in_row <= bucket)
    anchors = config.train.num_anchors * config.data.samples_per_row  # places are there for all that may be packed
    return Micro(rows=rows, length=length, anchors=anchors, block=drafter.block_size)


def _held(config: RunConfig, drafter: DrafterConfig, target: TargetShape, micro: Micro, drafters: int) -> memory.Parts:
    """Return what the GPU of one of `drafters` holds."""
    return memory.drafter_memory(
        drafter,
        target,
        micro,
        head_rows=_head_rows(config),
        soft=config.train.soft_weight > 0,
        keepers=drafters if config.topology.shard_optimizer else 1,
    )


def _sharding(config: RunConfig, drafter: DrafterConfig, target: TargetShape, micro: Micro, gpu: Gpu, gpus: int) -> str:
    """Return the advice to shard the optimizer, if a micro-batch fits then."""
    placing = config.topology.model_copy(update={"workers": "processes", "shard_optimizer": True})
    sharded = config.model_copy(update={"topology": placing})
    fits = not config.topology.shard_optimizer and _placings(sharded, drafter, target, micro, gpu, gpus)[1]
    return "set topology.workers: processes and topology.shard_optimizer: true, " if fits else ""


def _placings(
    config: RunConfig, drafter: DrafterConfig, target: TargetShape, micro: Micro, gpu: Gpu, gpus: int
) -> tuple[Work, list[Split]]:
    """Return the work of a step in such micro-batches, and every placing that fits in memory."""
    soft, cached, recorded = config.train.soft_weight > 0, config.data.features == "cached", config.compile.cuda_graphs
    nothing, sharded, counts = costs.Seconds(0.0, 0.0), config.topology.shard_optimizer, range(1, gpus + 1)
    work = Work(
        pieces=config.train.batch_size // micro.rows,
        drafter=costs.drafter_seconds(drafter, micro, gpu, soft=soft, recorded=recorded),
        target=nothing if cached else costs.target_seconds(target, micro, gpu, recorded=recorded),
        optimizer=costs.optimizer_seconds(drafter, gpu),
        kept=tuple(costs.kept_share(drafter, count) for count in counts) if sharded else (),
    )
    exchange = [costs.exchange_seconds(drafter, gpu, count, sharded=sharded) for count in counts]
    usable = memory.USABLE * gpu.memory

    def fits(split: Split) -> bool:
        held = sum(_held(config, drafter, target, micro, split.drafters).values())
        if not split.targets:
            return held <= usable
        turns = Turns(targets=split.targets, drafters=split.drafters)
        beside = memory.target_memory(drafter, target, micro, turns=turns, soft=soft)
        if split.shared:
            return held + sum(beside.values()) - memory.table_bytes(target) <= usable
        return max(held, sum(beside.values())) <= usable

    found = splits(work, gpus, exchange, cached=cached)
    threads = config.topology.workers == "threads"
    return work, [split for split in found if (threads or _for_processes(split)) and fits(split)]


def _for_processes(split: Split) -> bool:
    """Return whether each drafter's process has a target of its own, as pipeline/config.py demands, or needs none."""
    return split.targets in (0, split.drafters)


def _best_for_each(found: list[Split], *, one_process: bool) -> list[Split]:
    """Return the fastest placing, then those of all GPUs alike and of each number of targets apart, by their steps."""
    groups = {s.targets for s in found if not s.shared}
    each = [[s for s in found if not s.shared and s.targets == count] for count in groups]
    each.append([s for s in found if s.shared and s.targets in (0, s.drafters)])
    first = best(found, one_process=one_process)
    rest = {best(group, one_process=one_process) for group in each if group} - {first}
    return [first, *sorted(rest, key=lambda s: (s.step(one_process=one_process), s.gpus, s.targets))]


def runs_today(config: RunConfig, split: Split) -> bool:
    """Return whether pipeline/config.py accepts the placing."""
    first = 0 if split.shared else split.targets
    places = {
        "targets": [f"cuda:{i}" for i in range(max(1, split.targets))],
        "drafters": [f"cuda:{first + i}" for i in range(split.drafters)],
        "workers": config.topology.workers,
    }
    try:
        RunConfig.model_validate({**config.model_dump(), "topology": places})
    except ValidationError:
        return False
    return True


def _faster_micro(
    config: RunConfig,
    drafter: DrafterConfig,
    target: TargetShape,
    gpu: Gpu,
    gpus: int,
    workload: Workload,
    step: float,
) -> tuple[int, float] | None:
    """Return the train.micro_batch whose best placing is the fastest, if that is worth while."""
    one_process = config.topology.workers == "threads"
    times = {}
    for rows in (n for n in range(1, config.train.batch_size + 1) if config.train.batch_size % n == 0):
        micro = _micro(config, drafter, workload, rows)
        _, found = _placings(config, drafter, target, micro, gpu, gpus)
        if found:
            times[rows] = best(found, one_process=one_process).step(one_process=one_process)
    rows, least = min(times.items(), key=lambda item: (round(item[1] / step, 2), item[0]))
    return (rows, least / step) if least < WORTH * step else None


def _answers(config: RunConfig, target: TargetShape, gpu: Gpu, workload: Workload, usable: float) -> Answers:
    slots = config.data.max_prompt_tokens + config.data.max_answer_tokens
    most = memory.most_rows(target, slots, usable)
    if not most:
        raise ConfigError(
            f"the target and one answer of {slots} tokens need more than the {usable / 2**30:.0f} GiB of {gpu.name}",
            where="target.source",
            fix="Plan for another --gpu; a target over several GPUs is not there.",
        )
    rows = min(config.data.generate_batch, most, workload.samples)
    seconds = costs.answer_seconds(target, rows, workload.prompt_tokens, workload.answer_tokens, gpu)
    own = costs.answer_seconds(target, rows, 1, workload.prompt_tokens, gpu)
    own_hours = costs.OWN_TEXTS * workload.own_prompts / rows * own / 3600
    return Answers(
        rows=rows,
        most_rows=most,
        tokens_per_second=rows * workload.answer_tokens / seconds,
        hours_one_gpu=workload.samples / rows * seconds / 3600 + own_hours,
    )


def _verify_seconds(config: RunConfig, drafter: DrafterConfig, target: TargetShape, gpu: Gpu) -> float:
    """Return what decoding both sets in float32 takes, all prompts of one at once, plainly and with the drafter, if one
    prompt's tokens are accepted one by one: by Python or by reading the weights, whichever is longer. Roughly."""
    call = max(costs.TARGET_HOST * target.layers, 2 * 4 * target.parameters / gpu.copy)
    draft = costs.DRAFTER_HOST / 3 * drafter.num_hidden_layers  # a forward alone
    return 2 * config.verify.max_new_tokens * (call + call + draft)
