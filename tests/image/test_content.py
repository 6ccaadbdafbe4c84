"""What is in the image, and what must not be."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from env.image import Mount
from tests.image.conftest import Image

pytestmark = pytest.mark.image

SIZE_BUDGET_BYTES = 6.0e9
"""5.6 GB measured: 4.6 of torch with CUDA 13, 0.46 of Debian with a compiler, the rest bytecode."""


def test_the_packages_are_those_of_the_lock(image: Image, places: list[Mount]) -> None:
    done = image.run(["doctor"], mounts=places)
    assert done.returncode == 0 and "0 errors, 0 warnings" in done.stdout, done.stdout + done.stderr
    found = image.python(
        "import torch, transformers; print(torch.__version__, torch.version.cuda, transformers.__version__)"
    )
    version, cuda, transformers = found.stdout.split()
    packages = image.manifest["packages"]["python"]
    assert version.partition("+")[0] == image.manifest["torch"] == packages["torch"].partition("+")[0]
    # sleap-nn PR 635: the CUDA of torch's build and of the packages beside it.
    assert packages["nvidia-cuda-runtime"].startswith(f"{cuda}.") and transformers == packages["transformers"]


def test_labels_and_image_json_say_what_it_was_made_from(image: Image, repository: Path) -> None:
    lock = hashlib.sha256((repository / "lockfiles" / "runtime.txt").read_bytes()).hexdigest()
    about = json.loads(image.python("print(open('/srv/dflash/image.json').read())").stdout)
    assert about["lock_sha256"] == lock and about["tag"] == image.name.rpartition(":")[2]
    labels = image_labels(image)
    assert labels["dflash.lock.sha256"] == lock and labels["dflash.torch"] == image.manifest["torch"]
    assert labels["org.opencontainers.image.revision"].startswith(about["commit"])


def image_labels(image: Image) -> dict[str, str]:
    from env.image import engine_argv
    from env.output import output_of

    text = output_of([*engine_argv(image.engine), "image", "inspect", "--format={{json .Config.Labels}}", image.name])
    assert text is not None
    labels: dict[str, str] = json.loads(text)
    return labels


def test_no_package_cache_certificate_or_index_address_stays_in_a_layer(image: Image) -> None:
    """uv#10047, teamster#5393: caches baked into layers; a proxy's certificate would be trusted by everyone."""
    script = """
import hashlib, os
home = os.path.expanduser("~root")
left = (home + "/.cache", "/opt/uv", "/tmp/locks", "/var/lib/apt/lists/lock", "/run/ca.crt", "/run/packages.env")
for folder in left:
    if os.path.exists(folder): print("left:", folder)
for top in ("/etc/apt", home, "/etc/pip.conf", "/etc/uv"):
    for folder, _, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            try: text = open(path, "rb").read()
            except OSError: continue
            if b"://" in text and name.endswith((".list", ".sources", ".conf", ".toml")): print("address:", path)
for folder, _, files in os.walk("/"):
    if folder.startswith(("/proc", "/sys", "/dev", "/opt/dflash/lib")): continue
    for name in files:
        path = os.path.join(folder, name)
        if name.endswith((".crt", ".pem")) and os.path.isfile(path):
            try: print("cert:", hashlib.sha256(open(path, "rb").read()).hexdigest(), path)
            except OSError: pass
"""
    done = image.python(script, user="0:0")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and not [line for line in lines if line.startswith(("left:", "address:"))], lines
    bundle = os.environ.get("SSL_CERT_FILE")
    if bundle and Path(bundle).is_file():
        ours = hashlib.sha256(Path(bundle).read_bytes()).hexdigest()
        assert not [line for line in lines if ours in line], "the build's CA bundle is in the image"


def test_the_interpreter_and_its_path_are_not_under_roots_home(image: Image) -> None:
    """text-generation-inference#3082: uv's Python below root's home, which others cannot read."""
    script = (
        "import sys, os; print(*{os.path.realpath(p) for p in [sys.executable, sys.prefix, *sys.path] if p}, sep='\\n')"
    )
    paths = image.python(script).stdout.split()
    assert paths and not [path for path in paths if path.startswith("/root")]


def test_no_bytecode_is_stale(image: Image) -> None:
    """Rewritten file times make ordinary bytecode stale; a read-only root would compile it anew at every start."""
    done = image.run(["-v", "-c", "import torch, transformers"], entrypoint="/opt/dflash/bin/python")
    assert done.returncode == 0
    loaded = [line for line in done.stderr.splitlines() if line.startswith("# code object from ")]
    compiled = [line for line in loaded if ".pyc" not in line]
    assert len(loaded) > 1000, "python -v says where code comes from; if it does not, this test shows nothing"
    assert "bytecode is stale" not in done.stderr and compiled == []


def test_the_size_is_within_its_budget(image: Image) -> None:
    assert 0 < image.manifest["size_bytes"] < SIZE_BUDGET_BYTES


def test_the_manifest_lists_debian_and_python_packages(image: Image) -> None:
    packages = image.manifest["packages"]
    assert {"torch", "transformers", "triton"} <= packages["python"].keys()
    assert {"tini", "g++", "python3-dev"} <= packages["debian"].keys()
    assert "invoke" not in packages["python"], "host tools do not belong into the image"
