"""The smoke test in the image, twice on one cache: what the first start compiles the second one loads, counted."""

from __future__ import annotations

import json

import pytest

from env.image import Mount
from tests.image.conftest import Image

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]


def test_the_second_container_on_the_same_cache_compiles_nothing(image: Image, shared_places: list[Mount]) -> None:
    """tao-skill-bank PR 150; the stranger's uid, read-only root, no network."""
    new_files = []
    for number in (1, 2):
        done = image.run(["smoke", "--json", f"/runs/smoke-{number}.json"], mounts=shared_places)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        bad = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line or "ERROR" in line]
        assert not bad
        found = json.loads((shared_places[1].source / f"smoke-{number}.json").read_text())
        new_files.append(found["compiled"]["new_files"])
    assert new_files[0] > 0, "the first start on an empty cache compiles, or the count shows nothing"
    assert new_files[1] == 0, new_files
