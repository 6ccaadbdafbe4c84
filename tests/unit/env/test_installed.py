"""Each way in which what is installed can differ from the lock is one finding, and agreement is none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from env import installed
from env.doctor import check_lock
from env.errors import EnvError

Install = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, install: Install) -> Path:
    """Return a folder of packages that agrees with lockfiles/runtime.txt of the same project."""
    (tmp_path / "lockfiles").mkdir()
    (tmp_path / "lockfiles/runtime.txt").write_text("torch==2.11.0\ntransformers==5.17.0\nrich==15.0.0\n")
    (tmp_path / "lockfiles/dev.txt").write_text("torch==2.11.0\ntransformers==5.17.0\npytest==9.2.0\n")
    install("transformers", "5.17.0")
    install("rich", "15.0.0")
    return install("torch", "2.11.0")


def _lines(site: Path, *more: Path) -> list[str]:
    root = site.parent
    return [str(f) for f in check_lock(root, root / "lockfiles/runtime.txt", [str(site), *map(str, more)])]


def test_an_environment_that_equals_its_lock_has_no_findings(site: Path, install: Install) -> None:
    install("pytest", "9.2.0")  # in dev.txt, so no stranger
    install("pip", "24.0")
    assert _lines(site) == []


def test_a_missing_distribution_is_an_error(site: Path) -> None:
    lock = site.parent / "lockfiles/runtime.txt"
    lock.write_text(lock.read_text() + "numpy==2.4.6\n")
    (line,) = _lines(site)
    assert line.startswith("error: numpy==2.4.6 (runtime.txt): is not installed. ")


def test_another_version_is_an_error_that_names_both(site: Path, tmp_path: Path) -> None:
    lock = tmp_path / "lockfiles/runtime.txt"
    lock.write_text(lock.read_text().replace("5.17.0", "4.57.1"))
    (line,) = _lines(site)
    assert line.startswith("error: transformers: version 5.17.0 is installed, the lock says 4.57.1. ")


@pytest.mark.parametrize("name, version", [("torch", "2.11.0"), ("rich", "15.0.0")])  # not only of torch
@pytest.mark.parametrize(
    "damage, how",
    [
        (lambda path: path.write_text(path.read_text().replace("0", "1", 1)), "content"),  # the same length
        (lambda path: path.write_text(path.read_text() + "import patch\n"), "size"),
        (lambda path: path.unlink(), "gone"),
    ],
)
def test_a_patched_file_of_any_locked_package_is_an_error(
    site: Path, name: str, version: str, damage: Callable[[Path], None], how: str
) -> None:
    damage(site / f"{name}.py")
    (line,) = _lines(site)
    assert line.startswith(f"error: {name}=={version}: differs from what was installed: {name}.py ({how}). ")


def test_a_package_without_record_is_not_taken_for_unchanged(site: Path) -> None:
    (site / "torch-2.11.0.dist-info/RECORD").unlink()
    (line,) = _lines(site)
    assert "torch==2.11.0: differs from what was installed: RECORD (gone)" in line


def test_files_above_the_limit_are_compared_by_size_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "HASHED_UP_TO_BYTES", 4)
    (site / "torch.py").write_text("VERSION = '2.11.1'\n")
    assert _lines(site) == []
    (site / "torch.py").write_text("VERSION = '2.11.10'\n")
    assert "torch.py (size)" in _lines(site)[0]


@pytest.mark.parametrize("name", ["flash-attn", "Flash_Attn", "vllm", "deepspeed", "torch-nightly", "sgl-kernel"])
def test_a_package_that_brings_or_patches_torch_is_an_error(site: Path, install: Install, name: str) -> None:
    install(name, "1.0")
    (line,) = _lines(site)
    assert line.startswith(f"error: {installed.canonical(name)}==1.0: is not in the lock and ")


def test_an_unlisted_package_that_builds_on_torch_is_an_error_too(site: Path, install: Install) -> None:
    install("fast-kernels-42", "0.1", ("Torch>=2.0; python_version > '3'", "numpy"))
    (line,) = _lines(site)
    assert "fast-kernels-42==0.1: is not in the lock and builds on torch" in line


def test_an_unlisted_package_that_torch_loads_by_itself_is_an_error(site: Path, install: Install) -> None:
    install("backend", "0.1")
    (site / "backend-0.1.dist-info/entry_points.txt").write_text("[torch.backends]\nmine = backend:load\n")
    (line,) = _lines(site)
    assert "error: backend==0.1: is not in the lock and is loaded through the entry points torch.backends" in line


def test_an_unlisted_package_with_files_of_a_locked_one_is_an_error(site: Path, install: Install) -> None:
    install("harmless", "0.1")
    record = site / "harmless-0.1.dist-info/RECORD"
    assert _lines(site)[0].startswith("warning: harmless==0.1: is not in the lock. ")
    record.write_text(record.read_text() + "rich.py,,\n")
    (line,) = _lines(site)
    assert "error: harmless==0.1: is not in the lock and puts rich.py among the files of rich" in line


def test_a_namespace_that_several_packages_share_belongs_to_none(site: Path, install: Install) -> None:
    for name in ("torch-2.11.0", "tool-0.1"):
        if name.startswith("tool"):
            install("tool", "0.1")
        part = f"nvidia/{name.partition('-')[0]}.py"
        (site / "nvidia").mkdir(exist_ok=True)
        (site / part).write_text("")
        record = site / f"{name}.dist-info/RECORD"
        record.write_text(record.read_text() + f"{part},,\n")
    assert [line.split(". ")[0] for line in _lines(site)] == ["warning: tool==0.1: is not in the lock"]


def test_any_other_stranger_is_a_warning(site: Path, install: Install) -> None:
    install("ipython", "9.0")
    (line,) = _lines(site)
    assert line.startswith("warning: ipython==9.0: is not in the lock. ")


def test_a_second_torch_on_the_path_is_an_error_and_both_are_compared(site: Path, install: Install) -> None:
    other = install("torch", "2.9.0", into="other")
    first, second = _lines(site, other)
    assert first == (f"error: torch: version 2.9.0 is installed in {other}, the lock says 2.11.0. " + installed.REMAKE)
    assert second.startswith("error: torch: is installed 2 times; the first of ")


def test_a_second_copy_of_anything_else_is_a_warning(site: Path, install: Install) -> None:
    (line,) = _lines(site, install("rich", "15.0.0", into="other"))
    assert line.startswith("warning: rich: is installed 2 times; ")


def test_a_path_that_is_named_twice_is_no_second_copy(site: Path) -> None:
    assert _lines(site, site) == []


@pytest.mark.parametrize(
    "origin, said",
    [
        ({"url": "file:///src", "dir_info": {"editable": True}}, "an editable folder"),
        ({"url": "file:///src", "dir_info": {}}, "a folder"),
        ({"url": "git+x", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "a git repository"),
        ({"url": "file:///t.whl", "archive_info": {"hashes": {"sha256": "0" * 64}}}, "a file or address"),
        ([], "an origin that cannot be read"),
    ],
)
def test_a_copy_with_the_right_version_from_elsewhere_is_an_error(site: Path, origin: object, said: str) -> None:
    """RECORD agrees with itself there: only direct_url.json (PEP 610) tells."""
    (site / "torch-2.11.0.dist-info/direct_url.json").write_text(json.dumps(origin))
    (line,) = _lines(site)
    assert line.startswith(f"error: torch==2.11.0: was installed from {said}")


def test_the_locked_wheel_may_come_from_a_file(site: Path) -> None:
    digest = hashlib.sha256(b"the wheel").hexdigest()
    info = {"url": "file:///torch.whl", "archive_info": {"hashes": {"sha256": digest}}}
    (site / "torch-2.11.0.dist-info/direct_url.json").write_text(json.dumps(info))
    assert len(_lines(site)) == 1
    lock = site.parent / "lockfiles/runtime.txt"
    lock.write_text(lock.read_text().replace("torch==2.11.0", f"torch==2.11.0 \\\n    --hash=sha256:{digest}", 1))
    assert _lines(site) == []


def test_a_missing_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"nothing\.txt: no such lock"):
        check_lock(tmp_path, tmp_path / "nothing.txt")
