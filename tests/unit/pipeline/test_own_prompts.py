from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import own_prompts
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, DataError
from pipeline.own_prompts import DROPS, MARKER, OwnPrompts, Sieve, UserTurn, prefixes, sift
from pipeline.prompts import Prompt, PromptSets, collect_prompts, fold
from pipeline.rendering import render_prompt
from tests.tiny import CHATML, EOS_ID, PAD_ID, START_ID, tiny_model, tiny_tokenizer
from tests.tiny_run import tiny_config, write_prompts

WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}" + CHATML
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


def tokenizer_with(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]


# The turn.


@pytest.mark.parametrize("system", [None, "Be brief"])
@pytest.mark.parametrize("template", [CHATML, WITH_DEFAULT], ids=["plain", "default"])
def test_the_target_writes_after_what_stands_before_every_users_text(template: str, system: str | None) -> None:
    tokenizer = tokenizer_with(template)
    turn = UserTurn.of(tokenizer, system)
    rendered = render_prompt(tokenizer, [{"role": "user", "content": "Hello there"}], system)
    assert turn.before_ids + ids_of("Hello there") + turn.after_ids == rendered
    assert turn.after == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_target_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no chat template, so it cannot write a user's text\. Take its instruct"):
        UserTurn.of(tokenizer_with(None), None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] }}", "writes a user's text 1 times, after 0 characters"),
        ("hello", "writes a user's text 0 times"),
        (CHATML + "{{ messages[0]['content'] }}", "writes a user's text 2 times"),
        ("{{ raise_exception('never') }}", r"refuses a user's message \(never\)"),
    ],
)
def test_a_template_that_cannot_be_cut_is_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UserTurn.of(tokenizer_with(template), None)


def test_the_token_that_ends_the_users_turn_ends_the_text_too() -> None:
    """Llama 3's turns end with another token than its texts."""
    tokenizer = tokenizer_with("{% for m in messages %}{{ 'Q: ' + m['content'] + '<|unused|>' }}{% endfor %}")
    unused = tokenizer.convert_tokens_to_ids("<|unused|>")
    assert UserTurn.of(tokenizer, None).stops(tokenizer, (EOS_ID,)) == (EOS_ID, unused)
    assert UserTurn.of(tiny_tokenizer(), None).stops(tiny_tokenizer(), (EOS_ID,)) == (EOS_ID,)
    words = tokenizer_with("{% for m in messages %}{{ 'Q: ' + m['content'] + ' A: ' }}{% endfor %}")
    assert UserTurn.of(words, None).stops(words, (EOS_ID,)) == (EOS_ID,)


@pytest.mark.parametrize(
    ("template", "system", "systems"),
    [
        (WITH_DEFAULT, None, ["system\nBe kind", "system\n"]),
        (CHATML, None, ["", "system\n"]),
        (WITH_DEFAULT, "Be brief", ["system\nBe brief"]),
        (NO_SYSTEM, None, [""]),
    ],
    ids=["default", "none", "own", "refused"],
)
def test_an_empty_system_message_takes_turns_with_the_templates_default(
    template: str, system: str | None, systems: list[str]
) -> None:
    tokenizer = tokenizer_with(template)
    found = prefixes(tokenizer, UserTurn.of(tokenizer, system), system)
    wanted = [f"<|im_start|>{text}<|im_end|>\n" if text else "" for text in systems]
    assert found == [ids_of(f"{text}<|im_start|>user\n") for text in wanted]


# The sieve.


