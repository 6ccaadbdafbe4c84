"""The vocabulary kernels, interpreted on the CPU, against cross_entropy in float64; tests/gpu has them compiled."""

from __future__ import annotations

import pytest

from tests.unit.dflash.kernels.interpreted import BROKEN_ENTROPY, ENTROPY, Errors

LIMITS = {
    "float32": {"loss": 1e-5, "top": 2e-6, "gradient": 5e-7},
    "bfloat16": {"loss": 1e-5, "top": 2e-6, "gradient": 4e-3},  # the gradient is rounded once, to 8 bits
}


@pytest.mark.parametrize("name", ENTROPY)
def test_loss_and_gradient_are_those_of_cross_entropy(name: str, errors: dict[str, dict[str, Errors]]) -> None:
    """Labels 0 and V - 1 among them, a vocabulary that ends in the middle of a tile, softcap and multiplier."""
    found = errors["entropy"][name]
    for measure, limit in LIMITS[ENTROPY[name].dtype].items():
        assert found[measure] < limit, measure
    assert found["weight 0"] == 0
    assert found["not in place"] == 0


@pytest.mark.parametrize("name", ENTROPY)
def test_the_best_token_is_the_first_of_the_largest(name: str, errors: dict[str, dict[str, Errors]]) -> None:
    """As argmax on the CPU and at decode: a tie must not count as a hit in one place and as a miss in the other."""
    assert errors["entropy"][name]["best"] == 0


@pytest.mark.parametrize("name", BROKEN_ENTROPY)
def test_a_broken_kernel_is_far_outside_the_limits(name: str, errors: dict[str, dict[str, Errors]]) -> None:
    broken = BROKEN_ENTROPY[name]
    limit = LIMITS["bfloat16"].get(broken.measure, 0.0)  # the wider ones
    assert errors["broken"][name][broken.measure] > 5 * limit
