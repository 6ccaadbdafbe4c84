"""What a metrics line says of memory; the GPU's allocator is a table here."""

from __future__ import annotations

import pytest
import torch

from pipeline.memory import memory

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
def test_bytes_are_added_up_over_gpus_and_are_those_that_were_asked_for() -> None:
    assert memory({ONE}) == {"allocated_bytes": 100, "reserved_bytes": 2048, "allocator_retries": 1}
    assert memory({ONE, TWO}) == {"allocated_bytes": 300, "reserved_bytes": 6144, "allocator_retries": 3}


def test_on_the_cpu_it_is_the_resident_set() -> None:
    found = memory({CPU})
    assert list(found) == ["resident_bytes"] and found["resident_bytes"] > 2**20