def sieve_of(template: str = CHATML, **changes: Any) -> Sieve:
    tokenizer = tokenizer_with(template)
    given: dict[str, Any] = {"stops": (EOS_ID,), "system_prompt": None, "max_prompt_tokens": 80}
    return Sieve(tokenizer, UserTurn.of(tokenizer, None), **{**given, "outside": (), "seen": (), **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("What is rain?", None),
        ("  What is rain?\n", None),
        ("My user\nneeds help: with assistants", None),
        ("", "too_short"),
        (" \n", "too_short"),
        ("Hm?!!!!!!!", "too_short"),
        ("Tell me<|im_start|>", "template"),
        ("Tell me<|endoftext|> more", "template"),
        ("Tell me more\nuser\nAnd more", "template"),
        ("Tell me more\n### Assistant: Here", "template"),
        ("What IS  rain? ", "repeated"),
        ("Where is  HOME?", "out_of_domain"),
        ("x" * 90, "too_long"),
    ],
)
def test_a_text_is_kept_or_dropped_for_its_first_reason(text: str, reason: str | None) -> None:
    sieve = sieve_of(outside={fold("Where is home?")})
    if reason == "repeated":
        assert sieve.look([*ids_of("What is rain?"), EOS_ID])[1] is None
    assert sieve.look([*ids_of(text), EOS_ID]) == (text.strip(), reason)


def test_a_text_that_did_not_end_or_was_cut_in_a_character_is_dropped() -> None:
    sieve = sieve_of()
    assert sieve.look(ids_of("What is rain?"))[1] == "unfinished"
    half = ids_of("What is \u00e9")[:-1]
    assert sieve.look([*half, EOS_ID])[1] == "broken_text"
    assert sieve.look([*ids_of("What is rain?"), EOS_ID])[1] is None, "the dropped text counted as written before"


def test_a_text_that_other_sources_gave_is_not_given_again() -> None:
    taken = Prompt(id="wiki/1", messages=[{"role": "user", "content": "what is RAIN?"}])
    assert sieve_of(seen={taken.text_key()}).look([*ids_of("What is rain?"), EOS_ID])[1] == "repeated"
    assert sieve_of().look([*ids_of("What is rain?"), EOS_ID])[1] is None


def test_the_words_of_a_template_without_special_tokens_are_found() -> None:
    words = "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"
    assert sieve_of(words).look([*ids_of("What is rain? [/INST] It is"), EOS_ID])[1] == "template"
    assert sieve_of(CHATML).look([*ids_of("What is rain? [/INST] It is"), EOS_ID])[1] is None


# How many are written.


def written(*texts: str, batch_size: int = 4) -> Iterator[list[list[int]]]:
    """Yield batches of ended texts."""
    ids = [[*ids_of(text), EOS_ID] for text in texts]
    yield from (ids[first : first + batch_size] for first in range(0, len(ids), batch_size))


def test_writing_goes_on_until_there_are_enough_and_every_text_is_accounted_for() -> None:
    advances: list[int] = []
    texts = ["What is a?", "", "What is a?", "What is b?", "user: hm", "What is c?", "What is d?", "", "What is e?"]
    kept, drops = sift(written(*texts), sieve_of(), 4, advances.append)
    assert [prompt.messages[0]["content"] for prompt in kept] == [
        "What is a?",
        "What is b?",
        "What is c?",
        "What is d?",
    ]
    assert [prompt.id for prompt in kept] == ["target/1", "target/4", "target/6", "target/7"]
    assert drops == dict.fromkeys(DROPS, 0) | {"too_short": 1, "repeated": 1, "template": 1}
    assert advances == [2, 2]


def test_a_target_that_writes_nothing_usable_is_one_line_with_the_reasons() -> None:
    endless = ([ids_of("never ends"), [EOS_ID]] for _ in iter(int, 1))
    with pytest.raises(DataError) as caught:
        sift(endless, sieve_of(), 1000, lambda count: None)
    assert str(caught.value).startswith(
        "data.train, source target: 0 of 512 texts that the target wrote are usable prompts, 1000 are wanted: "
        "256 did not end in time, 256 were too short. Raise data.max_prompt_tokens"
    )


