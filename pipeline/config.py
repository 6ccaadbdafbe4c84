"""The run's configuration: frozen, strict models of the YAML in configs/.

YAML keys equal field names; an unknown key is an error that offers the nearest name. The docstring under a field
gives its unit, the reason for its default and its effect. Overrides are `section.field=value`, parsed as YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.config_errors import as_config_error
from pipeline.errors import ConfigError
from pipeline.yaml_file import Location, parse_value, read_yaml

ROW_LEVELS = 4
"""More cost memory and seconds in the warm-up; fewer run the head over more slots that nothing is learned from."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, data: Any) -> Any:
        """Let a YAML list be a tuple. Everything else stays strict: "4", 4.0 and true are not the number 4."""
        if isinstance(data, dict):
            return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return data


class TargetConfig(Section):
    source: str
    """A name in lockfiles/models.yaml, a local folder in Hugging Face format, or a hub id (`revision` required)."""
    revision: str | None = None
    """Commit of a hub id; never used with a folder or a named model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the frozen target's weights and of the features. Lossless decoding is always proved in float32."""


class PromptSource(Section):
    source: str
    """A name in lockfiles/models.yaml (wiki, mt-bench, human-eval, ...) or a .jsonl file, one conversation a line; in
    data.train also `target`: the target writes the prompts itself (own_prompts.py)."""
    count: int = Field(gt=0)
    """Prompts taken from it, drawn without replacement by the run's seed."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the target's sampling when it writes the prompts itself; lower is plainer and repeats more."""


class DataConfig(Section):
    train: tuple[PromptSource, ...] = Field(min_length=1)
    """Prompts that the target answers for training."""
    held_out: int = Field(default=16, gt=0)
    """Further prompts of the same sources that training never sees; in-domain tau is measured on them."""
    out_of_domain: PromptSource
    """Prompts of another kind; out-of-domain tau is measured on them."""
    system_prompt: str | None = None
    """Text of a system message put before each conversation; null keeps the chat template's own default."""
    max_prompt_tokens: int = Field(default=96, gt=0)
    """Tokens; longer prompts are left out and counted in the manifest."""
    max_answer_tokens: int = Field(default=64, gt=0)
    """Tokens; answers are cut there (then they have no EOS)."""
    generate_batch: int = Field(default=32, gt=0)
    """Prompts that the target answers at once. Changes speed and memory; rounding may move a near-tie."""
    buckets: tuple[int, ...] = (256,)
    """Sequence lengths in tokens, ascending. A sample is padded to the first that holds it; each is compiled."""
    samples_per_row: int = Field(default=1, gt=0)
    """Samples packed in one row at most. They do not see each other; num_anchors counts for each. Needs one bucket."""
    features: Literal["cached", "online"] = "cached"
    """cached: target features are computed once and kept as shards; online: the target runs beside the drafters."""
    shard_samples: int = Field(default=64, gt=0)
    """Samples in one shard of cached features."""

    @model_validator(mode="after")
    def _ascending(self) -> DataConfig:
        if list(self.buckets) != sorted(set(self.buckets)) or not self.buckets or self.buckets[0] <= 0:
            raise ValueError(f"buckets {list(self.buckets)} must be positive and ascending, e.g. [128, 256]")
        if self.samples_per_row > 1 and len(self.buckets) > 1:
            raise ValueError(
                f"samples_per_row {self.samples_per_row} packs rows of one length, buckets {list(self.buckets)} are "
                f"{len(self.buckets)}: keep one"
            )
        longest = self.max_prompt_tokens + self.max_answer_tokens
        if longest > self.buckets[-1]:
            raise ValueError(
                f"the largest bucket {self.buckets[-1]} does not hold max_prompt_tokens + max_answer_tokens = {longest}"
            )
        return self


