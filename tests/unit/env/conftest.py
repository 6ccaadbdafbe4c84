"""A package index made of little wheels in a folder, so that the real uv can be used without a network; engines that
are shell scripts, and a checkout for them to build."""

from __future__ import annotations

import base64
import hashlib
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_tools import FakeEngines, commit_all, make_checkout

MakeWheel = Callable[..., Path]


def _record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


@pytest.fixture
def make_wheel() -> MakeWheel:
    """Return make_wheel(folder, name, version="1.0", requires=()): writes a wheel whose module holds VERSION."""

    def make(folder: Path, name: str, version: str = "1.0", requires: tuple[str, ...] = ()) -> Path:
        module = name.replace("-", "_")
        info = f"{module}-{version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        members = {
            f"{module}.py": f"VERSION = {version!r}\n".encode(),
            f"{info}/METADATA": ("\n".join(lines) + "\n").encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(_record_line(member, content) for member, content in members.items()) + f"{info}/RECORD,,\n"
        folder.mkdir(parents=True, exist_ok=True)
        wheel = folder / f"{module}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for member, content in {**members, f"{info}/RECORD": record.encode()}.items():
                archive.writestr(member, content)
        return wheel

    return make


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is uv's only source of packages, with a uv cache of its own.

    Offline, so that a made-up name can never be looked up, let alone built, from a real index.
    """
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return folder


@pytest.fixture
def install(make_wheel: MakeWheel, tmp_path: Path) -> Callable[..., Path]:
    """Return install(name, version, requires=(), into="site"): unpacks such a wheel and returns the folder."""

    def put(name: str, version: str = "1.0", requires: tuple[str, ...] = (), into: str = "site") -> Path:
        with zipfile.ZipFile(make_wheel(tmp_path / "wheels", name, version, requires)) as archive:
            archive.extractall(tmp_path / into)
        return tmp_path / into

    return put


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    (tmp_path / "fake").mkdir()
    (tmp_path / "tmp").mkdir()
    made = FakeEngines.make(tmp_path / "fake", "docker", "podman", "buildah")
    made.use(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return made


@pytest.fixture
def tarball(tmp_path: Path, fakes: FakeEngines) -> Path:
    """Return a checkout without version control, in a folder with a space."""
    return make_checkout(tmp_path / "my project")


@pytest.fixture
def checkout(tarball: Path) -> Path:
    return commit_all(tarball)
