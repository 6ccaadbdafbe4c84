"""The one exception of the library for input that cannot be used."""

from __future__ import annotations


class DFlashError(ValueError):
    """What is wrong with its value, where, and what to do; `str()` gives "where: what. fix"."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what.rstrip("."), where, fix
        super().__init__(what)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}. {self.fix}".rstrip()
