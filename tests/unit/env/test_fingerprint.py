from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from env.fingerprint import fingerprint, relevant_variables, source_hash


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("dflash", "pipeline", "env", "lockfiles"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dflash/a.py").write_text("x = 1\n")
    (tmp_path / "lockfiles/runtime.txt").write_text("torch==2.11.0\n")
    return tmp_path


def _git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_it_works_without_git_and_without_a_gpu(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project / "nothing"))
    print_ = fingerprint(project, {})
    assert print_["git"] is None and print_["gpus"] is None
    assert print_["packages"]["torch"].startswith("2.11.0")
    assert len(print_["lock_sha256"]["runtime.txt"]) == 64
    assert json.loads(json.dumps(print_)) == print_


def test_the_commit_is_named_and_an_edit_makes_it_dirty(project: Path) -> None:
    _git(project, "init")
    _git(project, "add", ".")
    _git(project, "commit", "-m", "one")
    clean = fingerprint(project, {})["git"]
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (project / "dflash/a.py").write_text("x = 2\n")
    assert fingerprint(project, {})["git"] == {**clean, "dirty": True}


def test_the_driver_and_the_gpus_are_those_that_nvidia_smi_names(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "bin").mkdir()
    (project / "bin/nvidia-smi").write_text("#!/bin/sh\necho '580.1, NVIDIA H200, 9.0, 143771'\n")
    (project / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}/bin:/bin:/usr/bin")
    device = {"name": "NVIDIA H200", "capability": "9.0", "memory_mib": "143771"}
    assert fingerprint(project, {})["gpus"] == {"driver": "580.1", "devices": [device]}


def test_a_driver_that_fails_counts_as_no_gpu(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "bin").mkdir()
    (project / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    (project / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}/bin:/bin:/usr/bin")
    assert fingerprint(project, {})["gpus"] is None


def test_only_variables_that_matter_are_recorded() -> None:
    environ = {
        "TORCH_LOGS": "dynamo",
        "CUDA_VISIBLE_DEVICES": "1",
        "SECRET_TOKEN": "x",
        "LD_PRELOAD": "j.so",
        "HOME": "/",
    }
    assert list(relevant_variables(environ)) == ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "TORCH_LOGS"]


def test_the_source_hash_sees_contents_and_names_and_nothing_else(project: Path) -> None:
    first = source_hash(project)
    (project / "dflash/notes.md").write_text("no source")
    (project / "tests.py").write_text("elsewhere")
    assert source_hash(project) == first
    (project / "dflash/a.py").write_text("x = 2\n")
    second = source_hash(project)
    (project / "dflash/a.py").rename(project / "dflash/b.py")
    assert len({first, second, source_hash(project)}) == 3


def test_a_folder_that_is_not_there_is_not_hashed_as_empty(project: Path) -> None:
    with pytest.raises(FileNotFoundError):
        source_hash(project, ("dflash", "nowhere"))
