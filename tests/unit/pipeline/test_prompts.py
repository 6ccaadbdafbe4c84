from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import PromptSource, RunConfig
from pipeline.errors import ConfigError, DataError
from pipeline.prompts import Prompt, PromptSets, WrittenPrompts, collect_prompts, load_prompts, read_jsonl
from pipeline.rendering import render_prompt
from tests.tiny import MASK_ID, tiny_tokenizer

GOOD = b'{"id": "a", "prompt": "Hello"}\n'


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(content: bytes) -> Path:
        path = tmp_path / "train.jsonl"
        path.write_bytes(content)
        return path

    return write_file


def complaint(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(path))
    return text.removeprefix(str(path))


def test_three_shapes_of_a_line_give_the_same_prompt(write: Callable[[bytes], Path]) -> None:
    lines = [
        {"prompt": "Hello"},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    ]
    path = write("\n".join(map(json.dumps, lines)).encode())
    prompts = read_jsonl(path)
    assert [prompt.messages for prompt in prompts] == [[{"role": "user", "content": "Hello"}]] * 3
    assert [prompt.id for prompt in prompts] == [f"{path.name}:{number}" for number in (1, 2, 3)]


def test_earlier_turns_and_the_system_message_stay(write: Callable[[bytes], Path]) -> None:
    turns = [("system", "Be brief"), ("human", "One"), ("gpt", "1"), ("human", "Two"), ("gpt", "2")]
    path = write(json.dumps({"conversations": [{"from": who, "value": text} for who, text in turns]}).encode())
    assert [m["role"] for m in read_jsonl(path)[0].messages] == ["system", "user", "assistant", "user"]


def test_ids_of_mixed_type_are_allowed(write: Callable[[bytes], Path]) -> None:
    """huggingface/datasets#7664: text and number ids in one file."""
    path = write(GOOD + b'{"id": 7, "prompt": "Bye"}\n{"prompt": "So long"}\n')
    assert [prompt.id for prompt in read_jsonl(path)] == [f"{path.name}{place}" for place in ("#a", "#7", ":3")]


def test_a_byte_order_mark_and_blank_lines_are_passed_over(write: Callable[[bytes], Path]) -> None:
    assert len(read_jsonl(write(b"\xef\xbb\xbf" + GOOD + b"\r\n  \n"))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b'{"prompt": "Hel', ":2: is not JSON .*looks cut off"),
        (GOOD + b'{"prompt": "Hel\n' + GOOD, ":2: is not JSON .*one JSON object per line"),
        (GOOD + b'{"prompt": "a"} {"prompt": "b"}\n', ":2: two objects on one line"),
        (b'[\n{"prompt": "a"}\n]\n', ":1: an array begins here"),
        (b'[{"prompt": "a"}]\n', ":1: an array instead of an object"),
        (b'"a"\n', ":1: a bare str instead of an object"),
        (GOOD + b'{"prompt": null}\n', ':2: "prompt" is null, not text'),
        (b'{"messages": [{"role": "user", "content": null}]}\n', ':1: user "content" is null'),
        (b'{"messages": [{"role": "user"}]}\n', ':1: user "content" is null'),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}\n', ":1: .*not text"),
        (b'{"messages": [{"role": "robot", "content": "a"}]}\n', ":1: \"role\" is 'robot'"),
        (b'{"messages": "Hello"}\n', ':1: "messages" is not a list'),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', ":1: holds no user message"),
        (b'{"prompt": "  "}\n', ':1: "prompt" is empty'),
        (b'{"text": "a"}\n', ":1: has only text"),
        (b'{"prompt": "a", "messages": []}\n', ":1: has prompt and messages"),
        (b'{"id": [1], "prompt": "a"}\n', ":1: id .1. is neither"),
        (GOOD + GOOD, ":2: id 'a' was used on line 1"),
        (GOOD + b'{"prompt": "\xff"}\n', ":2: byte 13 is not UTF-8"),
        (b'{"prompt": "cut \\ud83d"}\n', r':1: "prompt" holds half a character, .ud83d'),
        (GOOD + b"[" * 100_000 + b"\n", ":2: brackets nested too deep"),
        (GOOD + b'{"id": ' + b"9" * 5000 + b', "prompt": "a"}\n', ":2: holds a number that is too long"),
        (b"", ": holds no prompts"),
        (b"\n \n", ": holds no prompts"),
    ],
)
def test_a_broken_line_is_named_with_file_and_line(
    write: Callable[[bytes], Path], content: bytes, message: str
) -> None:
    """huggingface/datasets#6460, #4107: "JSON parse error in row 0" helps nobody."""
    path = write(content)
    assert re.match(message, complaint(path))