class DrafterSection(Section):
    num_layers: int = Field(default=1, gt=0)
    """Draft layers L."""
    block_size: int = Field(default=4, ge=2)
    """Slots B in a block: the clean anchor and B-1 drafted tokens."""
    target_layer_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Tapped decoder layers, 0-based outputs; null spreads `num_taps` of them evenly (anatomy 1.2)."""
    num_taps: int = Field(default=5, gt=0)
    """Taps K when target_layer_ids is null; not tied to num_layers."""
    mask_token_id: int = Field(ge=0)
    """A row of the target's embedding that is neither pad nor EOS and never occurs in the data."""
    intermediate_size: int | None = Field(default=None, gt=0)
    """FFN width; null takes the target's."""
    head: Literal["plain", "dflash2", "markov"] = "plain"
    """dflash2: DFlash 2's convolution and path selector; markov: a bias from the token before. Both start as plain."""
    head_rank: int = Field(default=256, gt=0)
    """Rank of the selector's or the Markov bias's tables, vocabulary x rank each."""
    attention: Literal["auto", "flex", "sdpa", "eager"] = "auto"
    """auto: flex on CUDA, sdpa elsewhere. The same numbers within rounding."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(default=None, min_length=1)
    """One per draft layer; null makes all full."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Tokens W: a sliding layer's slot sees keys with position > own position - W."""
    is_causal: bool | None = False
    """True: a slot sees only itself and earlier slots of its block. null: in sliding layers only."""
    window_reading: Literal["slot", "anchor"] = "slot"
    """How sliding_window hangs; "anchor" is speculators' (dflash/config.py)."""


class TrainConfig(Section):
    steps: int = Field(gt=0)
    """Optimizer steps."""
    batch_size: int = Field(default=8, gt=0)
    """Rows in one optimizer step, over all workers and micro-batches; a row is a sample, unless they are packed."""
    micro_batch: int = Field(default=2, gt=0)
    """Rows in one forward of one worker; batch_size must be a multiple of it."""
    num_anchors: int = Field(default=16, gt=0)
    """Anchors N drawn per sample and epoch; each starts one block."""
    learning_rate: float = Field(default=6e-4, gt=0)
    """Peak of AdamW's learning rate. The loss divides by the sum of weights: the batch layout does not matter."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The cosine ends at learning_rate * min_lr_ratio."""
    warmup_ratio: float = Field(default=0.04, ge=0, le=1)
    """Share of the steps with a linearly rising learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the gradient's first and second moment."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of the averaged gradient."""
    loss: Literal["decay", "dpace"] = "decay"
    """Slot weights: exp(-(i-1)/gamma), or D-PACE (arXiv 2605.18810)."""
    gamma: float | None = Field(default=None, gt=0)
    """Decay length in slots; null takes 7/5/4 for blocks of 16/10/8 (the paper's), block_size / 2 otherwise."""
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    """D-PACE's floor."""
    soft_weight: float = Field(default=0.0, ge=0, le=1)
    """Share s of soft labels: (1 - s) cross-entropy of the target's token + s KL of its distribution. 0: hard only."""
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of the drafter's matmuls; master weights, norms, rotary angles and reductions stay in float32. fp8: as
    bf16, but the layers' products and, for hard labels, the head's; GPUs of capability 8.9 on; exports are bf16."""
    checkpoint_every: int = Field(default=100, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    head_chunk_rows: int | None = Field(default=None, gt=0)
    """Supervised slots whose logits exist at once; bounds the head's memory: 2 bytes x vocabulary a row in bf16 on a
    GPU with hard labels and a plain drafter, else 4 to 12. None: 2048 in that case, 512 in others."""
    keep_checkpoints: int = Field(default=2, gt=0)
    """Newest checkpoints that are kept."""
    log_every: int = Field(default=1, gt=0)
    """Steps between lines of metrics.jsonl."""
    evaluate_every: int = Field(default=100, ge=0)
    """Steps between measurements of tau on held-out text; also before the first step and after the last. 0: never."""
    init_from: str | None = None
    """Folder of an exported drafter to start from; null starts from random weights."""

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        if self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and below 1")
        return self


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]*)", name):
        raise ValueError(f"{name!r} is no device: name cpu, or cuda:0, cuda:1, ...")
    return name


Device = Annotated[str, AfterValidator(_device)]


class TopologyConfig(Section):
    targets: tuple[Device, ...] = Field(default=("cpu",), min_length=1)
    """A copy of the frozen target for each entry. With data.features online each has a thread that makes every n-th
    micro-batch's features; the losses do not depend on their number. Of processes each has a copy of its own: then one
    entry for each drafter, and a device may be named more than once. Answers are written by the first one alone."""
    drafters: tuple[Device, ...] = Field(default=("cpu", "cpu"), min_length=1)
    """One worker with its own drafter replica for each entry; a device may be named more than once, by processes only
    cpu. Of processes on several hosts these are each host's."""
    workers: Literal["threads", "processes"] = "threads"
    """threads: one process, a thread per drafter. processes: one per drafter (pipeline/ranks.py)."""
    shard_optimizer: bool = False
    """Of processes: each keeps the float32 weights and moments of some parameters only (pipeline/sharded.py), for
    drafters that would not fit. The same bits either way; a checkpoint holds all, for any number of processes."""

    @model_validator(mode="after")
    def _one_copy_each(self) -> TopologyConfig:
        repeated = sorted({name for name in self.targets if self.targets.count(name) > 1})
        if repeated and self.workers == "threads":
            raise ValueError(
                f"targets names {', '.join(repeated)} more than once, and a second copy there would only cost memory"
            )
        return self

    @model_validator(mode="after")
    def _shards_among_processes(self) -> TopologyConfig:
        if self.shard_optimizer and self.workers == "threads":
            raise ValueError("shard_optimizer is for workers: processes; of threads each keeps all of its optimizer")
        return self

    @model_validator(mode="after")
    def _a_gpu_for_each_process(self) -> TopologyConfig:
        if self.workers == "threads":
            return self
        gpus = [name for name in self.drafters if name != "cpu"]
        if gpus and (len(gpus) < len(self.drafters) or len(set(gpus)) < len(gpus)):
            raise ValueError(
                f"drafters {', '.join(self.drafters)}: with workers processes each needs a GPU of its own, or all are "
                "on the cpu (NCCL refuses two processes on one GPU)"
            )
        return self


