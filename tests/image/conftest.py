"""The image of this checkout, run as a stranger would: any uid, read-only root, no network, two mounts.

    invoke build && invoke test --image

Without an engine or an image these tests fail; they are not collected by a plain `invoke test`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from env.build import built_image, host_engine
from env.caches import CacheDirs
from env.engines import Engine
from env.image import SHM_BYTES, Mount, run_argv

STRANGER = "54321:54321"
"""A uid that no /etc/passwd knows (pytorch#140765)."""


@dataclass(frozen=True)
class Image:
    """The built image and how to run it."""

    engine: Engine
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    def argv(self, command: Sequence[str], **changes: Any) -> list[str]:
        how: dict[str, Any] = {"mounts": [], "user": STRANGER, "network": False, "gpus": False, "shm_bytes": SHM_BYTES}
        return run_argv(self.engine, self.name, command, **(how | changes))

    def run(self, command: Sequence[str], **changes: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(command, **changes),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )

    def python(self, script: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        """Run Python without the entry point."""
        return self.run(["-c", script], entrypoint="/opt/dflash/bin/python", **changes)


@pytest.fixture(scope="session")
def image(repository: Path) -> Image:
    """Return the image of this checkout; fails when it is not built."""
    engine = host_engine()
    assert engine is not None and engine.can_run, "no engine that runs containers works here"
    manifest = built_image(repository, CacheDirs.from_environment(repository), engine)
    assert manifest is not None, "no image of this checkout is built. Run: invoke build"
    return Image(engine, manifest)


@pytest.fixture
def places(tmp_path: Path) -> list[Mount]:
    """Return the two mounts, owned by the stranger."""
    return make_places(tmp_path)


@pytest.fixture(scope="module")
def shared_places(tmp_path_factory: pytest.TempPathFactory) -> list[Mount]:
    """The same for a module: what one container leaves the next one finds."""
    return make_places(tmp_path_factory.mktemp("places"))


def make_places(folder: Path) -> list[Mount]:
    for name in ("cache", "runs"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    # The folders above belong to the one who runs the tests; a stranger must be able to pass.
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return [Mount(source=folder / name, target=f"/{name}", writable=True) for name in ("cache", "runs")]


MakePlaces = Callable[[Path], list[Mount]]
