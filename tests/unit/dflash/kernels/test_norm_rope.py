"""RMSNorm and RoPE in one kernel, interpreted on the CPU, against the model's own in float64."""

from __future__ import annotations

import pytest
import torch

from tests.unit.dflash.kernels.interpreted import BROKEN_HEADS, HEADS, Errors

LIMITS = {"float32": 1e-6, "bfloat16": 5e-3}
MEASURES = ("out", "x", "weight")


@pytest.mark.parametrize("name", HEADS)
def test_output_and_gradients_are_those_of_the_norm_and_the_rotation(
    name: str, errors: dict[str, dict[str, Errors]]
) -> None:
    """Lengths that end inside a program, one rope or one for each row, and gradients that lie anyhow in memory."""
    found = errors["heads"][name]
    for measure in MEASURES:
        assert found[measure] < LIMITS[HEADS[name].dtype], measure
    assert found["other shape"] == 0


@pytest.mark.parametrize("name", BROKEN_HEADS)
def test_a_broken_kernel_is_far_outside_the_limits(name: str, errors: dict[str, dict[str, Errors]]) -> None:
    assert errors["broken"][name][BROKEN_HEADS[name].measure] > 10 * LIMITS["bfloat16"]


def test_a_compiled_graph_calls_the_operator_forward_and_backward(errors: dict[str, dict[str, Errors]]) -> None:
    """fullgraph: a graph break or a missing shape function would raise."""
    assert errors["compiled"]["norm_rope"] == {"out": 0, "x": 0, "weight": 0}


def test_the_kernel_takes_powers_of_two_and_leaves_float64_alone() -> None:
    pytest.importorskip("triton")
    from dflash.kernels.norm_rope import takes

    widths = [8, 16, 48, 64, 80, 96, 128, 256]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert [h for h in widths if takes(h, dtype)] == [16, 64, 128, 256]
    assert not any(takes(h, torch.float64) for h in widths)
