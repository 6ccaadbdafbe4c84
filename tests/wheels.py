"""Tiny wheels in a local folder, for tests of code that lets uv fetch packages."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from pipeline.catalogue import PackagePin


def build_wheel(
    index: Path,
    name: str,
    version: str,
    files: dict[str, bytes],
    *,
    requires_python: str = ">=3.8",
    requires: str | None = None,
) -> PackagePin:
    """Write `<name>-<version>-py3-none-any.whl` with `files` into `index` and return its pin."""
    index.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {requires_python}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    members = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*members, f"{info}/RECORD"])
    wheel = index / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in {**members, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(path, content)
    return PackagePin(version=version, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), licence="MIT")


def offline_args(index: Path) -> tuple[str, ...]:
    """Return arguments of `uv pip install` that know only the wheels in `index`, with a cache of its own."""
    return ("--no-index", "--find-links", str(index), "--no-config", "--cache-dir", str(index.parent / "uv-cache"))
