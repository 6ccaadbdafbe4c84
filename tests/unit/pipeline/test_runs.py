from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.runs import find_run, lock_run, open_run

ROOT = Path(__file__).resolve().parents[3]
CONFIG = load_config(ROOT / "configs" / "quickstart.yaml")
OTHER = load_config(ROOT / "configs" / "quickstart.yaml", ["seed=1"])


def test_a_new_run_holds_its_configuration_and_fingerprint(tmp_path: Path) -> None:
    run = open_run(CONFIG, tmp_path / "runs", {"python": "3.11"})
    assert run.folder == tmp_path / "runs" / CONFIG.run_id()
    assert load_config(run.config_path) == CONFIG
    assert "min_lr_ratio: 0.1" in run.config_path.read_text()  # a default, written out
    assert json.loads(run.fingerprint_path.read_text()) == {"python": "3.11"}


def test_a_run_resumed_in_another_environment_keeps_the_first_fingerprint(tmp_path: Path) -> None:
    first, second = {"packages": {"torch": "2.11.0"}}, {"packages": {"torch": "2.15.0"}}
    run = open_run(CONFIG, tmp_path, first)
    open_run(CONFIG, tmp_path, first)
    assert not run.fingerprint_history_path.exists()
    open_run(CONFIG, tmp_path, second)
    open_run(CONFIG, tmp_path, second)
    open_run(CONFIG, tmp_path, first)
    assert json.loads(run.fingerprint_path.read_text()) == first
    assert [json.loads(line) for line in run.fingerprint_history_path.read_text().splitlines()] == [first, second]


def test_a_kill_between_history_and_fingerprint_does_not_count_a_start_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(CONFIG, tmp_path, {"start": 1})

    def killed(path: Path, value: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.runs.atomic_write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            open_run(CONFIG, tmp_path, {"start": 2})
    open_run(CONFIG, tmp_path, {"start": 2})
    assert run.fingerprint_history_path.read_text() == '{"start": 1}\n'


def test_latest_names_the_newest_run(tmp_path: Path) -> None:
    open_run(CONFIG, tmp_path, {})
    second = open_run(OTHER, tmp_path, {})
    assert (tmp_path / "latest").readlink() == Path(second.id)
    open_run(CONFIG, tmp_path, {})
    assert (tmp_path / "latest").readlink() == Path(CONFIG.run_id())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([CONFIG.run_id(), OTHER.run_id(), "latest"])


def test_latest_is_a_text_file_where_symlinks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: str, target_is_directory: bool = False) -> None:
        raise OSError("symbolic links are not supported here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    run = open_run(CONFIG, tmp_path, {})
    assert (tmp_path / "latest").read_text().strip() == run.id
    assert find_run("latest", tmp_path).folder == run.folder


def test_a_folder_called_latest_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        open_run(CONFIG, tmp_path, {})


def test_a_run_is_found_by_folder_by_id_and_as_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    run = open_run(CONFIG, runs, {})
    monkeypatch.chdir(tmp_path)
    for name in (str(run.folder), run.id, "latest", "runs/latest", f"runs/{run.id}", f"runs/{run.id}/"):
        found = find_run(name, runs)
        assert (found.folder, found.config) == (run.folder, CONFIG), name


def test_a_missing_run_is_one_line_that_lists_those_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_run("latest", tmp_path)
    assert str(caught.value) == "latest: no such run. There is no run yet; invoke train makes one."
    run = open_run(CONFIG, tmp_path, {})
    with pytest.raises(ConfigError) as caught:
        find_run("quickstrat", tmp_path)
    assert str(caught.value) == f"quickstrat: no such run. Runs here: {run.id}."


@pytest.mark.parametrize("name", ["empty", ".", ""])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run"):
        find_run(tmp_path / name if name else "", tmp_path)


def test_a_second_process_on_the_same_run_is_told_who_has_it(tmp_path: Path) -> None:
    run = open_run(CONFIG, tmp_path, {})
    script = (
        "import sys; from pathlib import Path; from pipeline.errors import ConfigError\n"
        "from pipeline.runs import find_run, lock_run\n"
        "try:\n    with lock_run(find_run(sys.argv[1], Path('.'))): print('got it')\n"
        "except ConfigError as error: print(error)\n"
    )

    def other() -> str:
        command = [sys.executable, "-c", script, str(run.folder)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    with lock_run(run):
        refused = other()
    assert "is working on this run" in refused
    assert "process " in refused
    assert other() == "got it\n"


def test_a_file_system_without_locks_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOLCK of a network file system: nothing keeps a second process away, and that is said."""
    run = open_run(CONFIG, tmp_path, {})

    def refuse(self: filelock.FileLock, *arguments: object, **named: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with lock_run(run):
        pass
    assert caplog.text == ""
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    went_on = False
    with lock_run(run):
        went_on = True
    assert went_on and "refuses locks" in caplog.text and "start no second process" in caplog.text
