"""Each rank sees its own GPUs from 0 on, so that what one compiled serves all; a table stands for the driver."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pipeline import own_gpus
from pipeline.config import RunConfig
from pipeline.own_gpus import VISIBLE, Names, compiled_places, places_of, see_only
from tests.tiny_run import tiny_config


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives as many GPUs as the variable names when it is first asked."""
    monkeypatch.setattr(own_gpus, "_count", lambda: len(environ[VISIBLE].split(",")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


environ: dict[str, str] = {}


def _config(drafters: Sequence[str], targets: Sequence[str], features: str = "online", **how: str) -> RunConfig:
    config = tiny_config(data={"features": features}, topology={"workers": how.get("workers", "processes")})
    # Past the check for devices that repeat, which is made for whole configurations.
    topology = config.topology.model_copy(update={"drafters": tuple(drafters), "targets": tuple(targets)})
    return config.model_copy(update={"topology": topology})


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("given", "local", "hidden", "seen"),
    [
        (None, 0, "4,0", {"cuda:4": "cuda:0", "cuda:0": "cuda:1"}),
        (None, 1, "5,1", {"cuda:5": "cuda:0", "cuda:1": "cuda:1"}),
        (None, 2, "1", {"cuda:1": "cuda:0"}),  # both on one
        ("7,6,5,4, GPU-3f,GPU-2a", 1, "GPU-2a,6", {"cuda:5": "cuda:0", "cuda:1": "cuda:1"}),
    ],
)
def test_a_rank_counts_its_drafters_gpu_first_and_then_its_targets(
    given: str | None, local: int, hidden: str, seen: dict[str, str]
) -> None:
    config = _config(["cuda:4", "cuda:5", "cuda:1"], ["cuda:0", "cuda:1", "cuda:1"])
    environ.clear()
    environ.update({} if given is None else {VISIBLE: given})
    assert see_only(places_of(config, local), pytest.fail, environ) == {"cpu": "cpu", **seen}
    assert environ[VISIBLE] == hidden


@pytest.mark.usefixtures("driver")
def test_with_cached_features_no_targets_gpu_is_kept() -> None:
    environ.clear()
    config = _config(["cuda:1", "cuda:2"], ["cuda:0"], "cached")
    assert see_only(places_of(config, 1), pytest.fail, environ) == {"cpu": "cpu", "cuda:2": "cuda:0"}
    assert environ[VISIBLE] == "2"


@pytest.mark.parametrize("given", [{}, {VISIBLE: "3,2,1,0"}])
def test_a_driver_that_was_asked_before_hides_nothing_and_the_names_stay(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    monkeypatch.setattr(own_gpus, "_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    told, said = dict(given), list[str]()
    seen = see_only(places_of(_config(["cuda:3"], ["cuda:2"]), 0), said.append, told)
    assert said == ["train: cuda:3 and cuda:2 keep their numbers, so code that others compiled is compiled again"]
    assert seen == {"cpu": "cpu", "cuda:3": "cuda:3", "cuda:2": "cuda:2"} and told == given


def test_of_two_gpus_that_would_only_change_places_nothing_tells_whether_they_did_so_the_names_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(own_gpus, "_count", lambda: pytest.fail("nothing is hidden"))
    told, said = dict[str, str](), list[str]()
    config = _config(["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"])
    assert see_only(places_of(config, 0), pytest.fail, told)["cuda:1"] == "cuda:1"  # as they would be anyway
    seen = see_only(places_of(config, 1), said.append, told)
    assert len(said) == 1 and "cuda:1 and cuda:0 keep their numbers" in said[0]
    assert seen == {"cpu": "cpu", "cuda:1": "cuda:1", "cuda:0": "cuda:0"} and not told


def test_ranks_of_the_cpu_leave_the_driver_alone() -> None:
    told: dict[str, str] = {}
    assert see_only(places_of(_config(["cpu", "cpu"], ["cpu"]), 1), pytest.fail, told) == {"cpu": "cpu"} and not told


def test_people_are_told_the_names_of_the_configuration() -> None:
    names = Names({"cpu": "cpu", "cuda:5": "cuda:0", "cuda:0": "cuda:1"}, "host-a")
    assert names.device("cuda:5") == torch.device("cuda:0") and names.device("cuda:0") == torch.device("cuda:1")
    assert names.name(torch.device("cuda:0")) == "cuda:5 of host-a"
    assert names.of_process(torch.device("cuda:0")) == "rank 0: cuda:5 of host-a"
    assert Names().of_process(torch.device("cuda:0")) == "cuda:0"
    assert Names().device("cuda:5") == torch.device("cuda:5") and Names().name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("workers", "drafters", "targets", "expected"),
    [
        ("threads", ["cuda:2", "cuda:3", "cuda:2"], ["cuda:0"], (["cuda:2", "cuda:3"], ["cuda:0"])),
        ("processes", ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"], (["cuda:0"], ["cuda:0"])),
        ("processes", ["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"], (["cuda:0"], ["cuda:1"])),
        ("processes", ["cuda:0", "cuda:1"], ["cuda:0", "cuda:2"], (["cuda:0"], ["cuda:0", "cuda:1"])),
        ("processes", ["cuda:4", "cuda:5"], ["cuda:6", "cuda:7"], ([], [])),  # GPU 0 is somebody else's
        ("processes", ["cpu", "cpu"], ["cpu"], (["cpu"], ["cpu"])),
    ],
)
def test_the_cache_stage_compiles_for_the_numbers_that_training_uses_on_gpus_that_are_the_runs(
    workers: str, drafters: list[str], targets: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert compiled_places(_config(drafters, targets, workers=workers)) == expected