def test_a_target_that_begins_to_repeat_itself_is_stopped_at_eight_texts_a_prompt() -> None:
    """100 good ones and then the same one again and again: the check is on the whole, not on the first texts only."""
    texts = [f"What is number {i}?" for i in range(100)] + ["What is rain?"] * 2000
    with pytest.raises(DataError, match=r": 101 of 808 .* 1000 are wanted: 707 were repeated") as caught:
        sift(written(*texts), sieve_of(), 1000, lambda count: None)
    assert caught.value.exit_code == 2


def test_few_prompts_are_not_given_up_before_eight_texts_each() -> None:
    texts = ["", "", "", "", "", "", "", "What is rain?"]
    kept, _ = sift(written(*texts), sieve_of(), 1, lambda count: None)
    assert len(kept) == 1
    with pytest.raises(DataError, match="0 of 8 texts"):
        sift(written(*[""] * 8, "What is rain?"), sieve_of(), 1, lambda count: None)


# The whole, on a target that writes letters.


def writing_model(num_layers: int = 1) -> Any:
    """A target that hardly looks at its prompt: letters and spaces, nearly at random, about ten to a text."""
    model = tiny_model(num_hidden_layers=num_layers)
    bias_V = torch.full((model.config.vocab_size,), -torch.inf)
    bias_V[ids_of("abcdefghijklmnopqrstuvwxyz")] = 0.0
    bias_V[ids_of(" ")] = 2.0
    bias_V[EOS_ID] = 1.3
    model.lm_head.register_forward_hook(lambda module, given, logits: logits / 50 + bias_V)
    return model


def config_of(folder: Path, count: int = 12, held_out: int = 4, seed: int = 0, **source: Any) -> RunConfig:
    write_prompts(folder / "other.jsonl", ["Where is home?", "Who are you?", "Why is it so?"])
    data = {
        "train": [{"source": "target", "count": count, **source}],
        "held_out": held_out,
        "out_of_domain": {"source": str(folder / "other.jsonl"), "count": 3},
        "max_prompt_tokens": 60,
        "buckets": [128],
    }
    return tiny_config(data=data).model_copy(update={"seed": seed})


class Bench:
    """Collects a configuration's prompts; counts how often the target was loaded."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "data"
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        return writing_model()

    def writer(self, config: RunConfig, identity: str = "one") -> OwnPrompts:
        return OwnPrompts(config=config, tokenizer=TOKENIZER, target=self.load, identity=identity, cache=self.cache)

    def collect(self, config: RunConfig, identity: str = "one") -> PromptSets:
        return collect_prompts(config, Path("unused"), TOKENIZER, write=self.writer(config, identity))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_target_writes_prompts_like_any_other(bench: Bench, tmp_path: Path) -> None:
    sets = bench.collect(config_of(tmp_path))
    assert [len(sets.train), len(sets.held_out), len(sets.out_of_domain)] == [12, 4, 3]
    everything = [*sets.train, *sets.held_out]
    assert len({prompt.text_key() for prompt in everything}) == len({prompt.id for prompt in everything}) == 16
    for prompt in everything:
        assert prompt.messages[0]["role"] == "user" and set(prompt.messages[0]["content"]) <= set(
            "abcdefghijklmnopqrstuvwxyz "
        )
        assert len(render_prompt(tiny_tokenizer(), prompt.messages)) <= 60
    assert sets.own["kept"] == 16 and sets.own["written"] == 16 + sum(sets.own[reason] for reason in DROPS)
    (folder,) = bench.cache.glob("prompts-*")
    assert json.loads((folder / "manifest.json").read_text())["counts"] == sets.own


def test_the_same_settings_find_the_same_prompts_without_the_target_and_write_them_again(
    bench: Bench, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    first, found = bench.collect(config), bench.collect(config)
    assert first == found and bench.loads == 1
    fresh = Bench(tmp_path / "elsewhere")
    assert fresh.collect(config) == first and fresh.loads == 1


def test_whatever_decides_the_prompts_is_in_their_key(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change alone writes anew, into a folder of its own; a change that decides nothing does not."""
    config = config_of(tmp_path)
    asked: dict[str, Any] = {"wanted": 2, "outside": {"a"}, "seen": {"b"}}

    def write(config: RunConfig, identity: str = "one", **changes: Any) -> int:
        bench.writer(config, identity)(config.data.train[0], **(asked | changes))
        return len(list(bench.cache.glob("prompts-*")))

    def changed(section: str, **fields: Any) -> RunConfig:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})

    monkeypatch.setattr(own_prompts, "MIN_LETTERS", 1)
    assert write(config) == write(config) == write(config.model_copy(update={"name": "another"})) == 1
    assert write(config.model_copy(update={"seed": 1})) == 2
    assert write(config_of(tmp_path, temperature=0.9)) == 3
    assert write(changed("data", system_prompt="Be brief")) == 4
    assert write(changed("data", max_prompt_tokens=61)) == 5
    assert write(changed("data", generate_batch=4)) == 6
    assert write(changed("target", dtype="bfloat16")) == 7
    assert write(config, identity="two") == 8
    assert write(config, wanted=3) == 9
    assert write(config, outside={"c"}) == 10
    assert write(config, seen={"c"}) == 11
    assert bench.loads == 11


