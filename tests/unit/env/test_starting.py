"""How a task starts its program and how it ends; test_tasks.py has the tasks themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from env import starting
from env.errors import EnvError
from env.starting import end, one_line_errors, options, output_path


def test_options_are_those_that_have_a_value() -> None:
    given = options(top_k="5", seed="", from_="train", force=True, debug=False)
    assert given == ["--top-k", "5", "--from", "train", "--force"]


def _unfit() -> None:
    raise EnvError("no such lock", where="lockfiles/x.txt", fix="Run: invoke lock")


def _interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("begin", "code", "line"),
    [
        (_unfit, 3, "lockfiles/x.txt: no such lock. Run: invoke lock\n"),
        (_interrupted, 5, "Interrupted before the program started; nothing is half-written. Run it again.\n"),
    ],
)
def test_what_keeps_a_program_from_starting_is_one_line(
    begin: Callable[[], None], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        begin()
    assert ended.value.code == code and capsys.readouterr() == ("", line)


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        _ = 1 / 0


def test_a_task_goes_on_after_a_program_that_ended_well() -> None:
    end(0)
    with pytest.raises(SystemExit, match="4"):
        end(4)


def test_a_written_file_is_in_a_folder_that_a_container_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert output_path("out.json") == output_path("~/out.json") == tmp_path / "out.json"
    with pytest.raises(EnvError, match="the root cannot be given to a container"):
        output_path("/out.json")
    with pytest.raises(EnvError, match="no such folder"):
        output_path("nowhere/out.json")


def test_where_is_asked_last_so_that_a_wrong_file_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(starting, "choose_place", lambda *given: pytest.fail("a place was looked for"))
    with pytest.raises(SystemExit, match="3"):
        starting.run_placed(["smoke"], where="auto", writes=("--json", "/out.json"))
    assert capsys.readouterr().err.startswith("/out.json: the root cannot")
