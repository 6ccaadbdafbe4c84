"""The smoke test in the image, twice on one cache: what the first start compiles the second one loads, counted."""

from __future__ import annotations

import json
import re

import pytest

from env.image import Mount
from tests.image.conftest import Image

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]


def test_the_second_container_on_the_same_cache_compiles_nothing(image: Image, shared_places: list[Mount]) -> None:
    """tao-skill-bank PR 150; the stranger's uid, read-only root, no network."""
    found = []
    for number in (1, 2):
        done = image.run(["smoke", "--json", f"/runs/smoke-{number}.json"], mounts=shared_places)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        complaint = re.compile(r"\b(warning:|error:|traceback\b|\w*Warning\b|WARNING|ERROR)")
        assert not [line for line in (done.stdout + done.stderr).splitlines() if complaint.search(line)]
        found.append(json.loads((shared_places[1].source / f"smoke-{number}.json").read_text()))
    cold, warm = (what["compiled"] for what in found)
    assert cold["new_files"] > 0 and cold["stages"]["cache"]["built"] > 0, "an empty cache, or the counts show nothing"
    assert warm == cold | {"new_files": 0, "stages": warm["stages"]}
    # Two graphs, forward and backward: in the cache stage and in verify, and for each of two drafters in training.
    assert warm["stages"] == {
        "cache": {"built": 0, "loaded": 2},
        "train": {"built": 0, "loaded": 4},
        "verify": {"built": 0, "loaded": 2},
    }
    # The same samples, weights and machine: the same losses, whether the code was compiled or loaded.
    losses = [[gate["detail"] for gate in what["gates"] if gate["name"] == "loss finite and fell"] for what in found]
    assert losses[0] == losses[1] != []