class CompileConfig(Section):
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """Backend of torch.compile for the drafter's body; aot_eager traces the same graphs without code generation."""
    on_miss: Literal["raise", "park"] = "raise"
    """A compile after the warm-up is an error, or (park) is done with every worker parked, and counted."""
    cuda_graphs: bool = True
    """On GPUs the warm-up records forward and backward of each shape, and steps replay them: Python no longer launches
    their kernels one by one. false: easier to debug and profile, slower where the drafter is small."""


class VerifyConfig(Section):
    num_prompts: int = Field(default=8, gt=0)
    """Held-out prompts, and as many out-of-domain ones, that are decoded."""
    max_new_tokens: int = Field(default=48, gt=0)
    """Tokens decoded per prompt."""
    min_tau: float = Field(default=1.15, ge=1)
    """In-domain tau (tokens per target call) that the drafter must reach."""
    min_tau_gain: float = Field(default=0.15, ge=-1)
    """In-domain tau that it must have over the untrained drafter; below 0 it may have less."""
    min_tau_gain_out_of_domain: float = Field(default=0.02, ge=-1)
    """The same on prompts of another kind."""
    min_throughput_ratio: float = Field(default=0.5, ge=0, le=1)
    """Median tokens/s of the last half of training over that of its first tenth."""


