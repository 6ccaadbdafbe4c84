"""What differs between two runs, in words: `python -m env.diff RUN RUN [--json]`, or `invoke diff`.

Reads config.yaml, fingerprint.json and cache.json of both folders and nothing else, so runs of two hosts can be
compared on a third. Exit 0 when both could be read, whatever differs; 2 when one could not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from env.caches import CacheDirs
from env.errors import EnvError

GROUPS = ("config", "target", "data", "source", "lock", "variables", "gpu", "image", "machine", "other")
"""The likelier a difference is to move the results, the earlier it stands."""

Key = tuple[str, ...]

# What a fingerprint's top-level keys are about. One that is not here is compared as "other": a newer fingerprint must
# not look equal because this table is old.
_GROUP_OF = {
    "source_sha256": "source",
    "git": "source",
    "python": "lock",
    "packages": "lock",
    "lock_sha256": "lock",
    "variables": "variables",
    "gpus": "gpu",
    "image": "image",
    "platform": "machine",
    "cpu": "machine",
    "memory_bytes": "machine",
}
_FIRST_IN_GROUP: tuple[Key, ...] = (
    ("source_sha256",),
    ("packages", "torch"),
    ("packages", "triton"),
    ("packages", "transformers"),
    ("python",),
    ("lock_sha256", "runtime.txt"),
    ("gpus", "devices"),
)
_LABELS: dict[Key, str] = {
    ("source_sha256",): "hash of the Python files",
    ("git",): "repository",
    ("git", "dirty"): "uncommitted changes",
    ("gpus",): "GPUs",
    ("gpus", "devices"): "GPUs",
    ("image",): "description",
    ("python",): "Python",
}
_ABSENT = {"packages": "not installed", "variables": "unset"}
# The build copies these into the image's description; the pair is told once, where it belongs.
_TOLD_ELSEWHERE: dict[Key, Key] = {
    ("image", "commit"): ("git", "commit"),
    ("image", "dirty"): ("git", "dirty"),
    ("image", "torch"): ("packages", "torch"),
    ("image", "lock_sha256"): ("lock_sha256", "runtime.txt"),
}


@dataclass(frozen=True)
class Difference:
    """`str()` gives "group: what FIRST -> SECOND", with hashes cut to 12 digits."""

    group: str
    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        first, second = _shown(self.first), _shown(self.second)
        if first == second:  # "500" and 500, or two hashes of one beginning
            first, second = json.dumps(self.first, default=str), json.dumps(self.second, default=str)
        return f"{self.group}: {self.what} {first} -> {second}"


@dataclass(frozen=True)
class RunFiles:
    name: str
    config: dict[str, Any]
    fingerprint: dict[str, Any]
    """Of the newest start."""
    cache: dict[str, Any] | None
    """What the cache stage made; None while it is not finished."""
    earlier_starts: int
    """Starts whose fingerprint differed from the one after."""


def read_run(name: str, runs: Path) -> RunFiles:
    """Return the files of a run: a folder, an id below `runs`, or "latest" with or without the folder before it.

    Raises EnvError when there is no such run or one of its files cannot be read.
    """
    folder = _folder(name, runs)
    cache, history = folder / "cache.json", folder / "fingerprints.jsonl"
    return RunFiles(
        name=folder.name,
        config=_mapping(folder / "config.yaml"),
        fingerprint=_mapping(folder / "fingerprint.json"),
        cache=_mapping(cache) if cache.exists() else None,
        earlier_starts=len(history.read_text(encoding="utf-8").splitlines()) if history.exists() else 0,
    )


def compare(first: RunFiles, second: RunFiles) -> list[Difference]:
    """Return what differs, in the order of GROUPS."""
    found = [
        *_of_configs(first.config, second.config),
        *_of_fingerprints(first.fingerprint, second.fingerprint),
        *(_of_data(first.cache, second.cache) if first.cache and second.cache else ()),
    ]
    return sorted(found, key=lambda difference: GROUPS.index(difference.group))


def notes(runs: tuple[RunFiles, RunFiles]) -> list[str]:
    """Return what a reader must know about the comparison: what was left out of it."""
    said = []
    for run in {run.name: run for run in runs}.values():
        if not run.cache:
            said.append(f"{run.name} has not finished its cache stage: data and target are not compared")
        if run.earlier_starts:
            times = "once" if run.earlier_starts == 1 else f"{run.earlier_starts} times"
            said.append(f"{run.name} was started elsewhere {times} before (fingerprints.jsonl); the last is compared")
    return said


def _of_configs(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    found = [Difference("config", ".".join(key), a, b) for key, a, b in _walk((), first, second)]
    yield from sorted(found, key=lambda difference: difference.what == "name")  # a label, so it comes last


def _of_fingerprints(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    changed = {key: (a, b) for key, a, b in _walk((), first, second)}
    rank = {key: number for number, key in enumerate(_FIRST_IN_GROUP)}
    for key in sorted(changed, key=lambda key: rank.get(key, len(rank))):
        if key in _TOLD_ELSEWHERE and changed.get(_TOLD_ELSEWHERE[key]) == changed[key]:
            continue
        yield Difference(_GROUP_OF.get(key[0], "other"), _label(key), *changed[key])


def _of_data(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare keys, not places: the same data may lie in another cache."""
    facts = _data_facts(first), _data_facts(second)
    if facts[0]["answers"]["key"] != facts[1]["answers"]["key"]:
        for one in facts:
            one["counts"] = {}  # they follow from the key; under one key they tell of answers that were made twice
    for key, a, b in _walk((), *facts):
        group, what = _DATA_WORDS[key[0]]
        yield Difference(group, what.format(key[-1]), a, b)


