"""One tiny target with its answers and features for the scenarios of a file; every run gets a folder of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline import cache
from tests.tiny_run import TinyRun

MakeBench = Callable[[], TinyRun]


@pytest.fixture(scope="session")
def make_bench(tmp_path_factory: pytest.TempPathFactory) -> MakeBench:
    """Return a function that makes a new folder with target, prompts and configuration, and nothing computed yet."""
    numbers = itertools.count()

    def make() -> TinyRun:
        folder = tmp_path_factory.mktemp(f"bench-{next(numbers)}")
        return TinyRun.make(folder)

    return make


@pytest.fixture(scope="module")
def shared_bench(make_bench: MakeBench) -> TinyRun:
    """Of one file: which files share a process, and in which order, is chance with `invoke test --jobs`."""
    return make_bench()


@pytest.fixture(autouse=True, scope="module")
def _threads_as_before() -> Iterator[None]:
    """Training sets the process's number of intra-op threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(shared_bench: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """Return the shared bench; runs of this test are in its own folder, answers and features are shared.

    The cache stage does not compile here (1.3 s each time); it does for the run of `finished` and in real processes.
    """
    own = TinyRun(shared_bench.folder, tmp_path / "runs")
    own.use(monkeypatch)
    monkeypatch.setattr(cache, "compile_once", lambda config, folder, drafter: {})
    return own