class RunConfig(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)
    """Prefix of the run's folder."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds prompts, anchors, order and initial weights."""
    target: TargetConfig
    data: DataConfig
    drafter: DrafterSection
    train: TrainConfig
    topology: TopologyConfig = TopologyConfig()
    compile: CompileConfig = CompileConfig()
    verify: VerifyConfig = VerifyConfig()

    @property
    def recorded(self) -> bool:
        """Whether steps are CUDA graphs."""
        return self.compile.cuda_graphs and self.topology.drafters[0] != "cpu"

    @property
    def row_levels(self) -> int | None:
        """In how many shapes the loss's rows come (`dflash.make_rows`); a graph knows only its own."""
        return ROW_LEVELS if self.recorded else None

    @property
    def head_rows(self) -> int:
        """Supervised slots whose logits exist at once."""
        plain = self.train.soft_weight == 0 and self.drafter.head == "plain"
        return self.train.head_chunk_rows or (2048 if plain and self.topology.drafters[0] != "cpu" else 512)

    @model_validator(mode="after")
    def _block_in_bucket(self) -> RunConfig:
        if self.drafter.block_size > self.data.buckets[-1]:
            raise ValueError(
                f"drafter.block_size {self.drafter.block_size} is longer than the largest of data.buckets, "
                f"{self.data.buckets[-1]}"
            )
        return self

    @model_validator(mode="after")
    def _fp8_on_gpus(self) -> RunConfig:
        if self.train.precision == "fp8" and "cpu" in self.topology.drafters:
            raise ValueError(
                f"train.precision fp8 needs GPUs, and topology.drafters are {', '.join(self.topology.drafters)}; "
                "use bf16 or fp32"
            )
        return self

    @model_validator(mode="after")
    def _work_for_every_target(self) -> RunConfig:
        if self.data.features == "cached" and len(self.topology.targets) > 1:
            raise ValueError(
                f"data.features cached are made by one target, and topology.targets are "
                f"{', '.join(self.topology.targets)}: name one, or let features be online"
            )
        return self

    @model_validator(mode="after")
    def _a_target_for_every_process(self) -> RunConfig:
        places, targets, drafters = self.topology, len(self.topology.targets), len(self.topology.drafters)
        if self.data.features == "online" and places.workers == "processes" and targets != drafters:
            raise ValueError(
                f"topology.targets names {targets}, topology.drafters {drafters}: of processes with features online "
                f"each has a copy of the target of its own, so name {drafters}; a device may be named again"
            )
        return self

    @model_validator(mode="after")
    def _work_for_every_drafter(self) -> RunConfig:
        pieces, drafters = self.train.batch_size // self.train.micro_batch, len(self.topology.drafters)
        if pieces % drafters:
            raise ValueError(
                f"train.batch_size / train.micro_batch = {pieces} micro-batches do not divide among "
                f"{drafters} drafters: some would wait for the others in every step"
            )
        return self

    def run_id(self) -> str:
        """Return `<name>-<hash>`: the same configuration always means the same run folder.

        What changes no bit of a run is left out: one that ran out of memory goes on with a sharded optimizer.
        """
        text = json.dumps(self.model_dump(mode="json", exclude={"topology": {"shard_optimizer"}}), sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Return the checked configuration of `path` with `overrides` ("section.field=value") applied.

    Raises ConfigError with the file, line and key for whatever cannot be used.
    """
    if not path.is_file():
        raise ConfigError("no such configuration file", where=str(path), fix="configs/ holds the presets.")
    data, lines = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError("must be a mapping of sections", where=str(path), fix="Compare with configs/quickstart.yaml.")
    applied: dict[Location, str] = {}
    for text in overrides or []:
        applied[_apply_override(data, text)] = text
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise as_config_error(error, RunConfig, path, lines, applied) from None


def _apply_override(data: dict[str, Any], text: str) -> Location:
    """Set one value in `data` and return its place; a number in the key picks a list's entry (data.train.0.count)."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r} is not section.field=value", fix="For example train.steps=50.")
    try:
        parsed = parse_value(value)
    except yaml.YAMLError:
        raise ConfigError(f"value {value!r} is not YAML", where=f"override {text}", fix="Quote it.") from None
    node: Any = data
    loc: list[int | str] = []
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(
                    f"{'.'.join(parts[:depth])} is a list of {len(node)}, {part!r} is no entry of it",
                    where=f"override {text}",
                    fix="Entries count from 0.",
                )
            index: Any = int(part)
        elif isinstance(node, dict):
            index = part
            if not last and node.get(part) is None:
                node[part] = {}
        else:
            raise ConfigError(
                f"{'.'.join(parts[:depth])} has no fields", where=f"override {text}", fix="Name a section's field."
            )
        loc.append(index)
        if last:
            node[index] = parsed
        else:
            node = node[index]
    return tuple(loc)
