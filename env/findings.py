"""What doctor reports: one thing, where it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that doctor found: an error stops a run, a warning is worth knowing."""

    level: Literal["error", "warning"]
    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}. {self.fix}"


def error(where: str, what: str, fix: str) -> Finding:
    return Finding(level="error", what=what, where=where, fix=fix)


def warning(where: str, what: str, fix: str) -> Finding:
    return Finding(level="warning", what=what, where=where, fix=fix)
