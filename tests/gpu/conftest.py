"""These tests were asked for by name (invoke test --gpu): without a GPU they fail; skipped ones would look green."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    assert torch.cuda.is_available(), "torch sees no GPU here"
