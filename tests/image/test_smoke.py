"""The smoke test in the image, twice on one cache: what the first start compiles the second one loads, counted."""

from __future__ import annotations

import json
import re

import pytest

from env.image import Mount
from tests.image.conftest import Image

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]


COMPLAINT = re.compile(r"\b(warning:|error:|traceback\b|\w*Warning\b|WARNING|ERROR)")
SHM_BYTES = {"first": 1 << 30, "second": 8 << 20}


def test_the_second_container_on_the_same_cache_compiles_nothing(image: Image, shared_places: list[Mount]) -> None:
    """tao-skill-bank PR 150; the stranger's uid, read-only root, no network.

    The second one has 8 MiB of shared memory: the stages train without loader workers, so it is a warning only
    (pytorch#5040).
    """
    found = []
    for number, shm_bytes in SHM_BYTES.items():
        done = image.run(["smoke", "--json", f"/runs/{number}.json"], mounts=shared_places, shm_bytes=shm_bytes)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        complaints = [line for line in (done.stdout + done.stderr).splitlines() if COMPLAINT.search(line)]
        assert ["/dev/shm" in line for line in complaints] == [True] * (number == "second"), complaints
        found.append(json.loads((shared_places[1].source / f"{number}.json").read_text()))
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
