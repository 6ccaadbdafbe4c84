"""The compile cache on a GPU: Triton's groups hold absolute paths, and a moved cache must be used all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from env.cache_archive import export_key, import_archive
from env.cache_volume import listed_files
from tests.scenarios.test_cache_volume import FACTORS, KEY, start

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_a_second_start_and_a_moved_cache_build_nothing(tmp_path: Path) -> None:
    """pytorch#144859, counted: 3.8 GB of cache at another path were not used, in silence."""
    place = tmp_path / "compile"
    first = start(place, "cuda")
    assert first["built"] > 0, "nothing was compiled, so what follows would show nothing"
    assert any(name.startswith("triton/") and name.endswith(".cubin") for name in listed_files(place / KEY))
    second = start(place, "cuda")
    assert (second["built"], second["value"]) == (0, first["value"]) and second["loaded"] > 0
    files = set(listed_files(place / KEY))
    export_key(place / KEY, tmp_path / "cache.tar")
    import_archive(tmp_path / "cache.tar", tmp_path / "moved", FACTORS, print)
    place.rename(tmp_path / "gone")  # a path into the old place would lead somewhere else
    third = start(tmp_path / "moved", "cuda")
    assert (third["built"], third["value"]) == (0, first["value"]), third["lines"]
    assert set(listed_files(tmp_path / "moved" / KEY)) == files, "Triton compiled again beside what was imported"
