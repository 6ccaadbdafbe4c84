"""What a person gets for input that cannot be used: one line, exit 2, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline import commands
from pipeline.__main__ import main
from pipeline.data import read_samples
from tests import foreign_drafters
from tests.tiny import EOS_ID, PAD_ID, START_ID, VOCAB_SIZE
from tests.tiny_run import TinyRun

ROOT = Path(__file__).resolve().parents[2]


class CommandLine:
    """`python -m pipeline train` of a bench, in this process, without looking for the compile cache's key."""

    def __init__(self, bench: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
        self.bench, self.capsys = bench, capsys

    def refuses(self, *overrides: str, stage: str = "cache") -> str:
        """Run it with `overrides`, check that it ends as it should in `stage`, and return the line."""
        self.capsys.readouterr()
        assert main(["train", "--config", str(self.bench.config_path), *overrides]) == 2
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        self.check_nothing_is_half_written(stage)
        # What is no part of the message: progress, and warnings of the environment's check.
        lines = [line for line in err.splitlines() if not re.match(r"warning: |target (answers|features): \d+/", line)]
        assert len(lines) == 1, err
        return lines[0]

    def check_nothing_is_half_written(self, stage: str) -> None:
        """A run that never began is gone; one that failed later only tells what was tried."""
        for run in self.bench.runs.glob("*/config.yaml"):
            assert stage == "train", f"{run.parent.name} is left of a run that never began"
            names = {path.name for path in run.parent.iterdir() if not path.name.startswith(".")}
            assert names == {"config.yaml", "fingerprint.json", "stages.json", "report.html", "cache.json"}
            states = {e["name"]: e["state"] for e in json.loads((run.parent / "stages.json").read_text())["stages"]}
            assert states[stage] == "failed"
        if stage == "cache":
            assert not os.path.lexists(self.bench.runs / "latest")
        for root in (self.bench.runs, self.bench.folder):
            assert [path for path in root.rglob("*.tmp")] == []


@pytest.fixture
def command(bench: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.setattr(commands, "compile_factors", lambda root: {})
    monkeypatch.setattr(commands, "set_cache_variables", lambda config, caches, factors: "")
    return CommandLine(bench, capsys)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lerning_rate=1.0", "learning_rate"),
        ("train.steps=many", "train.steps"),
        ("train.steps=4.5", "train.steps"),
        ("drafter.block_size=1", "drafter.block_size"),
        ("data.buckets=[32]", "max_prompt_tokens + max_answer_tokens = 64"),
        ("train.micro_batch=3", "batch_size 8 is not a multiple of micro_batch 3"),
        ("drafter.mask_token_id=-1", "drafter.mask_token_id"),
        ("topology.drafters=[cpu, cpu, cpu]", "4 micro-batches do not divide among 3 drafters"),
        ("topology.drafters=[gpu]", "topology.drafters"),
        ("topology.targets=[cpu, cpu]", "topology: targets names cpu more than once"),
        ("nothing", "is not section.field=value"),
    ],
)
def test_a_wrong_key_or_value_is_named_and_no_run_is_begun(command: CommandLine, override: str, expected: str) -> None:
    assert expected in command.refuses(override)
    assert not command.bench.runs.exists()


def test_a_wrong_key_in_the_file_is_named_with_its_line(command: CommandLine, tmp_path: Path) -> None:
    text = command.bench.config_path.read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("num_anchors:", "num_ankers:"))
    number = next(i for i, line in enumerate(wrong.read_text().splitlines(), start=1) if "num_ankers" in line)
    assert main(["train", "--config", str(wrong)]) == 2
    err = command.capsys.readouterr().err.strip()
    assert err.startswith(f"{wrong}:{number}: ")
    assert "num_ankers" in err and "num_anchors" in err
    assert "\n" not in err


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (VOCAB_SIZE, f"drafter.mask_token_id: {VOCAB_SIZE} is outside the target's embedding of {VOCAB_SIZE} rows"),
        (EOS_ID, f"drafter.mask_token_id: {EOS_ID} is the target's pad or EOS token (<|im_end|>)"),
        (PAD_ID, f"drafter.mask_token_id: {PAD_ID} is the target's pad or EOS token (<|endoftext|>)"),
        (START_ID, f"drafter.mask_token_id: {START_ID} (<|im_start|>) is written into every prompt"),
    ],
)
def test_a_mask_token_that_the_target_uses_or_lacks_is_refused(command: CommandLine, token: int, expected: str) -> None:
    line = command.refuses(f"drafter.mask_token_id={token}")
    assert line.startswith(expected)
    assert "Unused here: 4, 3" in line


