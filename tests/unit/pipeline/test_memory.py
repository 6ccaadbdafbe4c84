"""What a metrics line says of memory; the GPU's allocator is a table here."""

from __future__ import annotations

import pytest
import torch

from pipeline.memory import memory, memory_record
from pipeline.own_gpus import Names

CPU, ONE, TWO = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats(device: torch.device) -> dict[str, int]:
        number = device.index + 1
        return {
            "requested_bytes.all.current": 100 * number,
            "allocated_bytes.all.current": 512 * number,
            "reserved_bytes.all.current": 2048 * number,
            "num_alloc_retries": number,
        }

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)


@pytest.mark.usefixtures("two_gpus")
def test_of_a_gpu_it_is_the_bytes_that_were_asked_for() -> None:
    one = {"allocated_bytes": 100, "reserved_bytes": 2048, "allocator_retries": 1}
    assert memory({ONE, CPU}) == {"cuda:0": one}
    assert memory({ONE}, lambda device: f"{device} of host") == {"cuda:0 of host": one}


@pytest.mark.usefixtures("two_gpus")
def test_a_line_has_the_sums_and_of_several_gpus_each_ones() -> None:
    """Of threads in one process, or of a process for each."""
    sums = {"allocated_bytes": 300, "reserved_bytes": 6144, "allocator_retries": 3}
    both, first, second = memory({TWO, ONE}), memory({ONE}), memory({TWO})
    assert memory_record([first]) == first["cuda:0"]
    for processes in ([both], [first, second]):
        assert memory_record(processes) == {**sums, "gpus": {"cuda:0": first["cuda:0"], "cuda:1": second["cuda:1"]}}


@pytest.mark.usefixtures("two_gpus")
def test_two_ranks_that_share_gpus_are_told_apart() -> None:
    """Each has its target on the other's GPU. One's part of a GPU must not stand for both."""
    held = [memory({ONE, TWO}, Names(host="a", rank=rank).of_process) for rank in range(2)]
    found = memory_record(held)["gpus"]
    assert list(found) == [f"rank {rank}: cuda:{gpu} of a" for rank in range(2) for gpu in range(2)]


@pytest.mark.usefixtures("two_gpus")
def test_a_process_without_a_gpu_beside_one_that_has_one_adds_nothing() -> None:
    assert memory_record([memory({ONE}), memory({CPU})]) == memory({ONE})["cuda:0"]


def test_on_the_cpu_it_is_the_resident_set_of_all_processes() -> None:
    found = memory({CPU})
    assert list(found) == ["cpu"] and found["cpu"]["resident_bytes"] > 2**20
    assert memory_record([found, found]) == {"resident_bytes": 2 * found["cpu"]["resident_bytes"]}
