"""The fp8 kernels, interpreted on the CPU, against torch; tests/gpu has them compiled."""

from __future__ import annotations

import pytest

from tests.unit.dflash.kernels.interpreted_fp8 import DTYPES, HEADS, SHAPES, run


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    pytest.importorskip("triton")
    return run()


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in DTYPES])
@pytest.mark.parametrize("name", SHAPES)
def test_both_layouts_hold_the_scaled_matrix_and_what_pads_it_is_zero(
    name: str, dtype: str, differences: dict[str, float]
) -> None:
    """The memory held NaN before, so that a place left out would show."""
    assert {differences[f"{name}, {dtype}: {key}"] for key in ("rows", "columns", "padding")} == {0.0}


@pytest.mark.parametrize("name", HEADS)
def test_chances_are_softmax_times_the_softcaps_slope_without_the_label(
    name: str, differences: dict[str, float]
) -> None:
    """Labels 0 and V - 1 among them, and a vocabulary that ends in the middle of a tile."""
    assert differences[f"{name}: chances"] < 3e-6
    assert differences[f"{name}: plain form"] < 1e-6
    assert differences[f"{name}: label"] == 0
