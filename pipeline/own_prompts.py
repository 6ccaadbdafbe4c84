"""Prompts that the target writes itself: data.train's `source: target`.

A chat model that is given its own chat template up to where the user's text begins goes on with a user's text (Magpie,
arXiv 2406.08464). What it writes is as varied as what it was tuned on, and needs no data set. It is sampled, as greedy
text would be one prompt, and much of it is unfit: a text that does not end, repeats another one or holds parts of the
template is dropped and counted.

data.system_prompt stands in front as it does before every prompt that is answered. Where it is null, every other batch
is written after an empty system message instead of the template's default, if the template takes one: SmolLM2 writes
"Can you help me ..." after its default, and sums, code and tasks with conditions after an empty message. With no system
part at all it writes scraps of web pages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.sampling import Sampling
from pipeline.catalogue import OWN_SOURCE
from pipeline.config import PromptSource, RunConfig
from pipeline.data import building, data_key, published, read_data_manifest, write_data_manifest
from pipeline.errors import ConfigError, DataError
from pipeline.metrics import progress_bar
from pipeline.prompts import Prompt, WrittenPrompts, fold
from pipeline.regenerate import sample_texts, stop_ids
from pipeline.rendering import render_prompt

FORMAT = 1
"""Part of the key of what was written: raise it when the same settings write or keep other texts than before."""

MARKER = "dflash-text-of-the-user"
"""Stands for the user's text while the template is cut; no template holds it, trims it or changes its case."""

MIN_LETTERS = 4
"""Letters and digits of the shortest text that is kept: "Hi!" and "???" ask for nothing."""

MIN_TOKENS = 8
"""The least room for a text that data.max_prompt_tokens must leave beside the template."""

MAX_TRIES = 8
"""Texts written for each one kept: a target that needs more does not write prompts."""

FIRST_TRIES = 512
"""Texts written before that is judged, unless fewer than FIRST_TRIES / MAX_TRIES prompts are wanted."""

DROPS = {
    "unfinished": "did not end in time",
    "too_short": "were too short",
    "broken_text": "were cut inside a character",
    "template": "held parts of the chat template",
    "out_of_domain": "were out-of-domain prompts",
    "repeated": "were repeated",
    "too_long": "were too long",
}
"""Why a text is dropped, as the manifest counts it and as the error says it; the first that holds counts."""

