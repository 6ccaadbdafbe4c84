"""The locked environment, made by the real uv from little wheels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from env.caches import CacheDirs
from env.errors import EnvError
from env.locks import compile_locks
from env.uvtool import find_uv
from env.venv import ensure_runtime, runtime_folder


@pytest.fixture
def project(tmp_path: Path, index: Path, make_wheel: Callable[..., Path]) -> Path:
    make_wheel(index, "engine")
    make_wheel(index, "checker")
    root = tmp_path / "project"
    (root / "lockfiles").mkdir(parents=True)
    (root / "lockfiles/runtime.in").write_text("engine\n")
    (root / "lockfiles/dev.in").write_text("-r runtime.in\nchecker\n")
    (root / "lockfiles/host.in").write_text("checker\n")
    (root / "lockfiles/next.in").write_text("engine\n")
    compile_locks(root)
    return root


@pytest.fixture
def caches(project: Path) -> CacheDirs:
    return CacheDirs.from_environment(project, {})


@pytest.fixture
def counting_uv(tmp_path: Path) -> Path:
    """Return a uv that writes a line to uv.log for each start; a program in DURING_SYNC takes the place of pip sync."""
    script = tmp_path / "uv"
    script.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/uv.log\n'
        f'if [ "$1" = pip ] && [ -n "$DURING_SYNC" ]; then eval "$DURING_SYNC"; fi\nexec {find_uv()} "$@"\n'
    )
    script.chmod(0o755)
    return script


def _imports(python: Path, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_ino, p.lstat().st_mtime_ns) for p in [folder, *folder.rglob("*")]}


def test_it_holds_what_the_lock_says_and_runs_this_python(project: Path, caches: CacheDirs) -> None:
    python = ensure_runtime(project, caches)
    assert _imports(python, "engine") and not _imports(python, "checker")
    assert python.parent.parent == runtime_folder(project, caches)
    version = subprocess.run([python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
    assert version.stdout.strip() == sys.version
    assert _imports(ensure_runtime(project, caches, lock="dev"), "checker")


def test_a_second_run_touches_nothing_and_starts_no_uv(
    project: Path, caches: CacheDirs, counting_uv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    python = ensure_runtime(project, caches, uv=counting_uv)
    before, starts = _state(caches.root), (tmp_path / "uv.log").read_text()
    assert starts == "venv\npip\n"
    said: list[str] = []
    assert ensure_runtime(project, caches, uv=counting_uv, say=said.append) == python
    assert _state(caches.root) == before and (tmp_path / "uv.log").read_text() == starts and said == []


def test_a_changed_lock_gets_an_environment_of_its_own(
    project: Path, caches: CacheDirs, index: Path, make_wheel: Callable[..., Path]
) -> None:
    old = ensure_runtime(project, caches)
    make_wheel(index, "engine", "2.0")
    (project / "lockfiles/runtime.in").write_text("engine==2.0\n")
    compile_locks(project)
    new = ensure_runtime(project, caches)
    assert new != old and _imports(old, "engine")
    shown = subprocess.run([new, "-c", "import engine; print(engine.VERSION)"], capture_output=True, text=True)
    assert shown.stdout == "2.0\n"


def test_a_failed_install_leaves_nothing_and_is_made_anew(
    project: Path, caches: CacheDirs, counting_uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURING_SYNC", "echo 'error: disk on fire' >&2; exit 1")
    with pytest.raises(EnvError, match=r"lockfiles/runtime\.txt: uv failed: disk on fire"):
        ensure_runtime(project, caches, uv=counting_uv)
    assert [path.name for path in caches.root.iterdir()] == ["venv.lock"]
    monkeypatch.delenv("DURING_SYNC")
    assert _imports(ensure_runtime(project, caches, uv=counting_uv), "engine")


_MAKE = """
import sys
from pathlib import Path
from env.caches import CacheDirs
from env.venv import ensure_runtime
root = Path(sys.argv[1])
ensure_runtime(root, CacheDirs.from_environment(root, {}), uv=Path(sys.argv[2]))
"""


def _start(repository: Path, project: Path, uv: Path, **variables: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **variables}
    command = [sys.executable, "-c", _MAKE, str(project), str(uv)]
    return subprocess.Popen(command, cwd=repository, env=environ, stdout=subprocess.PIPE, start_new_session=True)


def test_an_install_that_was_killed_is_made_anew_and_not_trusted(
    repository: Path, project: Path, caches: CacheDirs, counting_uv: Path, tmp_path: Path
) -> None:
    """astral-sh/uv leaves a half-filled environment behind; pytorch/pytorch#189245 waits for ever for a dead holder."""
    process = _start(repository, project, counting_uv, DURING_SYNC="sleep 60")
    deadline = time.monotonic() + 60
    while "pip" not in (tmp_path / "uv.log").read_text() if (tmp_path / "uv.log").exists() else True:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    leftovers = list(caches.root.glob(".venv-*"))
    assert len(leftovers) == 1 and (leftovers[0] / "bin/python").exists()
    assert not runtime_folder(project, caches).exists()
    assert _imports(ensure_runtime(project, caches), "engine")
    assert list(caches.root.glob(".venv-*")) == []


def test_two_processes_make_it_once(repository: Path, project: Path, counting_uv: Path, tmp_path: Path) -> None:
    both = [_start(repository, project, counting_uv, DURING_SYNC="sleep 1") for _ in range(2)]
    said = [process.communicate(timeout=120)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert (tmp_path / "uv.log").read_text() == "venv\npip\n"
    assert sum("waiting for it" in text for text in said) == 1


def test_a_file_with_another_hash_is_refused_by_name(
    project: Path, caches: CacheDirs, index: Path, make_wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, "engine", "1.0", requires=("checker",))  # the same version with other contents
    monkeypatch.setenv("UV_CACHE_DIR", str(index.parent / "empty-cache"))  # a cached file keeps the hash it had
    with pytest.raises(EnvError, match="the file of engine that was downloaded has another sha256 than the lock"):
        ensure_runtime(project, caches)
    assert not runtime_folder(project, caches).exists()


def test_a_lock_without_hashes_is_refused(project: Path, caches: CacheDirs) -> None:
    (project / "lockfiles/runtime.txt").write_text("engine==1.0\n")
    with pytest.raises(EnvError, match="hash"):
        ensure_runtime(project, caches)
    assert not runtime_folder(project, caches).exists()


def test_without_a_network_the_wanted_package_is_named(project: Path, caches: CacheDirs, index: Path) -> None:
    for wheel in index.glob("engine-*"):
        wheel.unlink()
    with pytest.raises(EnvError, match=r"lockfiles/runtime\.txt: no network: the package engine was wanted"):
        ensure_runtime(project, caches)


def test_an_environment_whose_python_is_gone_is_made_anew(project: Path, caches: CacheDirs) -> None:
    python = ensure_runtime(project, caches)
    python.unlink()
    python.symlink_to("/nowhere/python3")
    said: list[str] = []
    assert _imports(ensure_runtime(project, caches, say=said.append), "engine")
    assert "is gone" in said[0]


def test_a_missing_lock_and_an_unwritable_cache_are_named(project: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = CacheDirs.from_environment(project, {"DFLASH_CACHE": str(tmp_path / "file/cache")})
    with pytest.raises(EnvError, match=r"file/cache: cannot be created .*DFLASH_CACHE"):
        ensure_runtime(project, blocked)
    (project / "lockfiles/runtime.txt").unlink()
    with pytest.raises(EnvError, match=r"runtime\.txt: no such lock\. Run: invoke lock"):
        ensure_runtime(project, CacheDirs.from_environment(project, {}))