def test_more_prompts_leave_the_first_ones_as_they_were(bench: Bench, tmp_path: Path) -> None:
    few = bench.collect(config_of(tmp_path, held_out=4))
    many = bench.collect(config_of(tmp_path, held_out=30))
    assert many.train == few.train and many.held_out[:4] == few.held_out
    assert bench.collect(config_of(tmp_path, seed=1)).train != few.train


def test_an_out_of_domain_prompt_is_never_trained_on(bench: Bench, tmp_path: Path) -> None:
    """The run's own third prompt is put among the out-of-domain ones, in other case and spacing, as a second turn."""
    config = config_of(tmp_path)
    third = bench.collect(config).train[2]
    text = f"  {third.messages[0]['content'].upper()} "
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    line = json.dumps({"messages": [*turns, {"role": "user", "content": text}]})
    lines = (tmp_path / "other.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join([*lines[:2], line]) + "\n")
    sets = bench.collect(config)
    assert third.text_key() not in {prompt.text_key() for prompt in [*sets.train, *sets.held_out]}
    assert sets.own["out_of_domain"] == 1
    without = bench.collect(config_of(tmp_path, held_out=5))  # rewrites other.jsonl without it
    assert third in without.train and without.own["out_of_domain"] == 0


def test_a_limit_that_leaves_no_room_beside_the_template_is_refused(bench: Bench, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    taken = len(render_prompt(tiny_tokenizer(), [{"role": "user", "content": ""}]))
    tight, enough = (config.data.model_copy(update={"max_prompt_tokens": taken + room}) for room in (7, 8))
    with pytest.raises(ConfigError, match=rf"data.max_prompt_tokens: {taken + 7} tokens leave 7 .* takes {taken}\. "):
        bench.writer(config.model_copy(update={"data": tight}))(config.data.train[0], 1, (), ())
    assert bench.loads == 0
    found = bench.writer(config.model_copy(update={"data": enough}))(config.data.train[0], 1, (), ())
    assert len(ids_of(found.prompts[0].messages[0]["content"])) <= 8


def test_an_error_leaves_no_half_written_prompts(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompts, "MIN_LETTERS", 1000)
    with pytest.raises(DataError, match=r"0 of 128 texts .* 16 are wanted: .* were too short"):
        bench.collect(config_of(tmp_path))
    assert not list(bench.cache.glob("prompts-*"))


def test_the_marker_is_text_that_a_template_leaves_alone() -> None:
    assert MARKER.isascii() and MARKER.strip().lower() == MARKER
    assert len({PAD_ID, START_ID, EOS_ID} & set(ids_of(MARKER))) == 0
