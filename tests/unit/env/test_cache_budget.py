"""The compile cache's budget, and `invoke clean`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from env import cache_budget
from env.cache_budget import clean, entries, prune
from env.cache_volume import COMPILE_LOCK, COMPILE_NOTE, USE_LOCK
from env.errors import EnvError
from env.files import atomic_write_json

MIB = 2**20
OLD, MIDDLE, NEW = "a" * 16, "b" * 16, "c" * 16
REMOVING, IMPORTING = f".removing-{'d' * 16}-1", f".importing-{'e' * 16}-2"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Three keys of 1 MiB, used at 1000, 2000 and 3000 seconds, and 1 MiB in quarantine, moved at 4000."""
    for seconds, name in ((1000, OLD), (2000, MIDDLE), (3000, NEW), (4000, "quarantine/x-1")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "code.so").write_bytes(b"x" * MIB)
        if seconds < 4000:
            atomic_write_json(folder / "factors.json", {"torch": "2.11.0", "source": "d" * 64})
            (folder / "last-used").touch()
            os.utime(folder / "last-used", (seconds, seconds))
        os.utime(folder, (seconds, seconds))
    return tmp_path


def there(volume: Path) -> set[str]:
    return {entry.name for entry in entries(volume)}


@contextmanager
def held(path: Path) -> Iterator[None]:
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield


def test_what_fits_stays_and_nothing_is_said(volume: Path) -> None:
    lines: list[str] = []
    assert prune(volume, max_bytes=5 * MIB, max_files=100, keep=None, say=lines.append) == [] == lines


def test_the_quarantine_goes_first_and_then_the_least_recently_used(volume: Path) -> None:
    lines: list[str] = []
    removed = prune(volume, max_bytes=int(2.5 * MIB), max_files=100, keep=None, say=lines.append)
    assert removed == ["quarantine/x-1", OLD]
    assert there(volume) == {MIDDLE, NEW}
    assert [line.split()[3].rstrip(":") for line in lines] == removed


def test_files_count_as_well_as_bytes(volume: Path) -> None:
    """triton-lang/triton PR 11779: inodes were used up at 100,000 small files while space remained."""
    assert prune(volume, max_bytes=100 * MIB, max_files=9, keep=None, say=print) == ["quarantine/x-1"]
    assert prune(volume, max_bytes=100 * MIB, max_files=3, keep=None, say=print) == [OLD, MIDDLE]


@pytest.mark.parametrize("lock", [COMPILE_LOCK, USE_LOCK])
def test_a_key_in_use_is_never_pruned_and_neither_is_the_callers(volume: Path, lock: str) -> None:
    lines: list[str] = []
    with held(volume / OLD / lock):
        assert prune(volume, max_bytes=0, max_files=0, keep=NEW, say=lines.append) == ["quarantine/x-1", MIDDLE]
    assert there(volume) == {OLD, NEW}
    assert "more than its budget" in lines[-1]
    # With nobody there, the same call removes it.
    assert prune(volume, max_bytes=0, max_files=0, keep=NEW, say=lines.append) == [OLD]


def test_clean_refuses_while_somebody_compiles_and_names_him(volume: Path) -> None:
    """sgl-project/sglang PR 34231: a shared cache was wiped under the jobs that used it."""
    (volume / NEW / COMPILE_NOTE).write_text("process 4711 on elsewhere")
    for everything in (False, True):
        with held(volume / NEW / COMPILE_LOCK), pytest.raises(EnvError) as caught:
            clean(volume, print, everything=everything, max_bytes=0)
        assert str(caught.value) == (
            f"{volume / NEW}: process 4711 on elsewhere compiles for it. Wait for it or stop it, then clean again."
        )
        assert caught.value.exit_code == 3
        assert len(there(volume)) == 4
    # The lock is what counts: the note of one that was killed keeps nobody.
    assert len(clean(volume, print, everything=True)) == 4


def test_cleaning_everything_keeps_what_a_process_uses_and_says_so(volume: Path) -> None:
    lines: list[str] = []
    with held(volume / MIDDLE / USE_LOCK):
        assert clean(volume, lines.append, everything=True) == ["quarantine/x-1", OLD, NEW]
    assert there(volume) == {MIDDLE}
    assert f"kept {MIDDLE}: a process uses it" in lines


def test_a_dry_run_lists_all_and_removes_nothing_even_while_somebody_compiles(volume: Path) -> None:
    lines: list[str] = []
    with held(volume / NEW / COMPILE_LOCK):
        assert clean(volume, lines.append, dry_run=True, everything=True) == []
    assert len(there(volume)) == 4 and len(lines) == 4
    assert lines[1].startswith(f"{OLD}: 1.0 MiB in 3 files, last used 1970-01-01")
    assert lines[1].endswith("torch 2.11.0, source dddddddddddd")
    assert lines[3].endswith("(another process compiles for it)")


def test_cleaning_to_the_budget_is_what_happens_by_default(volume: Path) -> None:
    assert clean(volume, print) == []
    assert clean(volume, print, max_bytes=3 * MIB + 10_000) == ["quarantine/x-1"]


def test_an_interrupted_removal_or_import_goes_first(volume: Path) -> None:
    for name in (REMOVING, IMPORTING):
        (volume / name).mkdir()
        (volume / name / "code.so").write_bytes(b"x" * MIB)
        os.utime(volume / name, (100, 100))
    with held(volume / IMPORTING / USE_LOCK):
        assert prune(volume, max_bytes=5 * MIB + 50_000, max_files=100, keep=None, say=print) == [REMOVING]
    os.utime(volume / IMPORTING, (100, 100))
    assert prune(volume, max_bytes=4 * MIB + 50_000, max_files=100, keep=None, say=print) == [IMPORTING]


def test_folders_of_somebody_else_are_neither_counted_nor_removed(volume: Path) -> None:
    for name in ("home", "0123", f"{OLD}.bak"):
        (volume / name).mkdir()
        (volume / name / "thesis.tex").write_bytes(b"x" * MIB)
    assert len(there(volume)) == 4
    clean(volume, print, everything=True)
    assert there(volume) == set()
    assert len(list(volume.glob("*/thesis.tex"))) == 3


def test_where_locks_are_refused_nothing_is_removed(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: object, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("env.cache_volume.fcntl.flock", refuse)
    assert prune(volume, max_bytes=0, max_files=0, keep=None, say=print) == ["quarantine/x-1"]
    with pytest.raises(EnvError, match="locks cannot be had"):
        clean(volume, print, everything=True)


def test_an_empty_or_absent_cache_is_clean(tmp_path: Path) -> None:
    assert clean(tmp_path / "none", print, everything=True) == []
    assert entries(tmp_path) == []
    assert cache_budget.MAX_FILES == 200_000
