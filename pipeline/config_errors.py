"""pydantic's complaints about a configuration, in one line of plain words."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import ConfigError
from pipeline.yaml_file import Location

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "model_type": "a section with fields of its own",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def as_config_error(
    error: ValidationError,
    model: type[BaseModel],
    path: Path,
    lines: dict[Location, int],
    overrides: dict[Location, str],
) -> ConfigError:
    """Return the one complaint that a person should mend first, as a ConfigError.

    An unknown key comes before a missing one, because it is most often the missing one misspelt.
    """
    found = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    first = found[0]
    loc = first["loc"]
    where = f"{_place(loc, path, lines, overrides)}: {_dotted(loc)}" if loc else str(path)
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown key", where=where, fix=_nearest(model, loc))
    if first["type"] == "missing":
        if loc and isinstance(loc[-1], int):
            what, fix = "the list has too few entries", f"Give at least {loc[-1] + 1}."
            return ConfigError(what, where=where, fix=fix)
        return ConfigError("is required", where=where, fix="Set it; configs/quickstart.yaml is an example.")
    what, fix = _what(first)
    return ConfigError(what, where=where, fix=fix or "pipeline/config.py says what it is for.")


def _what(details: ErrorDetails) -> tuple[str, str]:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    got = f", got {_shown(value)}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}{got}", _hint(kind, value)
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}{got}", ""
    if kind == "literal_error":
        return f"must be {context['expected']}{got}", ""
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}{got}", "Use lower-case letters, digits, dot, dash and underscore."
    if kind == "too_long":
        return f"must have at most {context['max_length']} entries{got}", ""
    if kind == "too_short":
        return f"must not be empty{got}" if context[
            "min_length"
        ] == 1 else f"needs {context['min_length']} entries{got}", ""
    if kind == "invalid_key":
        return "the key is not text", "Put it in quotes."
    message = details["msg"].removeprefix("Value error, ")
    return (message, "") if isinstance(value, dict | BaseModel) else (f"{message}{got}", "")


def _hint(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "Put it in quotes."
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "Write it without quotes." if value.strip().lstrip("+-").replace(".", "", 1).isdigit() else ""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if kind == "tuple_type":
        return "Put it in brackets: [a, b]."
    return ""


def _shown(value: Any) -> str:
    """Return a value as it would stand in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(loc: Location) -> str:
    return ".".join(str(part) for part in loc)


def _place(loc: Location, path: Path, lines: dict[Location, int], overrides: dict[Location, str]) -> str:
    for key, text in overrides.items():
        if key == loc[: len(key)] or loc == key[: len(loc)]:
            return f"override {text}"
    for end in range(len(loc), 0, -1):
        if loc[:end] in lines:
            return f"{path}:{lines[loc[:end]]}"
    return str(path)


def _nearest(model: type[BaseModel], loc: Location) -> str:
    key = str(loc[-1])
    names = _fields(_model_at(model, loc[:-1]))
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]}?"
    for section in _fields(model):
        inner = _model_at(model, (section,))
        if inner is not None and key in _fields(inner):
            return f"Did you mean {section}.{key}?"
    return f"Known here: {', '.join(names)}."


def _fields(model: type[BaseModel] | None) -> list[str]:
    return list(model.model_fields) if model is not None else []


def _model_at(model: type[BaseModel], loc: Location) -> type[BaseModel] | None:
    """Return the section at `loc`, looking through `X | None` and `tuple[X, ...]`; None for a plain value."""
    for part in loc:
        if isinstance(part, int):
            continue
        annotation: Any = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return None
        model = inner[0]
    return model