ROLE_LINE = re.compile(r"^[^\w\n]*(?:system|user|assistant|human)[^\S\n]*(?::|[^\w\n]*$)", re.IGNORECASE | re.MULTILINE)
"""A line that only names a speaker, or begins with one and a colon: a talk, not a user's message."""


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """What the chat template writes around a user's text."""

    before_ids: list[int]
    after: str
    after_ids: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> UserTurn:
        """Return the turn of a conversation's first user message, `system_prompt` before it as render_prompt puts it.

        Raises ConfigError if the tokenizer has no chat template, or one that does not write the user's text as it is.
        """
        where, name = f"data.train, source {OWN_SOURCE}", getattr(tokenizer, "name_or_path", "") or "the target"
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{name} has no chat template, so it cannot write a user's text",
                where=where,
                fix="Take its instruct version, or another source.",
            )
        messages = [{"role": "user", "content": MARKER}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the chat template of {name} refuses a user's message ({error})",
                where=where,
                fix="Set data.system_prompt: null, or take another source.",
            ) from None
        before, marker, after = text.partition(MARKER)
        if not marker or MARKER in after or not before:
            raise ConfigError(
                f"the chat template of {name} writes a user's text {text.count(MARKER)} times, after {len(before)} "
                "characters: once is needed, after something",
                where=where,
                fix="Take another source.",
            )

        def ids(part: str) -> list[int]:
            return [int(token) for token in tokenizer.encode(part, add_special_tokens=False)]

        return cls(before_ids=ids(before), after=after, after_ids=ids(after))

    def stops(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> tuple[int, ...]:
        """Return what ends the user's text: `stops`, and the special token that the template ends it with, if any."""
        first = self.after_ids[:1]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return (*stops, *(token for token in first if token in special and token not in stops))


def prefixes(tokenizer: PreTrainedTokenizerBase, turn: UserTurn, system_prompt: str | None) -> list[list[int]]:
    """Return what the target's texts are written after: the turn's own beginning, and one of an empty system message
    if the conversation has none and the template takes it and so writes something else."""
    if system_prompt is not None:
        return [turn.before_ids]
    try:
        plain = UserTurn.of(tokenizer, "").before_ids
    except ConfigError:  # the template knows no system message
        return [turn.before_ids]
    return [turn.before_ids] if plain == turn.before_ids else [turn.before_ids, plain]


class Sieve:
    """Tells which written texts are prompts; each is looked at once, in the order of writing."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turn: UserTurn,
        *,
        stops: tuple[int, ...],
        system_prompt: str | None,
        max_prompt_tokens: int,
        outside: Collection[str],
        seen: Collection[str],
    ) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.system_prompt, self.max_prompt_tokens = system_prompt, max_prompt_tokens
        self.outside, self.seen = frozenset(outside), set(seen)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.parts = {part for part in (*special, turn.after.strip()) if part}

    def look(self, ids: list[int]) -> tuple[str, str | None]:
        """Return the text of sampled ids, and the key of DROPS for which it is dropped, None if it is kept."""
        ended = ids[-1] in self.stops
        ids = ids[:-1] if ended else ids
        # As it was written: what the library drops or joins would hide a part of the template.
        text: Any = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.strip(), self._reason(text.strip()) if ended else "unfinished"

    def _reason(self, text: str) -> str | None:
        if sum(map(str.isalnum, text)) < MIN_LETTERS:
            return "too_short"
        if "\ufffd" in text:
            return "broken_text"
        if any(part in text for part in self.parts) or ROLE_LINE.search(text):
            return "template"
        if fold(text) in self.outside:
            return "out_of_domain"
        messages = [{"role": "user", "content": text}]
        if (key := Prompt(id="", messages=messages).text_key()) in self.seen:
            return "repeated"
        self.seen.add(key)
        if len(render_prompt(self.tokenizer, messages, self.system_prompt)) > self.max_prompt_tokens:
            return "too_long"  # the text's own tokens are not always those that were sampled
        return None


@dataclass(frozen=True, kw_only=True)
class OwnPrompts:
    """Writes a run's own prompts, or finds them where an earlier run left them.

    target     loads the model; called only if something is to be written
    identity   of the target's folder (targets.TargetFolder)
    cache      folder where prompts-<key>/ is kept
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    target: Callable[[], PreTrainedModel]
    identity: str
    cache: Path

    def __call__(
        self, source: PromptSource, wanted: int, outside: Collection[str], seen: Collection[str]
    ) -> WrittenPrompts:
        """Return WrittenPrompts with `wanted` prompts, the same for the same settings, machine and arguments.

        outside   folded texts of out-of-domain users
        seen      text keys of the prompts that were taken already; no text of either is given
        What is asked for beyond a smaller `wanted` comes after it and leaves its prompts as they were.
        Raises ConfigError if the target or the settings cannot write prompts, DataError if too few texts are usable.
        """
        data, device = self.config.data, torch.device(self.config.topology.targets[0])
        turn = UserTurn.of(self.tokenizer, data.system_prompt)
        room = data.max_prompt_tokens - len(turn.before_ids) - len(turn.after_ids)
        if room < MIN_TOKENS:
            raise ConfigError(
                f"{data.max_prompt_tokens} tokens leave {room} for a text of the target: its chat template takes "
                f"{len(turn.before_ids) + len(turn.after_ids)}",
                where="data.max_prompt_tokens",
                fix=f"Set it to {data.max_prompt_tokens - room + 32} or more, or take other sources.",
            )
        factors = {
            "format": FORMAT,
            "target": self.identity,
            "dtype": self.config.target.dtype,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "seed": self.config.seed,
            "temperature": source.temperature,
            "system_prompt": data.system_prompt,
            "max_prompt_tokens": data.max_prompt_tokens,
            "generate_batch": data.generate_batch,
            "wanted": wanted,
            "outside": sorted(outside),
            "seen": sorted(seen),
        }
        folder = self.cache / f"prompts-{data_key(factors)}"
        with building(folder):
            manifest = read_data_manifest(folder)
            if manifest is None:
                manifest = self._write(folder, turn, room, source, wanted, outside, seen)
        lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return WrittenPrompts(prompts=[Prompt(**json.loads(line)) for line in lines], counts=manifest["counts"])

    def _write(
        self,
        folder: Path,
        turn: UserTurn,
        room: int,
        source: PromptSource,
        wanted: int,
        outside: Collection[str],
        seen: Collection[str],
    ) -> dict[str, Any]:
        data, model = self.config.data, self.target()
        stops = turn.stops(self.tokenizer, stop_ids(model, self.tokenizer))
        sieve = Sieve(
            self.tokenizer,
            turn,
            stops=stops,
            system_prompt=data.system_prompt,
            max_prompt_tokens=data.max_prompt_tokens,
            outside=outside,
            seen=seen,
        )
        batches = sample_texts(
            model,
            stops,
            prefixes(self.tokenizer, turn, data.system_prompt),
            max_new_tokens=room + 1,  # the stop token
            batch_size=data.generate_batch,
            sampling=Sampling(temperature=source.temperature),
            seeds=_seeds(self.config.seed),
        )
        with progress_bar("target prompts", wanted) as bar:
            kept, drops = sift(batches, sieve, wanted, bar.advance)
        counts = {"written": len(kept) + sum(drops.values()), "kept": len(kept), **drops}
        with published(folder) as temporary:
            lines = (json.dumps({"id": prompt.id, "messages": prompt.messages}) + "\n" for prompt in kept)
            (temporary / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
            return write_data_manifest(temporary, {"counts": counts})


def sift(
    batches: Iterator[list[list[int]]], sieve: Sieve, wanted: int, advance: Callable[[int], None]
) -> tuple[list[Prompt], dict[str, int]]:
    """Return the first `wanted` prompts of sampled batches, and how many texts before the last were dropped for what.

    advance   called with the number of prompts that a batch gave
    Raises DataError once more than MAX_TRIES texts were written for each one kept.
    """
    kept: list[Prompt] = []
    drops: Counter[str] = Counter()
    num_written = 0
    for batch in batches:
        before = len(kept)
        for ids in batch:
            num_written += 1
            text, reason = sieve.look(ids)
            if reason is None:
                kept.append(Prompt(id=f"{OWN_SOURCE}/{num_written}", messages=[{"role": "user", "content": text}]))
            else:
                drops[reason] += 1
            if len(kept) == wanted:
                break
        advance(len(kept) - before)
        if len(kept) == wanted:
            break
        if num_written >= MAX_TRIES * max(len(kept), min(wanted, FIRST_TRIES // MAX_TRIES)):
            causes = ", ".join(f"{drops[reason]} {what}" for reason, what in DROPS.items() if drops[reason])
            raise DataError(
                f"{len(kept)} of {num_written} texts that the target wrote are usable prompts, {wanted} are wanted: "
                f"{causes}",
                where=f"data.train, source {OWN_SOURCE}",
                fix="Raise data.max_prompt_tokens if they did not end, lower the count, or take another source.",
            )
    return kept, {reason: drops[reason] for reason in DROPS}


def _seeds(seed: int) -> Iterator[int]:
    """Yield one seed a batch, hashed into 32 bits so that neighbours have nothing in common."""
    number = 0
    while True:
        digest = hashlib.sha256(f"{seed}/{OWN_SOURCE}/{number}".encode()).digest()
        yield int.from_bytes(digest[:4], "big")
        number += 1
