"""Reading a YAML file that a person wrote: line numbers kept, duplicate keys refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError

Location = tuple[int | str, ...]

MAX_VALUES = 10_000
"""A file of a person is far below; aliases of aliases grow to billions of values."""

_UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What PyYAML raises for a value that does not suit its tag (2020-13-45, !!bool x) and for too many brackets."""


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1 reads 3e-3 as text, since it wants the dot of 3.0e-3; YAML 1.2, Python and people read a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_value(text: str) -> Any:
    """Return the value of a YAML scalar or flow sequence, by the same rules as a file. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _collect_lines(node, (), {}, Path("override"), [])
        return loader.construct_document(node)
    except _UNUSABLE as error:
        raise yaml.YAMLError(_reason(error)) from None
    finally:
        loader.dispose()


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "brackets nested too deep"
    return " ".join(str(error).split())[:100]


def read_yaml(path: Path) -> tuple[Any, dict[Location, int]]:
    """Return the file's value and the line (from 1) on which each key or list entry starts.

    Raises ConfigError, with file and line, for what is not YAML and for a key that is given twice.
    """
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            lines: dict[Location, int] = {}
            if node is not None:
                _collect_lines(node, (), lines, path, [])
            return (loader.construct_document(node) if node is not None else None), lines
        finally:
            loader.dispose()
    except UnicodeDecodeError as error:  # a ValueError, so before those
        raise ConfigError(f"is not UTF-8 text (byte {error.start})", where=str(path), fix="Save it as UTF-8.") from None
    except _UNUSABLE as error:
        what = f"a value cannot be read ({_reason(error)})"
        raise ConfigError(what, where=str(path), fix="Correct it, or put it in quotes.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"is not YAML ({problem})", where=where, fix="Mend this line or the one before it.") from None


def _collect_lines(
    node: yaml.Node, loc: Location, lines: dict[Location, int], path: Path, parents: list[yaml.Node]
) -> None:
    line = node.start_mark.line + 1
    lines.setdefault(loc, line)
    if len(lines) > MAX_VALUES:
        what = f"holds more than {MAX_VALUES} values, aliases counted"
        raise ConfigError(what, where=f"{path}:{line}", fix="Compare with configs/quickstart.yaml.")
    if any(node is parent for parent in parents):
        raise ConfigError("an alias contains itself", where=f"{path}:{line}", fix="Write the value out.")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _collect_lines(item, (*loc, index), lines, path, [*parents, node])
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, key_line = str(key.value), key.start_mark.line + 1
            if name in seen and name != "<<":
                raise ConfigError(
                    f"{name} is given twice (first on line {seen[name]})",
                    where=f"{path}:{key_line}",
                    fix="Keep one of them.",
                )
            seen[name] = key_line
            lines[(*loc, name)] = key_line
            _collect_lines(value, (*loc, name), lines, path, [*parents, node])
