"""An optimizer cut among ranks trains to the bits of one that is whole, and its checkpoint is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.optim import MasterAdamW
from pipeline.sharded import Shard
from tests.rank_tools import Weights, in_ranks, made_up, sharded, threads_total
from tests.tiny_run import tiny_config

STEPS = 3


def _whole(world: int, dtype: torch.dtype) -> tuple[MasterAdamW, nn.Module, list[float]]:
    """Return optimizer and model of one process after STEPS with all ranks' gradients, and the norms."""
    model = Weights(dtype)
    optimizer = MasterAdamW(model, tiny_config().train)
    norms = []
    for step in range(STEPS):
        every = threads_total([made_up(10 * step + rank) for rank in range(world)])
        for gradient, value in zip(optimizer.gradients, every, strict=True):
            gradient.copy_(value)
        norms.append(float(optimizer.step(1e-2, torch.tensor(3.0))))
    return optimizer, model, norms


def _same(sent: Any, tensor: torch.Tensor) -> bool:
    return torch.equal(torch.from_numpy(sent), tensor.detach().float())


@pytest.mark.parametrize(
    ("world", "dtype", "chunk_bytes"),
    [(2, torch.bfloat16, 1 << 20), (3, torch.float32, 256), (6, torch.bfloat16, 256)],  # of six, one keeps nothing
)
def test_ranks_that_keep_a_part_each_end_with_the_bits_of_one_process(
    world: int, dtype: torch.dtype, chunk_bytes: int
) -> None:
    optimizer, model, norms = _whole(world, dtype)
    results = in_ranks(world, sharded, dtype, STEPS, chunk_bytes)
    assert all(isinstance(found, dict) for found in results), results
    kept = [found["kept"] for found in results]
    assert sorted(name for names in kept for name in names) == sorted(optimizer.names)
    for found in results:
        assert found["norms"] == norms
        assert all(_same(a, b) for a, b in zip(found["working"], model.parameters(), strict=True))
        assert found["equal"] == [True, False]  # then the last rank's weights were changed in one place
        assert found["seen as changed"]
    expected = optimizer.tensors()
    saved, *others = [found["saved"] for found in results]
    assert {stem: list(named) for stem, named in saved.items()} == {s: list(named) for s, named in expected.items()}
    assert all(_same(saved[stem][name], value) for stem in saved for name, value in expected[stem].items())
    assert others == [{"weights": {}, "optimizer": {}}] * (world - 1)


def test_the_gradients_that_a_rank_does_not_keep_are_not_what_it_is_told() -> None:
    """Otherwise the test above would pass with an exchange that sends everything to all."""
    found = in_ranks(2, sharded, torch.float32, 1, 1 << 20)
    every = threads_total([made_up(rank) for rank in range(2)])
    for rank, result in enumerate(found):
        summed = [_same(got, value) for got, value in zip(result["summed"], every, strict=True)]
        assert summed == [name in result["kept"] for name in result["names"]]
        others = [i for i, told in enumerate(summed) if not told]
        assert others and all(_same(result["summed"][i], made_up(rank)[i]) for i in others)


def test_what_ranks_saved_is_taken_up_by_any_part_of_it() -> None:
    optimizer, model, _ = _whole(2, torch.bfloat16)
    saved = copy.deepcopy(optimizer.tensors())
    keeps = Shard(1, 2).keeps([p.numel() for p in model.parameters()])
    fresh = Weights(torch.bfloat16)
    part = MasterAdamW(fresh, tiny_config().train, None, keeps)
    part.load(saved)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    again = part.tensors()
    assert list(again["weights"]) == [optimizer.names[index] for index in keeps]
    assert all(torch.equal(value, saved[stem][name]) for stem, named in again.items() for name, value in named.items())


@pytest.mark.parametrize(
    ("sizes", "world", "owners"),
    [
        ([5, 9, 1, 7], 2, [1, 0, 0, 1]),  # 9 + 1, 7 + 5
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),
        ([1, 2], 4, [1, 0]),
        ([3, 1, 2], 1, [0, 0, 0]),
    ],
)
def test_the_largest_parameters_are_dealt_first(sizes: list[int], world: int, owners: list[int]) -> None:
    shards = [Shard(rank, world) for rank in range(world)]
    assert all(shard.owners(sizes) == owners for shard in shards)
    kept: list[Any] = [shard.keeps(sizes) for shard in shards]
    assert sorted(index for part in kept for index in part) == list(range(len(sizes)))
