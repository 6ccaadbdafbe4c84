"""Which engine is used and why, with made-up programs, and what a made-up kernel allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from env.engines import ENGINES, Engine, HostFacts, find_engine
from env.errors import EnvError
from tests.engine_tools import FakeEngines

_FAILS = "#!/bin/sh\necho 'Cannot connect to the daemon' >&2\nexit 1\n"
_NO_BUILDX = '#!/bin/sh\ncase "$1" in buildx) exit 1 ;; *) echo 27.0 ;; esac\n'


def _status(cap_eff: str) -> str:
    return f"Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t{cap_eff}\nCapBnd:\t000001ffffffffff\n"


def _host(tmp_path: Path, *, cap_eff: str = "000001ffffffffff", cgroups: str = "v2") -> tuple[Path, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(_status(cap_eff))
    folder = tmp_path / "cgroup"
    folder.mkdir()
    if cgroups == "v2":
        (folder / "cgroup.controllers").write_text("cpu memory\n")
    else:
        (folder / "unified").mkdir()
    return tmp_path / "proc", folder


@pytest.mark.parametrize(
    "present, name, why",
    [
        ((), None, ""),
        (("buildah",), "buildah", "docker is not installed; podman is not installed; buildah works"),
        (("podman", "buildah"), "podman", "docker is not installed; podman works"),
        (("docker", "podman"), "docker", "docker works"),
    ],
)
def test_the_first_engine_that_answers_is_taken_and_the_reason_names_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...], name: str | None, why: str
) -> None:
    FakeEngines.make(tmp_path, *present).use(monkeypatch)
    found = find_engine()
    assert (found and found.name, found.why if found else "") == (name, why)


@pytest.mark.parametrize(
    "docker, reason",
    [
        (_FAILS, "docker has no running daemon"),
        (_NO_BUILDX, "docker has no buildx (BuildKit), which the build needs for its secrets"),
    ],
)
def test_a_docker_that_cannot_build_is_passed_over_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker: str, reason: str
) -> None:
    fakes = FakeEngines.make(tmp_path, "podman")
    fakes.program("docker", docker)
    fakes.use(monkeypatch)
    found = find_engine()
    assert found is not None and (found.name, found.why) == ("podman", f"{reason}; podman works")
    with pytest.raises(EnvError) as caught:
        find_engine("docker")
    assert str(caught.value) == f"--engine: {reason}. Install or start it, or leave the option out."


def test_an_engine_that_does_not_start_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FakeEngines.make(tmp_path)
    fakes.program("podman", "#!/nowhere/interpreter\n")  # installed for another machine: exec fails
    fakes.program("buildah", "#!/bin/sh\nexit 125\n")
    fakes.use(monkeypatch)
    assert find_engine() is None
    with pytest.raises(EnvError, match="--engine: podman does not start"):
        find_engine("podman")


def test_a_wanted_engine_is_the_only_one_that_is_asked() -> None:
    asked: list[list[str]] = []

    def answers(command: list[str]) -> str:
        asked.append(command)
        return ""

    found = find_engine("podman", which=lambda name: name, answers=answers)
    assert found == Engine(name="podman", why="podman works")
    assert asked == [["podman", "--version"]]


def test_docker_is_asked_for_its_server_since_the_client_alone_always_answers() -> None:
    asked: list[list[str]] = []

    def answers(command: list[str]) -> str:
        asked.append(command)
        return "27.0"

    find_engine("docker", which=lambda name: name, answers=answers)
    assert asked == [["docker", "version", "--format", "{{.Server.Version}}"], ["docker", "buildx", "version"]]


@pytest.mark.parametrize(
    "wanted, line",
    [
        ("docker", "--engine: docker is not installed. Install or start it, or leave the option out."),
        ("nerdctl", "--engine: 'nerdctl' is no engine. Choose one of docker, podman, buildah."),
    ],
)
def test_a_wanted_engine_that_is_not_there_is_one_line_and_no_other_is_taken(wanted: str, line: str) -> None:
    with pytest.raises(EnvError) as caught:
        find_engine(wanted, which=lambda name: None if name == "docker" else name, answers=lambda command: "1")
    assert str(caught.value) == line and caught.value.exit_code == 3


def test_buildah_builds_and_cannot_run() -> None:
    assert [name for name in ENGINES if Engine(name=name, why="").can_run] == ["docker", "podman"]


def test_a_common_host_asks_for_nothing_special(tmp_path: Path) -> None:
    proc, cgroups = _host(tmp_path)
    assert HostFacts.read(proc, cgroups, uid=0) == HostFacts()
    assert HostFacts.read(proc, cgroups, uid=1000) == HostFacts(rootless=True)


def test_cgroups_of_version_1_or_mixed_are_seen(tmp_path: Path) -> None:
    proc, cgroups = _host(tmp_path, cgroups="hybrid")
    assert HostFacts.read(proc, cgroups).hybrid_cgroups
    (cgroups / "cgroup.controllers").write_text("cpu\n")
    assert not HostFacts.read(proc, cgroups).hybrid_cgroups
    assert not HostFacts.read(proc, tmp_path / "not-mounted").hybrid_cgroups  # e.g. macOS


@pytest.mark.parametrize(
    "cap_eff, may",
    [("0000000001000000", True), ("00000000fe7fffff", False), ("0000000000000000", False), ("no number", False)],
)
def test_the_right_to_raise_limits_is_bit_24_of_the_effective_capabilities(
    tmp_path: Path, cap_eff: str, may: bool
) -> None:
    proc, cgroups = _host(tmp_path, cap_eff=cap_eff)
    assert HostFacts.read(proc, cgroups).may_raise_limits is may


def test_a_kernel_that_says_nothing_is_taken_for_one_that_allows_nothing(tmp_path: Path) -> None:
    assert HostFacts.read(tmp_path / "nothing", tmp_path / "nothing") == HostFacts(may_raise_limits=False)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tx\n")  # no CapEff
    assert not HostFacts.read(tmp_path, tmp_path / "nothing").may_raise_limits
