"""The image unpacked and started without a container engine, under bubblewrap."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from env.rootfs import write_rootfs
from tests.image.conftest import Image

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

COMPILE = "import os, torch; print(torch.compile(lambda x: x * 2 + 1)(torch.ones(8)).sum().item(), os.environ['HOME'])"


def test_the_unpacked_image_passes_doctor_and_compiles(image: Image, tmp_path: Path) -> None:
    assert shutil.which("bwrap"), "bubblewrap is not installed"
    archive = write_rootfs(image.engine, image.name, tmp_path / "rootfs.tar", say=lambda line: None)
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", root], check=True)
    archive.unlink()
    for name in ("cache", "runs"):
        (tmp_path / name).mkdir()

    def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        sandbox = ["bwrap", "--unshare-net", "--die-with-parent", "--clearenv", "--ro-bind", str(root), "/"]
        sandbox += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        for name in ("cache", "runs"):
            sandbox += ["--bind", str(tmp_path / name), f"/{name}"]
        for name, value in variables.items():
            sandbox += ["--setenv", name, value]
        return subprocess.run([*sandbox, "/start", *command], capture_output=True, text=True, check=False, timeout=300)

    fit = start("doctor")
    assert fit.returncode == 0, fit.stdout + fit.stderr
    ill = start("python", "-c", "print('started')", TORCHDYNAMO_DISABLE="1")
    assert ill.returncode == 3 and "TORCHDYNAMO_DISABLE" in ill.stderr and "started" not in ill.stdout
    done = start("python", "-c", COMPILE, TORCHINDUCTOR_CACHE_DIR="/cache/x")
    assert done.stdout.split() == ["24.0", "/cache/home"], done.stderr[-1500:]
    assert list((tmp_path / "cache" / "x").rglob("*.so"))
    shutil.rmtree(root)
