"""`invoke plan`: the arguments become a plan, which is printed; --check prints the model against what was measured."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from env.caches import CacheDirs
from pipeline.catalogue import OWN_SOURCE
from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError, VerificationFailed
from pipeline.files import atomic_write_json
from pipeline.plan.gpus import gpu_of
from pipeline.plan.points import points
from pipeline.plan.report import Workload, make_plan, samples_in_row
from pipeline.plan.shapes import given_shape, local_shape
from pipeline.plan.table import check_lines, lines

ROOT = Path(__file__).resolve().parents[2]


def plan(
    config_path: Path,
    overrides: list[str],
    *,
    gpu: str,
    gpus: int | None,
    shape: str,
    samples: int | None,
    prompt_tokens: int | None,
    answer_tokens: int | None,
    epochs: int | None,
    json: Path | None,
) -> int:
    """Print the plan of a configuration and return 0.

    gpus            None: those that the configuration names, at least one
    shape           the target's, when its config.json is not here (pipeline/plan/shapes.py)
    samples, tokens means of what the prompts will give; None: what the configuration asks for at most
    epochs          instead of train.steps
    Raises ConfigError for what cannot be planned.
    """
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"{json} is in no folder that exists", where="--json", fix="Make it first.")
    config = load_config(config_path, overrides)
    target = given_shape(shape) if shape else local_shape(config.target, CacheDirs.from_environment(ROOT))
    load = workload(config, samples, prompt_tokens, answer_tokens, epochs)
    made = make_plan(config, target, gpu_of(gpu), gpus or _named_gpus(config), load)
    table = Table("what", str(config_path), box=None, pad_edge=False)
    for what, value in lines(made):
        table.add_row(Text(what), Text(value))
    Console(highlight=False).print(table)
    if json is not None:
        atomic_write_json(json, {"config": config.model_dump(mode="json"), **made.record()})
    return 0


def workload(
    config: RunConfig,
    samples: int | None = None,
    prompt_tokens: int | None = None,
    answer_tokens: int | None = None,
    epochs: int | None = None,
) -> Workload:
    """Return how much there is to do, as given or as the configuration says. Raises ConfigError."""
    data = config.data
    for flag, value, most, key in (
        ("--prompt-tokens", prompt_tokens, data.max_prompt_tokens, "data.max_prompt_tokens"),
        ("--answer-tokens", answer_tokens, data.max_answer_tokens, "data.max_answer_tokens"),
    ):
        if value is not None and value > most:
            raise ConfigError(f"{value} is above {key}, {most}", where=flag, fix=f"Lower it, or --set {key}={value}.")
    count = samples or sum(source.count for source in data.train)
    prompt, answer = prompt_tokens or data.max_prompt_tokens, answer_tokens or data.max_answer_tokens
    rows = -(-count // samples_in_row(config, prompt + answer))
    own = sum(source.count for source in data.train if source.source == OWN_SOURCE)
    return Workload(
        own_prompts=count * own // sum(source.count for source in data.train),
        samples=count,
        prompt_tokens=prompt,
        answer_tokens=answer,
        rows=rows,
        steps=epochs * -(-rows // config.train.batch_size) if epochs else config.train.steps,
    )


def check() -> int:
    """Print the model against every measured point and return 0. Raises VerificationFailed when one is off by more than
    its bound."""
    found = points()
    table = Table("one H200", "measured", "model", "error", "bound", "", box=None, pad_edge=False)
    for line in check_lines(found):
        table.add_row(*map(Text, line))
    Console(highlight=False).print(table)
    if off := [point.name for point in found if not point.holds]:
        fix = "Fit the constants of pipeline/plan/costs.py and memory.py anew."
        raise VerificationFailed(f"the model is off at {', '.join(off)}", where="invoke plan --check", fix=fix)
    return 0


def _named_gpus(config: RunConfig) -> int:
    named = {*config.topology.targets, *config.topology.drafters}
    return max(1, sum(name.startswith("cuda") for name in named))