def test_a_mask_token_that_occurs_in_the_data_is_refused_with_sample_and_position(
    command: CommandLine, bench: TinyRun
) -> None:
    token = AutoTokenizer.from_pretrained(bench.target).convert_tokens_to_ids("T")  # of "Tell me about 1."
    line = command.refuses(f"drafter.mask_token_id={token}")
    assert line.startswith(f"drafter.mask_token_id: token {token} occurs in the data (sample train.jsonl:")
    assert line.endswith("Choose a token that no text contains, or remove the prompt.")
    answers = next((bench.folder / "cache" / "data").glob("answers-*"))
    number, position = (int(part) for part in line.split("train.jsonl:")[1].split(")")[0].split(", position "))
    sample = next(s for s in read_samples(answers / "train.jsonl") if s.id == f"train.jsonl:{number}")
    assert sample.input_ids[position] == token


def test_taps_that_the_target_does_not_have_are_refused(command: CommandLine) -> None:
    line = command.refuses("drafter.target_layer_ids=[1, 4]")
    assert line.startswith("drafter.target_layer_ids: [1, 4]")
    line = command.refuses("drafter.target_layer_ids=null", "drafter.num_taps=40")
    assert line.startswith("drafter.target_layer_ids: a target of 4 layers has no 40 evenly spread taps")


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("drafters", ["topology.drafters=[cpu, cuda:99]"]),
        ("targets", ["topology.targets=[cuda:99]"]),
        ("targets", ["topology.targets=[cpu, cuda:99]", "data.features=online"]),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(command: CommandLine, field: str, overrides: list[str]) -> None:
    line = command.refuses(*overrides)
    assert line.startswith(f"topology.{field}: cuda:99 does not exist, this machine has ")


def test_a_missing_target_folder_is_named(command: CommandLine) -> None:
    line = command.refuses("target.source=./no/such/folder")
    assert line.startswith("target.source: folder './no/such/folder' does not exist.")


def test_a_target_of_another_architecture_is_refused(command: CommandLine, bench: TinyRun, tmp_path: Path) -> None:
    other = tmp_path / "gpt2"
    shutil.copytree(bench.target, other)
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (other / "config.json").write_text(json.dumps(config))
    line = command.refuses(f"target.source={other}")
    assert line == (
        f"{other}/config.json: architecture is GPT2LMHeadModel. "
        "Supported targets: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM. "
        "For this one nobody has proved that its layers' outputs are what a tap should be."
    )


def test_answers_of_one_token_give_nothing_to_train_on(command: CommandLine) -> None:
    line = command.refuses("data.max_answer_tokens=1")
    assert line.startswith("data.train: no supervised tokens to train on: 20 samples hold 20, nowhere two in a row.")
    assert "raise data.max_answer_tokens" in line


def test_a_broken_line_of_a_prompts_file_is_named_by_file_and_line(command: CommandLine, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "one"}\n{"prompt": "two}\n{"prompt": "three"}\n')
    for key in ("data.train.0.source", "data.out_of_domain.source"):
        assert command.refuses(f"{key}={broken}").startswith(f"{broken}:2: is not JSON (")


def test_fewer_prompts_than_wanted_are_counted(command: CommandLine) -> None:
    line = command.refuses("data.train.0.count=100")
    assert "40 usable prompts, 104 are wanted (4 to hold out)" in line


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("config.json", lambda path: path.unlink(), "no such file"),
        ("model.safetensors", lambda path: path.unlink(), "no such file"),
        ("model.safetensors", lambda path: path.write_bytes(b"no tensors"), "cannot be read"),
    ],
)
def test_a_drafter_to_start_from_that_is_not_whole_is_refused(
    command: CommandLine, tmp_path: Path, name: str, damage: Callable[[Path], object], expected: str
) -> None:
    folder = tmp_path / "drafter"
    foreign_drafters.write(folder, foreign_drafters.zlab_config(), foreign_drafters.body())
    damage(folder / name)
    shape = ("drafter.num_layers=2", "drafter.target_layer_ids=[1, 3]")
    stage = "cache" if name == "config.json" else "train"  # what is needed first: the shape, then the weights
    line = command.refuses(f"train.init_from={folder}", *shape, stage=stage)
    assert expected in line
    assert str(folder) in line


def test_the_real_command_says_the_same_in_a_process_of_its_own(bench: TinyRun) -> None:
    arguments = ["train", "--config", str(bench.config_path), "drafter.block_size=1"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=ROOT,
        env={**os.environ, **bench.environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "drafter.block_size" in done.stderr
    assert not bench.runs.exists()
