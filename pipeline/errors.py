"""Errors a person caused or can mend. The command line prints them as one line and exits with `exit_code`."""

from __future__ import annotations


class PipelineError(Exception):
    """What is wrong with its value, where, and what to do.

    Raised by every stage; `str()` gives "where: what. fix".
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what.rstrip("."), where, fix
        super().__init__(what)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}. {self.fix}".rstrip()


class ConfigError(PipelineError):
    """A key or a value of the run's configuration cannot be used (exit 2)."""


class DataError(PipelineError):
    """A prompts file, a target or a package cannot be used (exit 2)."""


class VerificationFailed(PipelineError):
    """At least one gate of verify.json failed (exit 4)."""

    exit_code = 4


class Interrupted(PipelineError):
    """The run was asked to stop and saved its state; running again resumes it (exit 5)."""

    exit_code = 5
