"""Places and keys of caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from env.caches import OWNED_VARIABLES, CacheDirs, cache_key, default_factors, environment_for_compile

FACTORS = {
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "cuda": "13.0",
    "gpu_capability": "9.0",
    "python": "3.11.7",
    "machine": "linux-x86_64",
    "source": "ab" * 32,
    "drafter": "cd" * 32,
    "block_size": "4",
}


@pytest.mark.parametrize("name", sorted(FACTORS))
def test_the_key_changes_with_every_factor(name: str) -> None:
    assert cache_key({**FACTORS, name: "other"})[0] != cache_key(FACTORS)[0]
    assert cache_key({k: v for k, v in FACTORS.items() if k != name})[0] != cache_key(FACTORS)[0]


_PERSONAL = ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "DFLASH_CACHE", "DFLASH_RUNS", "PWD")


@pytest.mark.parametrize("name", _PERSONAL)
def test_the_key_ignores_who_runs_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm PR 47573: the place of HOME was hashed into the key, so baked caches never hit."""
    before = cache_key(default_factors("s"))
    monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cache_key(default_factors("s")) == before


def test_the_key_of_another_process_in_another_place_is_the_same(tmp_path: Path, repository: Path) -> None:
    script = "from env.caches import *; print(cache_key(default_factors('s'))[0])"
    environ = {**os.environ, **dict.fromkeys(_PERSONAL, str(tmp_path)), "PYTHONPATH": str(repository)}
    other = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert other.stdout.strip() == cache_key(default_factors("s"))[0], other.stderr


def test_the_order_of_factors_does_not_matter_and_they_come_back_by_name() -> None:
    key, named = cache_key(dict(reversed(FACTORS.items())))
    assert key == cache_key(FACTORS)[0]
    assert list(named) == sorted(FACTORS) and named == FACTORS


def test_the_gpu_is_named_by_its_full_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#41871: kernels of sm_120 gave wrong numbers on sm_121."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(12, 1), (12, 0), (12, 1)][index])
    assert default_factors("s")["gpu_capability"] == "12.0+12.1"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_factors("s")["gpu_capability"] == "cpu"


def test_places_come_from_two_variables_and_default_to_the_repository(tmp_path: Path) -> None:
    default = CacheDirs.from_environment(tmp_path, {})
    assert (default.root, default.runs) == (tmp_path / ".cache", tmp_path / "runs")
    chosen = CacheDirs.from_environment(tmp_path, {"DFLASH_CACHE": "/elsewhere/c", "DFLASH_RUNS": "results"})
    assert (chosen.compile, chosen.runs) == (Path("/elsewhere/c/compile"), tmp_path / "results")
    for place in (chosen.venvs, chosen.models, chosen.packages, chosen.data, chosen.compile):
        assert place.is_relative_to("/elsewhere/c")


def test_naming_places_creates_nothing(tmp_path: Path) -> None:
    CacheDirs.from_environment(tmp_path, {})
    environment_for_compile(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


_COMPILE = """
import json, os, torch, torch._inductor.config
torch._inductor.config.cpp_cache_precompile_headers = False  # as dflash.compile does; see environment_for_compile
before = {k: v for k, v in os.environ.items() if "CACHE" in k or "TRITON" in k or "TORCH" in k}
torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
after = {k: v for k, v in os.environ.items() if "CACHE" in k or "TRITON" in k or "TORCH" in k}
print(json.dumps([before, after]))
"""


@pytest.mark.slow
def test_a_compile_writes_below_the_key_only_and_moves_no_variable(tmp_path: Path) -> None:
    """sgl-project/sglang-omni#439: Inductor moved the process-wide Triton cache variable into its own folder."""
    home, key = tmp_path / "home", tmp_path / "key"
    home.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON", "PYTORCH"))}
    environ = {**clean, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **environment_for_compile(key)}
    done = subprocess.run([sys.executable, "-c", _COMPILE], cwd=home, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert {k: v for k, v in after.items() if k in OWNED_VARIABLES} == {k: before[k] for k in OWNED_VARIABLES}
    assert any((key / "inductor").rglob("*.so"))
    assert [path for path in home.rglob("*") if path.is_file()] == []
