"""The cache stage compiles for every device of training, with the threads that training has; GPUs are names here."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import warmup
from pipeline.config import RunConfig
from pipeline.sessions import merged
from tests.tiny_run import tiny_config

CORES = 16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what is compiled where, each with the threads that torch then has."""
    found: list[str] = []

    class Compiles:
        def __init__(self, name: str) -> None:
            self.name = name

        def warm_up(self) -> None:
            found.append(f"{self.name}, {torch.get_num_threads()} threads")

        def record(self, shapes: Any, gate: Any, name: str) -> None:
            found.append(f"{name}, {torch.get_num_threads()} threads")

    class Target:
        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(1, 1)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
    monkeypatch.setattr(warmup, "load_target", lambda folder, dtype, device: Target())
    monkeypatch.setattr(warmup, "new_drafter", lambda *how: None)
    monkeypatch.setattr(warmup.Borrowed, "of", lambda *how: None)
    monkeypatch.setattr(warmup, "Replica", lambda name, *how: Compiles(name))
    monkeypatch.setattr(warmup.TargetForward, "of", lambda *how: Compiles(""))
    monkeypatch.setattr(warmup, "_current", lambda device: nullcontext())
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return found


def _config(workers: str, drafters: tuple[str, ...], targets: tuple[str, ...]) -> RunConfig:
    topology = {"workers": workers, "drafters": drafters, "targets": targets}
    return tiny_config(data={"features": "online"}, topology=topology)


def test_threads_compile_for_every_gpu_and_have_all_cores(compiled: list[str]) -> None:
    config = _config("threads", ("cuda:2", "cuda:3") * 2, ("cuda:0", "cuda:1"))
    assert warmup.compile_once(config, None, None)["graphs"] == 0  # type: ignore[arg-type]
    places = ("drafter on cuda:2", "drafter on cuda:3", "target on cuda:0", "target on cuda:1")
    assert compiled == [f"{place}, {CORES} threads" for place in places]


def test_processes_compile_for_the_numbers_that_ranks_see_with_a_ranks_share_of_the_cores(
    compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The count is written into what is compiled for a target on the CPU, and is not in torch's key."""
    before = torch.get_num_threads()
    warmup.compile_once(_config("processes", ("cuda:0", "cuda:1"), ("cpu", "cpu")), None, None)  # type: ignore[arg-type]
    assert compiled == ["drafter on cuda:0, 8 threads", "target on cpu, 8 threads"]
    assert torch.get_num_threads() == before and capsys.readouterr().err == ""


def test_where_no_gpu_of_the_runs_has_such_a_number_it_says_who_compiles(
    compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config("processes", ("cuda:4", "cuda:5"), ("cuda:6", "cuda:7"))
    warmup.compile_once(config, None, None)  # type: ignore[arg-type]
    assert compiled == [] and "its first rank compiles" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "apart", "threads"), [("cuda", False, 16), ("cuda", True, 4), ("cpu", False, 4)])
def test_cores_are_shared_by_who_computes_on_them(compiled: list[str], device: str, apart: bool, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        warmup.set_threads(4, torch.device(device), apart=apart)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_session_says_on_how_many_hosts_it_was() -> None:
    gate = {**dict.fromkeys(("compiles", "compiles_after_warmup", "eager_bodies", "misses"), 0), "functions": []}
    gate |= {"seconds_compiling": 0.0, "seconds_parked": 0.0}
    parts = [
        {"gate": gate, "host": host, "warmup_seconds": 1.0, "built": 1, "loaded": 0, "waited": {}} for host in "aab"
    ]
    assert merged(parts)["hosts"] == 2 and merged(parts[:2])["hosts"] == 1
