"""The gate on a GPU: what only autograd's own thread for the device can show."""

from __future__ import annotations

import pytest

from tests.gate_tools import checkpointed_training_ends

pytestmark = pytest.mark.gpu


def test_recomputation_on_autograds_thread_ends_and_compiles_nothing_after_the_warm_up() -> None:
    report = checkpointed_training_ends("cuda", "inductor")
    assert (report["compiles_after_warmup"], report["eager_bodies"]) == (0, 0)
