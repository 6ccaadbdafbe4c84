"""The named targets and prompt sets of lockfiles/models.yaml, as strict models."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError
from pipeline.yaml_file import read_yaml

MODELS_YAML = Path(__file__).resolve().parents[1] / "lockfiles" / "models.yaml"
SHA256 = r"^[0-9a-f]{64}$"

OWN_SOURCE = "target"
"""The source of prompts that the target writes itself; no prompt set may have this name."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PackagePin(_Entry):
    """One wheel on the package index."""

    version: str
    sha256: str = Field(pattern=SHA256)
    licence: str


class _PackagedFile(_Entry):
    package: str
    file: str
    file_sha256: str = Field(pattern=SHA256)
    licence: str
    note: str


class NamedTarget(_PackagedFile):
    """A target model inside a package, and what turns it into a Hugging Face folder."""

    converter: Literal["gguf-llama"]


class NamedData(_PackagedFile):
    """A prompt set inside a package; `prompt` is a str.format template over the fields of one record."""

    format: Literal["jsonl", "json-values", "chitchat"]
    prompt: str | None = None

    @model_validator(mode="after")
    def _template(self) -> NamedData:
        if (self.prompt is None) != (self.format == "chitchat"):
            raise ValueError(f"format {self.format} {'needs a' if self.prompt is None else 'takes no'} prompt template")
        return self


class Catalogue(_Entry):
    packages: dict[str, PackagePin]
    targets: dict[str, NamedTarget]
    data: dict[str, NamedData]

    @model_validator(mode="after")
    def _known_packages(self) -> Catalogue:
        if OWN_SOURCE in self.data:
            raise ValueError(f"data.{OWN_SOURCE} has the name of what the target writes itself")
        entries: dict[str, _PackagedFile] = {**self.targets, **self.data}
        for name, entry in entries.items():
            if entry.package not in self.packages:
                raise ValueError(f"{name} names package {entry.package}, which is not under packages")
        return self


def load_catalogue(path: Path = MODELS_YAML) -> Catalogue:
    """Return the checked catalogue. Raises ConfigError with the file and key of what is wrong in it."""
    if not path.is_file():
        raise ConfigError("no such file", where=str(path), fix="Restore it from version control.")
    data, _ = read_yaml(path)
    try:
        return Catalogue.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(message, where=f"{path}: {key}", fix="Compare with the entries beside it.") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean x?" for the known name closest to `name`, or a list of all if none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}?" if close else f"Known names: {', '.join(sorted(known))}."