def test_sources_that_mean_nothing_are_config_errors(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a")
    for source, message in [
        (str(tmp_path / "none.jsonl"), "does not exist"),
        (str(tmp_path / "a.csv"), "no .jsonl file"),
        ("wikki", "Did you mean wiki"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_prompts(source, tmp_path)


def run_config(folder: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "t",
            "target": {"source": "x"},
            "data": {
                "train": [
                    {"source": str(folder / "a.jsonl"), "count": 12},
                    {"source": str(folder / "b.jsonl"), "count": 6},
                ],
                "held_out": 6,
                "out_of_domain": {"source": str(folder / "ood.jsonl"), "count": 5},
                "max_prompt_tokens": 80,
                **data,
            },
            "drafter": {"mask_token_id": MASK_ID},
            "train": {"steps": 1},
            "verify": {"num_prompts": 4},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sources = {
        "a": [f"a {i}" for i in range(30)] + [f"A  {i}" for i in range(30)] + ["a long one " * 10],
        "b": [f"b {i}" for i in range(20)] + [f"a {i}" for i in range(30)],
        "ood": [f"o {i}" for i in range(9)],
    }
    for name, texts in sources.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return tmp_path


def collect(config: RunConfig) -> PromptSets:
    return collect_prompts(config, Path("unused"), tiny_tokenizer())


def keys(prompts: list[Prompt]) -> set[str]:
    return {prompt.text_key() for prompt in prompts}


def test_held_out_prompts_share_no_text_with_training(folder: Path) -> None:
    sets = collect(run_config(folder))
    assert [len(sets.train), len(sets.held_out), len(sets.out_of_domain)] == [18, 6, 5]
    everything = [*sets.train, *sets.held_out, *sets.out_of_domain]
    assert len(keys(everything)) == len({prompt.id for prompt in everything}) == 29
    for count, of_a in ((6, 4), (3, 2)):  # in the proportion 12 to 6, in every beginning as well
        assert sum("a.jsonl" in prompt.id for prompt in sets.held_out[:count]) == of_a


def test_the_configuration_that_a_run_keeps_can_be_started_again(folder: Path) -> None:
    """It names every field, also those that mean nothing for a source."""
    config = run_config(folder)
    again = RunConfig.model_validate(config.model_dump())
    assert again == config and collect(again) == collect(config)


def test_the_same_text_in_train_and_out_of_domain_is_used_once(folder: Path) -> None:
    config = run_config(folder, out_of_domain={"source": str(folder / "a.jsonl"), "count": 5})
    sets = collect(config)
    assert not keys(sets.out_of_domain) & keys([*sets.train, *sets.held_out])


def test_the_seed_decides_the_draw(folder: Path) -> None:
    config = run_config(folder)
    assert collect(config) == collect(config)
    other = collect(config.model_copy(update={"seed": 1}))
    assert [p.id for p in other.train] != [p.id for p in collect(config).train]


def test_the_folder_of_the_files_decides_nothing(folder: Path, tmp_path: Path) -> None:
    """Neither which prompts are drawn, nor their ids, which draw the anchors: a moved data set trains the same."""
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in folder.glob("*.jsonl"):
        (moved / file.name).write_bytes(file.read_bytes())
    assert collect(run_config(moved)) == collect(run_config(folder))


def test_files_of_the_same_name_are_told_apart(folder: Path) -> None:
    """Otherwise two samples would have the same id, and so the same anchors."""
    (folder / "b").mkdir()
    other = folder / "b" / "a.jsonl"
    other.write_bytes((folder / "b.jsonl").read_bytes())
    sources = [{"source": str(path), "count": 6} for path in (folder / "a.jsonl", other)]
    sets = collect(run_config(folder, train=sources))
    everything = [*sets.train, *sets.held_out, *sets.out_of_domain]
    assert len({prompt.id for prompt in everything}) == len(everything)
    assert {prompt.id.split(":")[0] for prompt in everything} == {"a.jsonl", "a.jsonl(2)", "ood.jsonl"}


def test_more_held_out_prompts_leave_the_training_set_alone(folder: Path) -> None:
    one_source = [{"source": str(folder / "a.jsonl"), "count": 12}]
    few, many = (collect(run_config(folder, train=one_source, held_out=n)) for n in (4, 8))
    assert few.train == many.train and many.held_out[:4] == few.held_out


def test_prompts_over_the_limit_are_left_out_and_counted(folder: Path) -> None:
    everything = [{"source": str(folder / "a.jsonl"), "count": 26}]
    limit = len(render_prompt(tiny_tokenizer(), [{"role": "user", "content": "A  10"}]))
    sets = collect(run_config(folder, train=everything, held_out=4, max_prompt_tokens=limit))
    assert sets.skipped_too_long <= 1 and len(sets.train) == 26
    with pytest.raises(DataError, match=r"a.jsonl: 30 usable prompts, 31 are wanted .*61 in all, 30 repeated, 1 over"):
        collect(run_config(folder, train=everything, held_out=5, max_prompt_tokens=limit))


def test_more_prompts_to_decode_than_there_are_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify.num_prompts: 4 .*data.held_out is 3"):
        collect(run_config(folder, held_out=3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"out_of_domain": {"source": "target", "count": 5}}, "data.out_of_domain.source: 'target' is the domain of"),
        ({"train": [{"source": "target", "count": 1}] * 2}, "data.train: 'target' is named 2 times"),
        ({"train": [{"source": "target", "count": 1}]}, "data.train: 'target' needs the target"),
        (
            {"train": [{"source": "a.jsonl", "count": 1}, {"source": "wiki", "count": 1, "temperature": 1.5}]},
            "data.train.1.temperature: 1.5 changes nothing: 'wiki' is not written by the target",
        ),
        (
            {"out_of_domain": {"source": "wiki", "count": 5, "temperature": 0.5}},
            "data.out_of_domain.temperature: 0.5 changes nothing",
        ),
    ],
)
def test_the_targets_own_prompts_are_asked_for_once_and_in_training_only(
    folder: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        collect(run_config(folder, **data))
    assert str(caught.value).startswith(message)


def test_a_name_close_to_the_targets_is_corrected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean target"):
        load_prompts("targt", tmp_path)


def test_prompts_that_the_target_wrote_are_not_drawn_from_a_later_source(folder: Path) -> None:
    """What the writer is told: how many, which out-of-domain texts, and what other sources gave before."""
    asked: list[tuple[int, set[str], int]] = []

    def write(source: PromptSource, wanted: int, outside: Collection[str], seen: Collection[str]) -> WrittenPrompts:
        asked.append((wanted, set(outside), len(seen)))
        own = [Prompt(id=f"target/{i}", messages=[{"role": "user", "content": f"B  {i}"}]) for i in range(wanted)]
        return WrittenPrompts(prompts=own, counts={"written": 40, "kept": wanted})

    sources = ["a", "target", "b"]
    train = [{"source": name if name == "target" else str(folder / f"{name}.jsonl"), "count": 9} for name in sources]
    config = run_config(folder, train=train, held_out=6)
    sets = collect_prompts(config, Path("unused"), tiny_tokenizer(), write=write)
    assert [prompt.id for prompt in sets.train[9:18]] == [f"target/{i}" for i in range(9)]
    assert [prompt.id for prompt in sets.held_out if prompt.id.startswith("target/")] == ["target/9", "target/10"]
    outside = {" ".join(prompt.messages[0]["content"].split()) for prompt in sets.out_of_domain}
    assert asked[0][:2] == (11, outside) and asked[0][2] >= 5 + 9 + 2
    assert len(keys([*sets.train, *sets.held_out])) == 33
    assert sets.own == {"written": 40, "kept": 11}
