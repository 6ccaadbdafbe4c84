"""The smoke test's checks as rows of a table: passed, failed or left out, with seconds, as text and as JSON."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from env.errors import EnvError
from pipeline.errors import Interrupted, VerificationFailed
from pipeline.stages import one_line

_LONGEST = 400
"""Characters of an error's line; torch's compile errors run over pages, and --debug shows them whole."""


class LeftOut(Exception):
    """The check cannot be made on this machine, though training can; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    result: Literal["passed", "failed", "left out"]
    seconds: float
    detail: str
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.name:<16} {self.result:<9} {self.seconds:>7.1f}  {self.detail}"

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "result": self.result, "seconds": self.seconds, "detail": self.detail}


@dataclass
class Results:
    """Takes the checks one by one; a row is printed as soon as it is known."""

    rows: list[Row] = field(default_factory=list)

    def header(self) -> None:
        print(f"{'check':<16} {'result':<9} {'seconds':>7}", flush=True)

    def attempt(self, name: str, check: Callable[[], str], *, show_output: bool = False) -> bool:
        """Make a check, add its row and return whether the ones that need it can follow.

        check   returns the row's detail; whatever it raises is the row's error, but an interruption goes through
        What the check prints is shown (on stderr) if it fails, or always with `show_output`.
        """
        begin, output = time.perf_counter(), io.StringIO()
        result: Literal["passed", "failed", "left out"] = "passed"
        failure: Exception | None = None
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                detail = check()
        except Interrupted:
            raise KeyboardInterrupt from None  # a smoke test is not resumed
        except LeftOut as reason:
            result, detail = "left out", str(reason)
        except Exception as error:
            result, detail, failure = "failed", _short(error), error
        if show_output or failure is not None:
            print(output.getvalue(), end="", file=sys.stderr, flush=True)
        seconds = round(time.perf_counter() - begin, 1)
        self.rows.append(Row(name=name, result=result, seconds=seconds, detail=detail, error=failure))
        print(self.rows[-1], flush=True)
        return failure is None

    def record(self) -> dict[str, Any]:
        """Return the verdict and the rows as the JSON file holds them."""
        return {
            "verdict": "pass" if self.rows and not self._failed() else "fail",
            "checks": [row.record() for row in self.rows],
        }

    def conclude(self) -> str:
        """Return the last line.

        Raises EnvError when the machine lacks something, else VerificationFailed, when a check failed.
        """
        failed = self._failed()
        if failed:
            names = ", ".join(row.name for row in failed)
            what = f"{names} failed ({len(failed)} of {len(self.rows)} checks)"
            machine = [row for row in failed if isinstance(row.error, EnvError | OSError)]
            first = (machine or failed)[0]
            kind = EnvError if machine else VerificationFailed
            raise kind(what, where="smoke", fix=f"{first.name}: {first.detail}") from first.error
        passed = sum(row.result == "passed" for row in self.rows)
        left_out = len(self.rows) - passed
        return f"smoke: all {passed} checks passed" + (f", {left_out} left out (see why above)" if left_out else "")

    def _failed(self) -> list[Row]:
        return [row for row in self.rows if row.result == "failed"]


def _short(error: BaseException) -> str:
    line = one_line(error)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}... (--debug shows it whole)"
