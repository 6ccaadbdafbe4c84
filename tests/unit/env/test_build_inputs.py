"""What a made-up engine is sent to build: the context, image.json, secrets, and the base."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from env import build as builder
from env.build import built_image, current_tag, manifest_path
from env.image import COPIED, ImagePins
from tests.engine_tools import (
    PODMAN,
    REGISTRY,
    SAYS,
    FakeEngines,
    build_with,
    caches_of,
    git,
    modes_of,
)


def test_the_engine_gets_exactly_the_images_files_with_modes_that_do_not_depend_on_the_clone(
    checkout: Path, fakes: FakeEngines
) -> None:
    (checkout / "env/a.py").chmod(0o700)
    (checkout / "dflash/a.py").chmod(0o600)
    (checkout / "env/debug.log").write_text("ignored")
    (checkout / "configs/mine.yaml").write_text("not committed yet, and meant to be tried")
    build_with(checkout)
    wanted = {f"{folder}/a.py": 0o644 for folder in COPIED} | {"env/a.py": 0o755, "configs/mine.yaml": 0o644}
    wanted |= dict.fromkeys(["lockfiles/runtime.txt", "lockfiles/images.yaml", "image.json"], 0o644)
    wanted |= dict.fromkeys(["Dockerfile", ".dockerignore", "LICENSE"], 0o644)
    assert modes_of(fakes.context(1)) == wanted
    assert all(p.stat().st_mode & 0o777 == 0o755 for p in fakes.context(1).rglob("*") if p.is_dir())


def test_image_json_says_what_the_image_was_made_from(checkout: Path, fakes: FakeEngines) -> None:
    manifest = build_with(checkout)
    about = json.loads((fakes.context(1) / "image.json").read_text())
    assert about == {
        "tag": current_tag(checkout, "registry", ImagePins.read(checkout / "lockfiles/images.yaml")),
        "commit": git(checkout, "rev-parse", "HEAD"),
        "dirty": False,
        "lock_sha256": "031db2975f8369f7bb869b13ae51442f2c24b2da6cce0d4855172cae41534ae8",
        "torch": "2.11.0",
        "base": REGISTRY,
    }
    assert about.items() <= manifest.items()
    assert manifest == about | {
        **{"name": f"localhost/dflash:{about['tag']}", "engine": "podman", "id": "id-1", "digest": "digest-same"},
        **{"size_bytes": 1230000000, "packages": SAYS},
    }
    assert json.loads(manifest_path(caches_of(checkout), about["tag"]).read_text()) == manifest


def test_a_commit_with_changes_is_called_dirty_and_one_of_the_readme_is_not(checkout: Path, fakes: FakeEngines) -> None:
    (checkout / "README.md").write_text("changed\n")
    assert not build_with(checkout)["dirty"]
    (checkout / "env/a.py").write_text("changed\n")
    assert build_with(checkout)["dirty"]
    assert any(word.endswith("-dirty") for word in fakes.calls("build")[1].split() if "COMMIT=" in word)
    assert not any(word.endswith("-dirty") for word in fakes.calls("build")[0].split())


def test_a_file_that_was_removed_makes_it_dirty_too(checkout: Path) -> None:
    (checkout / "env/a.py").unlink()
    assert build_with(checkout)["dirty"]


def test_a_tarball_is_built_without_version_control(tarball: Path, fakes: FakeEngines) -> None:
    (fakes.bin / "git").unlink()
    (tarball / "env/__pycache__").mkdir()
    (tarball / "env/__pycache__/a.pyc").write_text("")
    manifest = build_with(tarball)
    assert (manifest["commit"], manifest["dirty"]) == ("unknown", None)
    assert "env/a.py" in modes_of(fakes.context(1)) and not list(fakes.context(1).rglob("__pycache__"))


def test_a_tarball_unpacked_where_another_repository_ignores_it_is_built_too(tarball: Path, fakes: FakeEngines) -> None:
    (tarball.parent / ".gitignore").write_text("*\n")
    git(tarball.parent, "init", "-q")
    build_with(tarball)
    assert "env/a.py" in modes_of(fakes.context(1))


def test_the_index_and_the_certificates_are_secrets_of_the_build(
    checkout: Path, fakes: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("a certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://me:pass word@index.invalid/$simple")
    manifest = build_with(checkout)
    call = fakes.calls("build")[0]
    assert f"--secret=id=ca,src={bundle}" in call and "index.invalid" not in " ".join(fakes.calls())
    read = subprocess.run(
        ["/bin/sh", "-c", f'. "{fakes.state}/secrets"; printf %s "$UV_DEFAULT_INDEX"'], capture_output=True, text=True
    )
    assert read.stdout == "https://me:pass word@index.invalid/$simple"
    assert "index.invalid" not in json.dumps(manifest) and not list((tmp_path / "tmp").iterdir())


def test_a_quote_in_the_address_of_the_index_does_not_end_it(
    checkout: Path, fakes: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://me:it's@index.invalid")
    build_with(checkout)
    read = subprocess.run(
        ["/bin/sh", "-c", f'. "{fakes.state}/secrets"; printf %s "$UV_DEFAULT_INDEX"'], capture_output=True, text=True
    )
    assert read.stdout == "https://me:it's@index.invalid"


def test_on_a_registrys_base_the_dockerfile_adds_the_packages(checkout: Path, fakes: FakeEngines) -> None:
    build_with(checkout)
    call = fakes.calls("build")[0]
    assert f"--build-arg=BASE_IMAGE={REGISTRY} " in call and "--build-arg=APT_PACKAGES=g++ tini " in call


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch, fakes: FakeEngines) -> list[Path]:
    """Let the host have an mmdebstrap; return what was made."""
    fakes.program("mmdebstrap", "#!/bin/sh\n")
    made: list[Path] = []

    def make_base(pins: ImagePins, out: Path) -> Path:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(f"a base of {pins.suite}")
        out.with_name(out.name + ".packages").write_text("tini 0.19\n")
        made.append(out)
        return out

    monkeypatch.setattr(builder, "make_base", make_base)
    monkeypatch.setattr("env.base._index_targets", lambda: "http://h bookworm main Packages")
    return made


def test_a_host_with_mmdebstrap_makes_the_base_once_and_imports_it_by_its_content(
    checkout: Path, fakes: FakeEngines, debian: list[Path], tmp_path: Path
) -> None:
    manifest = build_with(checkout, base="auto")
    base_call, call = fakes.calls("build")
    assert (fakes.context(1) / "Dockerfile").read_text() == 'FROM scratch\nADD base.tar /\nCMD ["/bin/bash"]\n'
    assert (fakes.context(1) / "base.tar").read_text() == "a base of bookworm"
    assert manifest["base"] == "localhost/dflash-base:761474e2f850" and f"--tag={manifest['base']} " in base_call
    assert f"--build-arg=BASE_IMAGE={manifest['base']} " in call and "--build-arg=APT_PACKAGES= " in call
    (checkout / "env/a.py").write_text("changed\n")
    build_with(checkout, base="auto")
    assert len(debian) == 1 and len(fakes.calls("build")) == 3  # the base is neither made nor imported again
    build_with(checkout, base="auto", scratch=True)
    assert len(debian) == 2 and len(fakes.calls("build")) == 5
    tags = {manifest["tag"], current_tag(checkout, "debian", ImagePins.read(checkout / "lockfiles/images.yaml"))}
    base = ["base-1fc672cf4cc3.tar", "base-1fc672cf4cc3.tar.packages"]
    assert {p.name for p in (caches_of(checkout).root / "images").iterdir()} == {
        *(f"{tag}.json" for tag in tags),
        *base,
    }
    assert not list((tmp_path / "tmp").iterdir())


def test_a_host_without_mmdebstrap_takes_the_registry_and_either_base_is_found_again(
    checkout: Path, fakes: FakeEngines, debian: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_debian = build_with(checkout, base="auto")
    assert built_image(checkout, caches_of(checkout), PODMAN) == on_debian
    monkeypatch.setattr("env.base._index_targets", lambda: "http://h noble main Packages")
    assert build_with(checkout, base="auto")["base"] == REGISTRY, "mmdebstrap alone does not make a Debian on Ubuntu"
    (fakes.bin / "mmdebstrap").unlink()
    on_registry = build_with(checkout, base="auto")
    assert on_registry["base"] == REGISTRY and on_registry["tag"] != on_debian["tag"]
    manifest_path(caches_of(checkout), on_debian["tag"]).unlink()
    assert built_image(checkout, caches_of(checkout), PODMAN) == on_registry
