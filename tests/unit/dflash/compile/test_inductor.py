"""What the gate asks of Inductor: the same kernels from every build, and none built twice."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor import compile_fx

from dflash.compile.counters import counting_backend, disk_counts


class Products(nn.Module):
    """Two weights and nothing that is not a library's kernel: no C++ is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.eye(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first @ self.second


def _disk_counts_of(model: nn.Module) -> dict[str, int]:
    """Compile forward and backward anew, or load them; return which."""
    torch.compiler.reset()
    before, backend = disk_counts(), counting_backend("inductor", lambda direction: None)
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3, 4)).sum().backward()
    return disk_counts(before)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def test_weights_that_lie_in_one_tensor_load_what_was_built_for_weights_that_lie_apart(
    cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """topology.shard_optimizer lays them so; on a GPU it built anew what the cache stage had built."""
    monkeypatch.setattr(compile_fx, "is_gpu", lambda kind: True)  # where storage is in the key
    # Autograd's own cache, which has no storage in its key, leaves out graphs with operators of ours.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert _disk_counts_of(Products()) == {"built": 2, "loaded": 0}

        together, whole = Products(), torch.zeros(64)
        for start, weight in zip((0, 32), together.parameters(), strict=True):
            weight.data = whole[start : start + 16].view(4, 4)
        assert _disk_counts_of(together) == {"built": 0, "loaded": 2}


IN_A_PROCESS = """
import sys, types
first = types.ModuleType("first")
sys.modules["first"] = first
import torch
{then}
import torch._functorch.config
from tests.unit.dflash.compile.test_inductor import Products, _disk_counts_of
with torch._functorch.config.patch(enable_autograd_cache=False):
    print(_disk_counts_of(Products()))
"""


def test_what_a_process_built_is_loaded_by_one_that_imported_something_else_before_torch(
    cold: None, repository: Path
) -> None:
    """The key had the name of the first module that has a `torch`: transformers' where that was imported first."""

    def counts(then: str) -> str:
        command = [sys.executable, "-c", IN_A_PROCESS.format(then=then)]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.strip()

    assert counts("") == "{'built': 2, 'loaded': 0}"
    assert counts("first.torch = torch") == "{'built': 0, 'loaded': 2}"


def test_memory_formats_are_pickled_as_they_were_meant() -> None:
    counting_backend("inductor", lambda direction: None)
    for kept in (torch.contiguous_format, torch.channels_last):
        assert pickle.loads(pickle.dumps(kept)) is kept


def test_kernels_are_chosen_by_rule_in_forward_and_backward_and_nowhere_else(
    cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, the tile of a reduction differs between builds, and with it the last bits of a sum."""
    seen, real = list[tuple[bool, bool]](), compile_fx.compile_fx_inner

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((bool(kwargs.get("is_backward")), torch._inductor.config.deterministic))
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    _disk_counts_of(Products())
    assert seen == [(False, True), (True, True)]
    assert not torch._inductor.config.deterministic
