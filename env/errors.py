"""The error of this package: the environment is not fit for what was asked. Tasks print it as one line."""

from __future__ import annotations


class EnvError(Exception):
    """What is wrong with its value, where, and what to do; `str()` gives "where: what. fix"."""

    exit_code = 3

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what.rstrip("."), where, fix
        super().__init__(what)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}. {self.fix}".rstrip()
