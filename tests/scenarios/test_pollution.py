"""The story the project began with: a clean environment, another inference stack on top, and doctor names all of it.

Real: the environment (uv), the wheels in it and the command. Made up: what is in the wheels, and their lock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from env.uvtool import find_uv
from tests.wheels import build_wheel, offline_args, repack_wheel

LOCKED = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
}
Named = set[tuple[str, str, str]]
"""(level, where, a part of what was said)."""


def _package(name: str, version: str) -> dict[str, bytes]:
    return {f"{name}/__init__.py": f"__version__ = {version!r}\n".encode(), f"{name}/core.py": b"def run(): return 1\n"}


@dataclass
class World:
    """One environment with its index and lock; `environ` is what the shell of its user holds."""

    folder: Path
    repository: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def index(self) -> Path:
        return self.folder / "index"

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "venv/lib").glob("python*/site-packages")
        return found

    def uv(self, *arguments: str) -> None:
        done = subprocess.run([str(find_uv()), *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def install(self, *requirements: str) -> None:
        """Install over what is there, without regard to what anything requires."""
        self.uv(
            "pip", "install", "-q", f"--python={self.python}", "--no-deps", *offline_args(self.index), *requirements
        )

    def uninstall(self, name: str) -> None:
        self.uv("pip", "uninstall", "-q", f"--python={self.python}", name)

    def doctor(self) -> tuple[int, list[dict[str, str]]]:
        """Run the command in the environment's Python; return its exit code and findings."""
        report = self.folder / "report.json"
        command = [str(self.python), "-m", "env.doctor", f"--lock={self.folder / 'story.txt'}", f"--json={report}"]
        done = subprocess.run(command, cwd=self.repository, env=self.environ, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        findings: list[dict[str, str]] = json.loads(report.read_text())
        report.unlink()
        for finding in findings:  # the person reads what the file holds
            assert f"{finding['level']}: {finding['where']}: {finding['what']}" in done.stdout + done.stderr
            assert finding["fix"]
        return done.returncode, findings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> World:
    folder = tmp_path_factory.mktemp("story")
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "TMPDIR") if name in os.environ}
    places = {"DFLASH_CACHE": str(folder / "cache"), "DFLASH_RUNS": str(folder / "runs"), "CUDA_VISIBLE_DEVICES": ""}
    world = World(folder, repository, {**keep, **places, "PYTHONDONTWRITEBYTECODE": "1"})
    pins = {name: build_wheel(world.index, name, version, _package(name, version)) for name, version in LOCKED.items()}
    pins["packaging"] = repack_wheel(world.index, "packaging")  # the doctor itself needs it
    lines = [f"{name}=={pin.version} \\\n    --hash=sha256:{pin.sha256}\n" for name, pin in pins.items()]
    (folder / "story.txt").write_text("".join(lines))
    world.uv("venv", "-q", "--no-project", f"--python={sys.executable}", str(folder / "venv"))
    world.install(*(f"{name}=={pin.version}" for name, pin in pins.items()))
    for name, version, requires in (
        ("torch", "2.9.0", ()),
        ("transformers", "4.57.1", ()),
        ("vllm", "0.11.0", ("torch==2.9.0", "transformers<5")),
        ("sglang", "0.5.4", ()),
        ("flash-attn", "2.8.3", ("torch", "einops")),
        ("ring-attention", "0.1", ("torch>=2",)),
        ("httptools", "0.7", ()),
    ):
        build_wheel(world.index, name, version, _package(name.replace("-", "_"), version), requires=requires)
    hook = b"import os; os.environ.setdefault('STORY', '1')\n"
    build_wheel(world.index, "speedups", "1.0", {"speedups.pth": hook, "transformers/patched.py": b""})
    return world


@dataclass(frozen=True)
class Pollution:
    name: str
    do: Callable[[World], object]
    undo: Callable[[World], object]
    named: Callable[[World], Named]


def _swap(name: str, version: str) -> Pollution:
    return Pollution(
        f"{name} swapped",
        lambda world: world.install(f"{name}=={version}"),
        lambda world: world.install(f"{name}=={LOCKED[name]}"),
        lambda world: {("error", name, f"version {version} is installed")},
    )


def _stranger(name: str, version: str, level: str, what: str) -> Pollution:
    return Pollution(
        name,
        lambda world: world.install(name),
        lambda world: world.uninstall(name),
        lambda world: {(level, f"{name}=={version}", what)},
    )


