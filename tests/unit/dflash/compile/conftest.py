"""torch keeps its compile settings and caches for the whole process: every test here starts and leaves them clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

from dflash.compile.settings import SETTINGS


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    before = {name: getattr(torch._dynamo.config, name) for name in SETTINGS}
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)
    torch._dynamo.reset()
