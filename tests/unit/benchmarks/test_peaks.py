"""The machine's own rates: what is divided by what."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import peaks

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_rates_are_the_work_of_one_call_over_its_median_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 0.5, 0.5, 0.5, 0.5, 0.01, 9.0] * 2)
    monkeypatch.setattr(peaks, "seconds_of", lambda function, device: next(seconds))
    found = peaks.measure_peaks(CPU)
    assert found.matmul_flops == 2 * 1024**3 / 0.5
    assert found.copy_bytes == 2 * 2**26 / 0.5  # read and written
    assert found.matmul == "float32 1024^3"


def test_seconds_are_those_of_the_function() -> None:
    assert peaks.seconds_of(lambda: time.sleep(0.05), CPU) >= 0.05
    assert peaks.seconds_of(lambda: None, CPU) < 0.05
