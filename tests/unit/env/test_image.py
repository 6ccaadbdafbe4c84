from __future__ import annotations

from pathlib import Path

import pytest

from env.image import find_engine


def _program(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\nexit 1\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("present, found", [((), None), (("buildah",), "buildah"), (("buildah", "podman"), "podman")])
def test_the_first_engine_on_the_path_is_found(tmp_path: Path, present: tuple[str, ...], found: str | None) -> None:
    (tmp_path / "bin").mkdir()
    for name in present:
        _program(tmp_path / "bin", name)
    assert find_engine(str(tmp_path / "bin")) == found


def test_docker_is_preferred_and_not_started(tmp_path: Path) -> None:
    for name in ("docker", "podman"):  # either would fail if it were started
        _program(tmp_path / "bin", name)
    assert find_engine(str(tmp_path / "bin")) == "docker"
