from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from env.errors import EnvError
from env.fingerprint import fingerprint, installed_versions, relevant_variables, source_hash


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
    assert print_["git"] is None and print_["gpus"] is None and print_["image"] is None
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


def test_inside_the_image_the_commit_is_the_one_that_it_was_built_from(project: Path) -> None:
    image = {"commit": "406ce70c" * 5, "dirty": False, "tag": "dflash:0f3c", "lock_sha256": "a" * 64, "torch": "2.11.0"}
    (project / "image.json").write_text(json.dumps(image))
    found = fingerprint(project, {})
    assert found["image"] == image
    assert found["git"] == {"commit": image["commit"], "dirty": False}


def test_a_repository_counts_more_than_the_description_of_an_image(project: Path) -> None:
    (project / "image.json").write_text('{"commit": "other", "dirty": false}')
    _git(project, "init")
    _git(project, "add", ".")
    _git(project, "commit", "-m", "one")
    found = fingerprint(project, {})
    assert len(found["git"]["commit"]) == 40
    assert found["image"]["commit"] == "other"


@pytest.mark.parametrize(("content", "fault"), [("{", "cannot be read"), ("[]", "is no JSON object")])
def test_a_damaged_description_of_the_image_is_no_missing_one(project: Path, content: str, fault: str) -> None:
    (project / "image.json").write_text(content)
    with pytest.raises(EnvError, match=fault) as caught:
        fingerprint(project, {})
    assert str(caught.value).startswith(f"{project / 'image.json'}: ")
    assert str(caught.value).endswith(" Build the image again.")


def test_every_distribution_is_recorded_and_of_a_name_the_one_that_is_imported(install: Callable[..., Path]) -> None:
    """A second torch on the path hides the locked one; the fingerprint names what runs."""
    install("torch", "2.11.0")
    install("flash_attn", "2.8.1")
    site, other = install("numpy", "2.4.6"), install("torch", "2.15.0", into="other")
    locked = {"flash-attn": "2.8.1", "numpy": "2.4.6", "torch": "2.11.0"}
    assert installed_versions([str(site), str(other)]) == locked
    assert installed_versions([str(other), str(site)]) == {**locked, "torch": "2.15.0"}
    (site / "left_over-1.0.dist-info").mkdir()
    assert installed_versions([str(site)]) == locked


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
    """Inductor moves TRITON_CACHE_DIR (sglang-omni#439), which would make a second start look like another machine."""
    environ = {
        "TRITON_CACHE_DIR": "/elsewhere",
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
