"""One run of the interpreted kernels for all tests of the folder."""

from __future__ import annotations

import pytest

from tests.unit.dflash.kernels.interpreted import Errors, run


@pytest.fixture(scope="session")
def errors() -> dict[str, dict[str, Errors]]:
    """Return what interpreted.run found."""
    pytest.importorskip("triton")
    return run()
