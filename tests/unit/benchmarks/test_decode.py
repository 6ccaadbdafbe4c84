"""The benchmark of decoding: tiny runs on the CPU, its arithmetic, and what fails it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode
from benchmarks.decode import Timed, faults, summary
from dflash.checkpoint import save_drafter
from dflash.decode import Decoded
from pipeline.data import write_samples
from pipeline.rendering import make_sample
from tests.drafters import random_drafter
from tests.tiny_run import TinyRun, write_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("--device", "cpu", "--prompts", "2", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = TinyRun.make(tmp_path_factory.mktemp("decode"))
    return made.folder


@pytest.fixture
def tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    made = TinyRun(folder, folder / "runs")
    made.use(monkeypatch)
    return made


def timed(tokens: list[int], accepted: list[int], prompt: float, seconds: float) -> Timed:
    return Timed(Decoded(tokens, accepted, [3] * len(accepted)), prompt, seconds)


PAIRS = [
    (timed([1, 2, 3, 4, 5], [0] * 4, 0.5, 4.0), timed([1, 2, 3, 4, 5], [1, 1], 0.5, 1.0)),
    (timed([1, 2, 3], [0] * 2, 0.5, 2.0), timed([1, 2, 9], [0, 0], 0.5, 2.0)),
    (timed([7], [], 0.5, 0.1), timed([7], [], 0.5, 0.2)),
]


def test_a_row_counts_steps_tokens_and_texts_by_hand() -> None:
    row = summary("set", [4, 5, 6], PAIRS)
    assert (row.prompts, row.prompt_tokens, row.tokens, row.identical) == (3, 15, 9, 2)
    assert row.first_difference == "prompt 1, token 2"
    assert row.all_ratios == (4.0, 1.0) and row.ratio_median == 2.5
    assert row.plain_rate == pytest.approx(6 / 6.1) and row.speculative_rate == pytest.approx(6 / 3.2)
    assert row.ratio == pytest.approx(6.1 / 3.2) and row.ratio_whole == pytest.approx(7.6 / 4.7)
    assert row.tau == pytest.approx(6 / 4)
    assert row.plain_ms == pytest.approx(6100 / 6) and row.speculative_ms == pytest.approx(3200 / 4)
    assert row.break_even_tau == pytest.approx((3200 / 4) / (6100 / 6))


def test_a_text_that_differs_is_a_fault_in_float32_and_a_count_in_bfloat16() -> None:
    row = summary("set", [4, 5, 6], PAIRS)
    (line,) = faults([row], torch.float32, 0)
    assert "1 texts differ" in line and "prompt 1, token 2" in line
    assert faults([row], torch.bfloat16, 0) == [] == faults([summary("set", [4], PAIRS[:1])], torch.float32, 0)
    assert "2 compiles after the warm-up" in faults([row], torch.bfloat16, 2)[0]


def test_a_random_drafter_shows_what_a_step_costs(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    source, record = tiny.folder / "other.jsonl", tiny.folder / "record.json"
    arguments = ["--random-drafter", "--target", str(tiny.target), "--source", str(source), "--json", str(record)]
    arguments += ["--num-layers", "1", "--block-size", "4", "--dtype", "float32", *SMALL]
    assert decode.main(arguments) == 0
    written = json.loads(record.read_text())
    (row,) = written["rows"]
    assert (row["name"], row["prompts"], row["tokens"], row["identical"]) == ("other", 2, 12, 2)
    assert row["break_even_tau"] == pytest.approx(row["speculative_ms"] / row["plain_ms"])
    assert (written["drafted"], written["compiled"], written["compiles_after_warmup"]) == (3, False, 0)
    assert written["command"].startswith("python -m benchmarks.decode --random-drafter") and written["faults"] == []
    out = capsys.readouterr().out
    assert "pays at" in out and "other" in out and "cache stage's decoder" in out


def test_a_run_is_measured_on_its_own_prompts_and_others(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that comes out otherwise is exit 4 in float32."""
    run = finished(tiny)
    more = write_prompts(tiny.folder / "more.jsonl", ["Write a very long text. " * 40, "Write a text."])
    record = tiny.folder / "run.json"
    arguments = [str(run), "--source", str(more), "--dtype", "float32", "--json", str(record), *SMALL]
    assert decode.main(arguments) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [(row["name"], row["prompts"]) for row in rows] == [("held_out", 2), ("out_of_domain", 2), ("more", 1)]
    assert rows[0]["prompt_tokens"] == 7

    take = decode.decode_timed

    def altered(decoder: Any, prompt: Any, new: int) -> Timed:
        found = take(decoder, prompt, new)
        if decoder.drafter is not None:
            found.decoded.tokens[-1] += 1
        return found

    monkeypatch.setattr(decode, "decode_timed", altered)
    assert decode.main(arguments) == 4
    assert len(json.loads(record.read_text())["faults"]) == 3


def finished(tiny: TinyRun) -> Path:
    """Return the folder of a run with an exported drafter and answers, made without running its stages."""
    run = tiny.run()
    answers = tiny.folder / "cache" / "data" / "answers-made-up"
    answers.mkdir(parents=True)
    for name in decode.RUN_SETS:
        write_samples(
            answers / f"{name}.jsonl", [make_sample(f"{name}-{i}", [10 + i] * (3 + i), [9]) for i in range(3)]
        )
    run.folder.mkdir(parents=True)
    run.config_path.write_text(tiny.config_path.read_text())
    run.manifest_path("cache").write_text(json.dumps({"answers": {"folder": f"/elsewhere/{answers.name}"}}))
    drafter = random_drafter()
    save_drafter(run.drafter_dir, drafter.config, dict(drafter.named_parameters()), torch.float32)
    return run.folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "RUN: is missing"),
        (("--random-drafter", "--source", "x.jsonl"), "--random-drafter: needs --target"),
        (("--random-drafter", "--target", "TARGET"), "--source: is missing"),
        (
            ("--random-drafter", "--target", "TARGET", "--source", "OTHER", "--max-prompt-tokens", "3"),
            "at most 3 tokens",
        ),
        (("no-such-run",), "no-such-run: no such run"),
        (("no-such-run", "--json", "no/such/folder.json"), "--json: no/such/folder.json is in no folder"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_2(
    tiny: TinyRun, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"TARGET": str(tiny.target), "OTHER": str(tiny.folder / "other.jsonl")}
    assert decode.main([places.get(word, word) for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