_DATA_WORDS = {
    "inputs": ("data", "contents of {}"),
    "target": ("target", "files of the target"),
    "answers": ("data", "the target's answers"),
    "counts": ("data", "under the same key, {} of the answers"),
    "features": ("data", "features"),
}


def _data_facts(cache: Mapping[str, Any]) -> dict[str, Any]:
    def section(name: str) -> dict[str, Any]:
        return value if isinstance(value := cache.get(name), dict) else {}

    def key(name: str) -> dict[str, str | None]:
        folder = section(name).get("folder")
        return {"key": None if folder is None else Path(str(folder)).name}

    return {
        "inputs": section("inputs"),
        "target": {"identity": section("target").get("identity")},
        "answers": key("answers"),
        "counts": {name: value for name, value in section("answers").items() if name != "folder"},
        "features": key("features"),
    }


def _walk(key: Key, first: Any, second: Any) -> Iterator[tuple[Key, Any, Any]]:
    """Give (key, value, value) of each leaf that differs. Lists of sections count as one leaf when lengths differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        absent = _ABSENT.get(key[0], "not there") if key else None
        for name in {**first, **second}:
            yield from _walk((*key, str(name)), first.get(name, absent), second.get(name, absent))
    elif _are_sections(first) and _are_sections(second) and len(first) == len(second):
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _walk((*key, str(index)), a, b)
    elif json.dumps(first, default=str) != json.dumps(second, default=str):  # as text, where true is not 1
        yield key, first, second


def _are_sections(value: Any) -> bool:
    # GPUs are devices, not sections: eight of another kind are one difference.
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "capability" not in v for v in value)


def _label(key: Key) -> str:
    if key in _LABELS:
        return _LABELS[key]
    if key[0] == "lock_sha256":
        return f"lockfiles/{key[-1]}"
    return ".".join(key) if key[0] == "cpu" else ".".join(key[1:]) or key[0]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        if re.fullmatch(r"(sha256:)?[0-9a-f]{40,}", value):
            return value.removeprefix("sha256:")[:12]
        return value if value and value.isprintable() else json.dumps(value)
    if isinstance(value, list) and value and all(isinstance(v, dict) and "capability" in v for v in value):
        kinds = Counter(f"{v.get('name')} ({v['capability']}, {v.get('memory_mib')} MiB)" for v in value)
        return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(v)}" for name, v in value.items()) + "}"
    return json.dumps(value, default=str)


def _folder(name: str, runs: Path) -> Path:
    for candidate in (Path(name), runs / name):
        if candidate.is_file() and candidate.name == "latest":  # where symlinks are refused it is a file with the id
            candidate = candidate.parent / candidate.read_text(encoding="utf-8").strip()
        if (candidate / "config.yaml").is_file():
            return candidate.resolve()
    known = sorted((p.parent for p in runs.glob("*/config.yaml")), key=lambda p: p.stat().st_mtime, reverse=True)
    names = [folder.name for folder in known if not folder.is_symlink()][:5]
    fix = f"Runs here: {', '.join(names)}." if names else "There is no run yet; invoke train makes one."
    raise EnvError("no such run (a folder with a config.yaml)", where=name, fix=fix)


def _mapping(path: Path) -> dict[str, Any]:
    again = "Start the run once more: its configuration and fingerprint are written anew."
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except FileNotFoundError:
        raise EnvError("is not there", where=str(path), fix=again) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:120]
        raise EnvError(f"cannot be read ({reason})", where=str(path), fix=again) from None
    if not isinstance(value, dict):
        raise EnvError("holds no mapping", where=str(path), fix=again)
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m env.diff", description="Say what differs between two runs.")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run's folder or id, or runs/latest")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    options = parser.parse_args(argv)
    root = CacheDirs.from_environment(Path(__file__).resolve().parent.parent).runs
    try:
        first, second = (read_run(name, root) for name in options.runs)
    except EnvError as error:
        print(error, file=sys.stderr)
        return 2  # what was asked for is wrong, not the environment
    found, said = compare(first, second), notes((first, second))
    if options.json:
        entries = [asdict(difference) for difference in found]
        print(json.dumps({"runs": [first.name, second.name], "differences": entries, "notes": said}, indent=2))
        return 0
    print(f"{first.name} -> {second.name}")
    print("\n".join(map(str, found)) or "no difference")
    for note in said:
        print(f"note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
