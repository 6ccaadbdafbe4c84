"""Tiny wheels in a local folder, for tests of code that lets uv fetch packages."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

from pipeline.catalogue import PackagePin


def build_wheel(
    index: Path,
    name: str,
    version: str,
    files: dict[str, bytes],
    *,
    requires_python: str = ">=3.8",
    requires: str | tuple[str, ...] = (),
) -> PackagePin:
    """Write `<name>-<version>-py3-none-any.whl` with `files` into `index` and return its pin.

    requires   one requirement or several
    """
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {requires_python}\n"
    described += "".join(f"Requires-Dist: {text}\n" for text in ([requires] if isinstance(requires, str) else requires))
    members = {
        **files,
        f"{info}/METADATA": described.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in members.items())
    return _write(
        index / f"{stem}-py3-none-any.whl",
        {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()},
        version,
    )


def repack_wheel(index: Path, name: str) -> PackagePin:
    """Write an installed pure-Python distribution into `index` as a wheel and return its pin."""
    distribution = metadata.distribution(name)
    members = {
        str(path): Path(str(path.locate())).read_bytes()
        for path in distribution.files or ()
        if path.parts[0] != ".." and path.suffix != ".pyc" and path.name not in ("INSTALLER", "REQUESTED")
    }
    wheel = index / f"{name.replace('-', '_')}-{distribution.version}-py3-none-any.whl"
    return _write(wheel, members, distribution.version)


def offline_args(index: Path) -> tuple[str, ...]:
    """Return arguments of `uv pip install` that know only the wheels in `index`, with a cache of its own."""
    return ("--no-index", "--find-links", str(index), "--no-config", "--cache-dir", str(index.parent / "uv-cache"))


def _write(wheel: Path, members: dict[str, bytes], version: str) -> PackagePin:
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in members.items():
            archive.writestr(path, content)
    return PackagePin(version=version, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), licence="MIT")


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
