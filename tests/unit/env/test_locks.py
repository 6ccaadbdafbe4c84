"""Locks: compiled by the real uv from a folder of little wheels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from env.errors import EnvError
from env.locks import NAMES, check_locks, compile_locks, first_difference, parse_lock, refuse_hosts


@pytest.fixture
def project(tmp_path: Path, index: Path, make_wheel: Callable[..., Path]) -> Path:
    """Return a project with compiled locks: engine needs part; newer releases of part come later."""
    make_wheel(index, "engine", "2.0", requires=("part>=1",))
    make_wheel(index, "part", "1.0")
    make_wheel(index, "checker", "0.3")
    root = tmp_path / "project"
    (root / "lockfiles").mkdir(parents=True)
    (root / "lockfiles/runtime.in").write_text("engine==2.0\n")
    (root / "lockfiles/dev.in").write_text("-r runtime.in\n-c runtime.txt\nchecker\n")
    (root / "lockfiles/host.in").write_text("checker\n")
    (root / "lockfiles/next.in").write_text("part\n")
    compile_locks(root)
    return root


def test_a_lock_holds_hashes_and_no_trace_of_where_packages_came_from(project: Path, index: Path) -> None:
    text = (project / "lockfiles/dev.txt").read_text()
    assert "engine==2.0 \\\n    --hash=sha256:" in text
    assert "invoke lock" in text
    assert str(index) not in text and "find-links" not in text


def test_a_fresh_lock_passes_its_check_and_stays_as_it_is(project: Path) -> None:
    before = {name: (project / f"lockfiles/{name}.txt").read_bytes() for name in NAMES}
    check_locks(project)
    assert {name: (project / f"lockfiles/{name}.txt").read_bytes() for name in NAMES} == before


def test_a_newer_release_on_the_index_is_no_drift(project: Path, index: Path, make_wheel: Callable[..., Path]) -> None:
    make_wheel(index, "part", "1.5")
    check_locks(project)
    (project / "lockfiles/runtime.txt").unlink()  # without the old lock as preference the newer one is chosen
    compile_locks(project)
    assert "part==1.5" in (project / "lockfiles/runtime.txt").read_text()


def test_an_edited_source_is_drift_that_names_the_requirement(project: Path) -> None:
    with (project / "lockfiles/runtime.in").open("a") as source:
        source.write("checker\n")
    with pytest.raises(EnvError, match=r"lockfiles/runtime\.txt: .*checker==0\.3 is missing.*invoke lock") as caught:
        check_locks(project)
    assert caught.value.exit_code == 3


def test_a_hash_taken_out_of_a_lock_is_drift(project: Path) -> None:
    lock = project / "lockfiles/host.txt"
    lock.write_text(lock.read_text().replace("sha256:", "sha256:00", 1))
    with pytest.raises(EnvError):
        check_locks(project)


def test_a_pin_that_its_source_excludes_is_drift(project: Path) -> None:
    lock = project / "lockfiles/runtime.txt"
    lock.write_text(lock.read_text() + "stranger==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    with pytest.raises(EnvError, match=r"stranger==1\.0 should not be there"):
        check_locks(project)


def test_a_missing_lock_is_named(project: Path) -> None:
    (project / "lockfiles/host.txt").unlink()
    with pytest.raises(EnvError, match=r"lockfiles/host\.txt: no such lock"):
        check_locks(project)


def test_a_source_that_cannot_be_solved_gives_one_line(project: Path) -> None:
    (project / "lockfiles/runtime.in").write_text("engine==9.9\n")
    with pytest.raises(EnvError, match=r"lockfiles/runtime\.in: .*engine==9\.9") as caught:
        compile_locks(project)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "# from https://pkgs.example.org/simple",
        "--index-url pkgs.example.org",
        "--find-links wheels",
        "-i pkgs.example.org",
        "engine @ file:engine.whl",
        "    # via -r /home/someone/lockfiles/runtime.in",
    ],
)
def test_a_lock_that_names_a_source_of_packages_is_refused(tmp_path: Path, line: str) -> None:
    lock = tmp_path / "x.txt"
    lock.write_text("engine==2.0 \\\n    --hash=sha256:00\n    # via -r lockfiles/runtime.in\n")
    refuse_hosts(lock, shown="x.txt")
    lock.write_text(lock.read_text() + line + "\n")
    with pytest.raises(EnvError, match=r"x\.txt:4: names a source of packages"):
        refuse_hosts(lock, shown="x.txt")


def test_a_changed_version_is_shown_with_both_versions() -> None:
    assert (
        first_difference("part==1.0 \\\n    --hash=a\n", "part==2.0 \\\n    --hash=b\n")
        == "part==1.0 should be part==2.0"
    )
    assert first_difference("part==1.0\n", "part==1.0\n") is None


def test_markers_choose_the_pin_of_this_platform(tmp_path: Path) -> None:
    lock = tmp_path / "x.txt"
    lock.write_text(
        "Some_Name==1.0 \\\n    --hash=sha256:00\n"
        "num==2.4 ; python_full_version < '3.12' \\\n    --hash=sha256:00\n"
        "num==2.5 ; python_full_version >= '3.12' \\\n    --hash=sha256:00\n"
        "gpu==3.0 ; sys_platform == 'linux'\n"
    )
    old = parse_lock(lock, {"python_full_version": "3.11.2", "sys_platform": "linux"})
    assert {name: version for name, (version, _) in old.items()} == {"some-name": "1.0", "num": "2.4", "gpu": "3.0"}
    new = parse_lock(lock, {"python_full_version": "3.13.0", "sys_platform": "darwin"})
    assert {name: version for name, (version, _) in new.items()} == {"some-name": "1.0", "num": "2.5"}


def test_a_lock_line_that_is_no_pin_or_pinned_twice_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "x.txt"
    lock.write_text("engine>=2.0\n")
    with pytest.raises(EnvError, match=r"x\.txt:1: is not a pin: engine>=2\.0"):
        parse_lock(lock)
    lock.write_text("part==1.0\npart==2.0\n")
    with pytest.raises(EnvError, match=r"x\.txt:2: part is pinned twice"):
        parse_lock(lock)


@pytest.mark.parametrize("name", NAMES)
def test_the_projects_own_locks_name_no_source(repository: Path, name: str) -> None:
    refuse_hosts(repository / "lockfiles" / f"{name}.txt", shown=name)


def test_tests_run_on_the_versions_that_training_uses(repository: Path) -> None:
    runtime, dev = (parse_lock(repository / "lockfiles" / f"{name}.txt") for name in ("runtime", "dev"))
    assert (runtime["torch"][0], runtime["transformers"][0]) == ("2.11.0", "5.17.0")
    assert runtime.items() <= dev.items()


def test_only_the_lock_that_is_to_move_takes_a_newer_release(
    project: Path, index: Path, make_wheel: Callable[..., Path]
) -> None:
    make_wheel(index, "part", "1.5")
    compile_locks(project)
    assert parse_lock(project / "lockfiles/next.txt")["part"][0] == "1.0"
    compile_locks(project, upgrade=("next",))
    assert parse_lock(project / "lockfiles/next.txt")["part"][0] == "1.5"
    assert parse_lock(project / "lockfiles/runtime.txt")["part"][0] == "1.0"