def _variable(name: str, value: str, level: str, what: str) -> Pollution:
    return Pollution(
        name,
        lambda world: world.environ.update({name: value}),
        lambda world: world.environ.pop(name),
        lambda world: {(level, name, what)},
    )


def _patch_triton(world: World) -> None:
    path = world.site / "triton/core.py"
    path.unlink()  # uv links files out of its cache: writing into this one would change the wheel as well
    path.write_bytes(b"def run(): return 2\n")


def _second_torch(world: World) -> None:
    other = world.folder / "other/torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("__version__ = '2.8.0'\n")
    world.environ["PYTHONPATH"] = str(other.parent)


def _no_second_torch(world: World) -> None:
    shutil.rmtree(world.folder / "other")
    del world.environ["PYTHONPATH"]


POLLUTIONS = [
    _swap("torch", "2.9.0"),
    _swap("transformers", "4.57.1"),
    _stranger(
        "vllm", "0.11.0", "error", "brings its own torch and patches transformers; it builds on torch, transformers"
    ),
    _stranger("sglang", "0.5.4", "error", "brings its own torch"),
    _stranger("flash-attn", "2.8.3", "error", "replaces attention kernels"),
    _stranger("ring-attention", "0.1", "error", "builds on torch"),
    _stranger("httptools", "0.7", "warning", "is not in the lock"),
    Pollution(
        "a package with a start hook and a file inside transformers",
        lambda world: world.install("speedups"),
        lambda world: world.uninstall("speedups"),
        lambda world: {
            ("error", "speedups==1.0", "puts transformers/patched.py among the files of transformers"),
            ("error", str(world.site / "speedups.pth"), "runs code at every start of Python (import os; "),
        },
    ),
    Pollution(
        "a sitecustomize",
        lambda world: (world.site / "sitecustomize.py").write_text(""),
        lambda world: (world.site / "sitecustomize.py").unlink(),
        lambda world: {("error", str(world.site / "sitecustomize"), "runs at every start of Python")},
    ),
    Pollution(
        "triton patched in place",
        _patch_triton,
        lambda world: world.install("--reinstall", "triton==3.6.0"),
        lambda world: {("error", "triton==3.6.0", "differs from what was installed: triton/core.py (content)")},
    ),
    Pollution(
        "a second torch on PYTHONPATH",
        _second_torch,
        _no_second_torch,
        lambda world: {
            ("error", str(world.folder / "other/torch"), "is imported instead of the one of torch=="),
            ("warning", "PYTHONPATH", "its modules come before the locked ones"),
        },
    ),
    _variable("TORCHDYNAMO_DISABLE", "1", "error", "torch.compile does nothing"),
    _variable("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1", "warning", "nothing that was compiled is found again"),
]


@pytest.fixture(scope="module")
def at_first(world: World) -> Named:
    """Return what doctor says of the machine itself (a small disk, say) while the environment is clean."""
    code, findings = world.doctor()
    assert code == 0, findings
    return {(f["level"], f["where"], f["what"]) for f in findings}


def _assert_named(findings: list[dict[str, str]], at_first: Named, expected: Named) -> None:
    """Everything expected is named exactly once, and nothing else is named."""
    said = {(f["level"], f["where"], f["what"]) for f in findings} - at_first
    missing = {e for e in expected if sum(e[:2] == s[:2] and e[2] in s[2] for s in said) != 1}
    assert not missing, (missing, said)
    assert len(said) == len(expected), said


@pytest.mark.parametrize("pollution", POLLUTIONS, ids=lambda pollution: pollution.name)
def test_each_pollution_is_named_alone_and_is_gone_when_undone(
    world: World, at_first: Named, pollution: Pollution
) -> None:
    pollution.do(world)
    try:
        code, findings = world.doctor()
        expected = pollution.named(world)
        _assert_named(findings, at_first, expected)
        assert code == (3 if any(level == "error" for level, _, _ in expected) else 0)
    finally:
        pollution.undo(world)
    code, findings = world.doctor()
    assert code == 0
    _assert_named(findings, at_first, set())


def test_another_stack_on_top_is_refused_with_the_complete_list(world: World, at_first: Named) -> None:
    done = []
    try:
        for pollution in POLLUTIONS:
            pollution.do(world)
            done.append(pollution)
        code, findings = world.doctor()
        assert code == 3
        _assert_named(findings, at_first, set().union(*(pollution.named(world) for pollution in POLLUTIONS)))
    finally:
        for pollution in reversed(done):
            pollution.undo(world)
    assert world.doctor()[0] == 0
