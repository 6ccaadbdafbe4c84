"""What another program prints."""

from __future__ import annotations

import sys
import time

from env.output import output_of


def test_what_a_program_prints_comes_back_without_the_space_around_it() -> None:
    assert output_of([sys.executable, "-c", "print(' a\\nb ')"]) == "a\nb"
    assert output_of([sys.executable, "-c", ""]) == ""


def test_a_program_that_is_missing_or_fails_prints_nothing() -> None:
    assert output_of(["/nowhere/program"]) is None
    assert output_of([sys.executable, "-c", "print('half'); raise SystemExit(1)"]) is None


def test_a_program_that_hangs_is_ended() -> None:
    begin = time.monotonic()
    assert output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout_seconds=0.5) is None
    assert time.monotonic() - begin < 30
