"""A whole run that takes seconds: a tiny target, two prompts files, a configuration, and the stages in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from dflash.config import DrafterConfig
from pipeline import commands
from pipeline.checkpoints import latest_checkpoint, load_checkpoint
from pipeline.config import RunConfig, load_config
from pipeline.metrics import read
from pipeline.rendering import Sample, make_sample
from pipeline.runs import Run
from tests.tiny import MASK_ID, tiny_target

MASK_TOKEN_ID = 300
"""A row of the tiny target's embedding that its tokenizer never gives; the random target never writes it either."""

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "target": {"source": "target-qwen3"},
    "data": {
        "train": [{"source": "train.jsonl", "count": 20}],
        "held_out": 4,
        "out_of_domain": {"source": "other.jsonl", "count": 4},
        "max_prompt_tokens": 48,
        "max_answer_tokens": 16,
        "generate_batch": 8,
        "buckets": [64],
        "shard_samples": 8,
    },
    "drafter": {"num_layers": 1, "block_size": 4, "target_layer_ids": [0, 2], "mask_token_id": MASK_TOKEN_ID},
    "train": {
        "steps": 12,
        "batch_size": 8,
        "micro_batch": 2,
        "num_anchors": 8,
        "learning_rate": 3.0e-3,
        "checkpoint_every": 6,
    },
    "topology": {"targets": ["cpu"], "drafters": ["cpu", "cpu"]},
    "compile": {"backend": "aot_eager"},
    "verify": {
        "num_prompts": 2,
        "max_new_tokens": 12,
        "min_tau": 1.0,
        "min_tau_gain": -1.0,
        "min_tau_gain_out_of_domain": -1.0,
        "min_throughput_ratio": 0.0,
    },
}
"""20 samples, 8 a step: 3 steps an epoch, the last one short."""


def write_prompts(path: Path, texts: Iterable[str]) -> Path:
    """Write one {"prompt": text} a line."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@dataclass(frozen=True)
class TinyRun:
    """A folder with target, prompts, config.yaml and what is computed of them; `use` it before anything else."""

    folder: Path
    runs: Path

    @classmethod
    def make(cls, folder: Path) -> TinyRun:
        tiny_target(folder)
        write_prompts(folder / "train.jsonl", (f"Tell me about {i}." for i in range(40)))
        write_prompts(folder / "other.jsonl", (f"Add {i} and {i + 1}!" for i in range(10)))
        made = cls(folder, folder / "runs")
        made.config_path.write_text(yaml.safe_dump(made.settings()), encoding="utf-8")
        return made

    @property
    def environment(self) -> dict[str, str]:
        """The variables that choose this bench's places."""
        return {"DFLASH_CACHE": str(self.folder / "cache"), "DFLASH_RUNS": str(self.runs)}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Send what is computed to the folder, and runs to `runs`."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    @property
    def config_path(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def target(self) -> Path:
        return self.folder / "target-qwen3"

    def settings(self) -> dict[str, Any]:
        """Return SETTINGS with the paths of this folder."""
        settings = json.loads(json.dumps(SETTINGS))
        settings["target"]["source"] = str(self.target)
        settings["data"]["train"][0]["source"] = str(self.folder / "train.jsonl")
        settings["data"]["out_of_domain"]["source"] = str(self.folder / "other.jsonl")
        return settings

    def config(self, *overrides: str) -> RunConfig:
        return load_config(self.config_path, list(overrides))

    def run(self, *overrides: str) -> Run:
        """Return the run of the configuration with `overrides`, whether it was begun or not."""
        config = self.config(*overrides)
        return Run(self.runs / config.run_id(), config)

    def go(self, *overrides: str, stages: Sequence[str] = ("cache", "train", "verify"), **how: Any) -> Run:
        """Run the stages that are not finished, as the command line does, and return the run.

        The real stages in this process, without the child process that asks torch for the compile cache's key.
        """
        for stage in stages:
            commands.train(
                self.config_path,
                list(overrides),
                only=stage,
                checks=lambda root: [],
                functions=commands._real_stages(),
                **how,
            )
        return self.run(*overrides)


def logged_losses(run: Run) -> list[float]:
    """Return the logged losses, in the order of their steps."""
    return [record["loss"] for record in read(run.metrics_path)]


def saved_weights(run: Run) -> dict[str, Tensor]:
    """Return the weights of the latest checkpoint."""
    return _latest(run)["weights"]


def saved_tensors(run: Run) -> dict[str, Tensor]:
    """Return all tensors of the latest checkpoint, the optimizer's too, by file and name."""
    return {f"{stem}.{name}": tensor for stem, named in _latest(run).items() for name, tensor in named.items()}


def _latest(run: Run) -> dict[str, dict[str, Tensor]]:
    path = latest_checkpoint(run.checkpoints_dir, print)
    assert path is not None
    return load_checkpoint(path).tensors


def tiny_drafter(**changes: Any) -> DrafterConfig:
    """Return a drafter of width 16 with vocabulary 320, block 4 and two taps, for tests without a target."""
    values: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 320,
        "block_size": 4,
        "mask_token_id": MASK_ID,
        "target_layer_ids": (0, 1),
        "num_target_layers": 4,
        "rope_theta": 10000.0,
    }
    return DrafterConfig(**(values | changes))


def tiny_config(**sections: Mapping[str, Any]) -> RunConfig:
    """Return SETTINGS for one drafter, with some fields of its sections changed: train={"steps": 3}."""
    settings = json.loads(json.dumps(SETTINGS))
    settings["topology"]["drafters"] = ["cpu"]
    for name, fields in sections.items():
        settings[name] |= fields
    return RunConfig.model_validate(settings)


def made_up_samples(count: int, prompt_len: int = 5, answer_len: int = 12) -> list[Sample]:
    """Return samples of different lengths whose tokens tell which sample and position they are from (ids 10 to 309)."""
    return [
        make_sample(
            f"sample-{i}",
            [10 + (37 * i + t) % 300 for t in range(prompt_len + i % 3)],
            [10 + (37 * i + 100 + t) % 300 for t in range(answer_len + i % 4)],
        )
        for i in range(count)
    ]
