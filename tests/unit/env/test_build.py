"""`invoke build` with made-up engines: when it builds, what it notes of the image, and when that note is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env import build as builder
from env.build import build_archive, built_image, checked_base, host_engine, manifest_path
from env.engines import Engine, HostFacts
from env.errors import EnvError
from tests.engine_tools import (
    BUILDAH,
    DOCKER,
    PODMAN,
    FakeEngines,
    build_with,
    caches_of,
    git,
)


def test_it_is_said_which_engine_builds_and_why(checkout: Path) -> None:
    said: list[str] = []
    manifest = build_with(checkout, say=said.append)
    assert said == [f"Building {manifest['name']} with podman (podman works); base: registry."]


def test_a_built_image_is_not_built_again_and_a_commit_of_the_readme_needs_no_other(
    checkout: Path, fakes: FakeEngines
) -> None:
    first = build_with(checkout)
    (checkout / "README.md").write_text("other words\n")
    git(checkout, "commit", "-aqm", "second")
    assert build_with(checkout) == first and len(fakes.calls("build")) == 1
    assert built_image(checkout, caches_of(checkout), PODMAN) == first
    (checkout / "env/a.py").write_text("changed\n")
    assert built_image(checkout, caches_of(checkout), PODMAN) is None
    assert build_with(checkout)["tag"] != first["tag"] and len(fakes.calls("build")) == 2


def test_from_scratch_it_is_built_again_without_layers_of_before(checkout: Path, fakes: FakeEngines) -> None:
    build_with(checkout)
    assert build_with(checkout, scratch=True)["id"] == "id-2"
    assert ["--no-cache" in call for call in fakes.calls("build")] == [False, True]


def test_a_manifest_is_not_believed_when_the_engine_has_another_image_or_none(
    checkout: Path, fakes: FakeEngines
) -> None:
    tag = build_with(checkout)["tag"]
    (fakes.state / f"images/dflash:{tag}").write_text("built by somebody else\n")
    assert built_image(checkout, caches_of(checkout), PODMAN) is None
    assert build_with(checkout)["id"] == "id-2"
    (fakes.state / f"images/dflash:{tag}").unlink()  # podman image prune
    assert built_image(checkout, caches_of(checkout), PODMAN) is None
    assert build_with(checkout)["id"] == "id-3"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "x", "id": "id-1"}', "\xff\xfe"])
def test_a_damaged_manifest_is_no_manifest(checkout: Path, content: str) -> None:
    path = manifest_path(caches_of(checkout), build_with(checkout)["tag"])
    path.write_text(content, encoding="latin-1")
    assert built_image(checkout, caches_of(checkout), PODMAN) is None
    assert build_with(checkout)["id"] == "id-2"


def test_a_manifest_without_an_id_does_not_stand_for_an_image_that_is_not_there(
    checkout: Path, fakes: FakeEngines
) -> None:
    manifest = build_with(checkout)
    manifest_path(caches_of(checkout), manifest["tag"]).write_text(json.dumps(manifest | {"id": None}))
    (fakes.state / f"images/dflash:{manifest['tag']}").unlink()
    assert built_image(checkout, caches_of(checkout), PODMAN) is None


@pytest.mark.parametrize("change", [{"size_bytes": ...}, {"packages": {}}])
def test_a_manifest_that_could_not_be_described_is_no_manifest(checkout: Path, change: dict[str, Any]) -> None:
    manifest = build_with(checkout)
    content = {key: value for key, value in (manifest | change).items() if value is not ...}
    manifest_path(caches_of(checkout), manifest["tag"]).write_text(json.dumps(content))
    assert built_image(checkout, caches_of(checkout), PODMAN) is None


def _left(checkout: Path, tmp: Path) -> list[str]:
    images = caches_of(checkout).root / "images"
    return sorted(path.name for folder in (images, tmp) if folder.is_dir() for path in folder.iterdir())


def test_a_failed_build_is_one_line_and_leaves_nothing(
    checkout: Path, fakes: FakeEngines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fakes.state / "build_fails").write_text("STEP 7\n\nERROR: no wheel of torch\n")
    with pytest.raises(EnvError) as caught:
        build_with(checkout)
    assert str(caught.value) == "podman: the build failed (ERROR: no wheel of torch). See above."
    assert capsys.readouterr().out == "STEP 7\nERROR: no wheel of torch\n"
    assert _left(checkout, tmp_path / "tmp") == []


def test_an_interrupted_build_leaves_nothing_and_the_next_one_builds(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], *, what: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_with(checkout)
    assert _left(checkout, tmp_path / "tmp") == []
    assert build_with(checkout)["id"] == "id-1"


def test_an_image_that_does_not_start_is_no_image(checkout: Path, fakes: FakeEngines) -> None:
    (fakes.state / "run_code").write_text("127")
    with pytest.raises(EnvError, match=r"^localhost/dflash:\w+: the image was built and does not start\."):
        build_with(checkout)
    assert built_image(checkout, caches_of(checkout), PODMAN) is None


@pytest.mark.parametrize("engine", [DOCKER, PODMAN, BUILDAH])
def test_every_engine_is_asked_in_its_own_words(
    checkout: Path, fakes: FakeEngines, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    manifest = build_with(checkout, engine)
    assert manifest["engine"] == engine.name and manifest["id"] == "id-1"
    assert manifest["digest"] == ("id-1" if engine.name == "docker" else "digest-same")
    assert all(call.startswith(f"{engine.name} ") for call in fakes.calls())
    assert build_with(checkout, engine) == manifest and len(fakes.calls("build")) == 1


def test_docker_builds_two_archives_for_the_check_and_keeps_its_images(checkout: Path, fakes: FakeEngines) -> None:
    (fakes.state / "archives/1").write_text("an archive")
    out = checkout / "out.tar"
    build_archive(checkout, caches_of(checkout), DOCKER, out, base="registry", say=lambda line: None)
    assert out.read_text() == "an archive" and "--no-cache" in fakes.calls("build")[0]
    assert not (caches_of(checkout).root / "images").exists()


def test_an_unknown_base_is_one_line() -> None:
    assert [checked_base(name) for name in ("auto", "debian", "registry")] == ["auto", "debian", "registry"]
    with pytest.raises(EnvError, match=r"^--base: 'alpine' is no base\. Choose debian or registry\.$"):
        checked_base("alpine")


def test_the_engine_of_this_host_knows_what_the_host_allows(
    fakes: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = HostFacts(hybrid_cgroups=True)
    read: Callable[..., HostFacts] = lambda **how: facts  # noqa: E731
    monkeypatch.setattr(HostFacts, "read", read)
    found = host_engine("podman")
    assert found is not None and found.facts is facts
