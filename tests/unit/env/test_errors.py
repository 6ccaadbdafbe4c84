from __future__ import annotations

from env.errors import EnvError


def test_the_message_is_one_line_with_place_fault_and_advice() -> None:
    error = EnvError("is full.", where="/cache", fix="Free some.")
    assert str(error) == "/cache: is full. Free some."
    assert (error.what, error.where, error.fix, error.exit_code) == ("is full", "/cache", "Free some.", 3)
    assert str(EnvError("uv is not installed")) == "uv is not installed."
