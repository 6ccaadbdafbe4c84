"""What a container of ours is given: places, files, the way to an index, and nothing that is secret in its command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from env.caches import CacheDirs
from env.container import CA_IN_IMAGE, PASSED, base_mounts, container_argv, has_gpus, make_places, needs
from env.engines import Engine, HostFacts
from env.errors import EnvError
from env.image import Mount
from tests.engine_tools import DOCKER, PODMAN

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "UV_DEFAULT_INDEX": "https://me:pass@index.invalid/simple",
    "HTTPS_PROXY": "http://me:pass@proxy.invalid",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "my project/configs").mkdir(parents=True)
    (tmp_path / "my project/configs/quickstart.yaml").write_text("")
    (tmp_path / "home").mkdir()
    return tmp_path / "my project"


def _caches(root: Path, **chosen: str) -> CacheDirs:
    return CacheDirs.from_environment(root, chosen)


def _argv(root: Path, engine: Engine = DOCKER, **how: Any) -> list[str]:
    environ = {"HOME": str(root.parent / "home"), **how.pop("environ", {})}
    return container_argv(
        engine, "image", ["train"], root=root, caches=_caches(root), environ=environ, **{"gpus": False, **how}
    )


def test_the_whole_command_of_a_run_without_a_network(root: Path) -> None:
    rootless = Engine(name="podman", why="", facts=HostFacts(rootless=True))
    assert _argv(root, rootless, named=["configs/quickstart.yaml"], gpus=True, environ=SECRETS) == [
        *("podman", "--events-backend=none", "run", "--rm", "--read-only", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges", "--security-opt=label=disable"),
        *("--tmpfs=/tmp:rw,nosuid,nodev,mode=1777", "--shm-size=1073741824"),
        *(f"--user={os.getuid()}:{os.getgid()}", "--network=none", "--userns=keep-id", "--device=nvidia.com/gpu=all"),
        *(f"--volume={root}/.cache:/cache:rw", f"--volume={root}/runs:/runs:rw"),
        *(f"--volume={root}/configs/quickstart.yaml:/srv/dflash/configs/quickstart.yaml:ro", "image", "train"),
    ]


def test_what_leads_to_an_index_or_a_hub_is_passed_with_a_network_only_and_by_name(root: Path) -> None:
    environ = SECRETS | {"NO_PROXY": "", "AWS_SECRET": "x"}
    argv = _argv(root, network=True, environ=environ)
    assert {word for word in argv if word.startswith("--env=")} == {f"--env={name}" for name in SECRETS}
    assert set(SECRETS) < set(PASSED) and "--network=none" not in argv
    assert not any(word.startswith("--env=") for word in _argv(root, environ=environ))
    for value in SECRETS.values():
        assert value not in " ".join(argv)


@pytest.mark.parametrize("chosen", ["1", ""])
def test_the_choice_of_gpus_is_passed_on_also_when_it_is_none(root: Path, chosen: str) -> None:
    argv = _argv(root, environ={"CUDA_VISIBLE_DEVICES": chosen})
    assert "--env=CUDA_VISIBLE_DEVICES" in argv and "--env=CUDA_VISIBLE_DEVICES" not in _argv(root)


def test_certificates_of_this_host_are_mounted_with_a_network(root: Path, tmp_path: Path) -> None:
    (tmp_path / "real.crt").write_text("x")
    (tmp_path / "link.crt").symlink_to("real.crt")
    argv = _argv(root, network=True, environ={"SSL_CERT_FILE": str(tmp_path / "link.crt")})
    assert f"--volume={tmp_path}/real.crt:{CA_IN_IMAGE}:ro" in argv
    assert [word for word in argv if word.startswith("--env=")] == [
        f"--env=REQUESTS_CA_BUNDLE={CA_IN_IMAGE}",
        f"--env=SSL_CERT_FILE={CA_IN_IMAGE}",
    ]
    for gone in (_argv(root, network=True, environ={"SSL_CERT_FILE": "/nowhere"}), _argv(root, network=True)):
        assert not any(CA_IN_IMAGE in word for word in gone)


def test_only_the_two_places_are_written_to_and_named_files_are_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mine.yaml").write_text("")
    (tmp_path / "home/prompts.jsonl").write_text("")
    (root / "link.yaml").symlink_to(tmp_path / "elsewhere/mine.yaml")
    named = [str(tmp_path / "elsewhere/mine.yaml"), "~/prompts.jsonl", "link.yaml", "../elsewhere", "not-there.jsonl"]
    caches = _caches(root)
    assert base_mounts(root, caches, [*named, named[0], "./link.yaml"], tmp_path / "home") == [
        Mount(source=caches.root, target="/cache", writable=True),
        Mount(source=caches.runs, target="/runs", writable=True),
        Mount(source=tmp_path / "elsewhere/mine.yaml", target=f"{tmp_path}/elsewhere/mine.yaml"),
        Mount(source=tmp_path / "home/prompts.jsonl", target="/cache/home/prompts.jsonl"),
        Mount(source=tmp_path / "elsewhere/mine.yaml", target="/srv/dflash/link.yaml"),
        Mount(source=tmp_path / "elsewhere", target="/srv/elsewhere"),
    ]


def test_a_name_that_no_file_can_have_is_left_to_the_command(root: Path) -> None:
    assert len(base_mounts(root, _caches(root), ["x" * 300, "a\0b"], root)) == 2


def test_a_relative_cache_is_below_the_repository_and_one_with_spaces_stays_one_word(root: Path) -> None:
    relative = base_mounts(root, _caches(root, DFLASH_CACHE="my cache", DFLASH_RUNS="../the runs"), [], root)
    assert [mount.source for mount in relative] == [root / "my cache", root / "../the runs"]
    caches = _caches(root, DFLASH_CACHE="my cache")
    argv = container_argv(PODMAN, "image", [], root=root, caches=caches, environ={}, gpus=False)
    assert f"--volume={root}/my cache:/cache:rw" in argv


def test_a_cache_whose_name_has_a_colon_is_refused(root: Path) -> None:
    with pytest.raises(EnvError, match="a path with a colon cannot be mounted"):
        container_argv(DOCKER, "i", [], root=root, caches=_caches(root, DFLASH_CACHE="a:b"), environ={}, gpus=False)


def test_gpus_are_given_when_the_host_has_some(tmp_path: Path) -> None:
    assert not has_gpus(tmp_path)
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia-uvm").touch()
    assert not has_gpus(tmp_path)  # the driver is loaded, and there is no device
    (tmp_path / "nvidia0").touch()
    assert has_gpus(tmp_path)


def test_both_places_are_made_by_this_user_before_an_engine_would_make_them_as_root(root: Path) -> None:
    caches = _caches(root, DFLASH_CACHE="a/b", DFLASH_RUNS="c/d")
    make_places(caches)
    make_places(caches)
    assert caches.root.is_dir() and caches.runs.is_dir()


@pytest.mark.parametrize("variable", ["DFLASH_CACHE", "DFLASH_RUNS"])
def test_a_place_that_cannot_be_made_is_named_with_its_variable(root: Path, variable: str) -> None:
    (root / "file").write_text("")
    with pytest.raises(EnvError) as caught:
        make_places(_caches(root, **{variable: "file/x"}))
    fix = f"Set {variable} to a folder that is writable."
    assert str(caught.value) == f"{root}/file/x: cannot be created (Not a directory). {fix}"


def _sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_the_container_says_what_it_needs_in_its_last_line() -> None:
    answer = """echo 'a warning'; echo '{"files": ["/d/x y.jsonl"], "fetch": ["human-eval"]}'"""
    assert needs(_sh(answer)) == {"files": ["/d/x y.jsonl"], "fetch": ["human-eval"]}


def test_a_container_that_ends_with_an_error_is_its_exit_code_and_its_own_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert needs(_sh("echo 'x.yaml: no such configuration file.' >&2; exit 2")) == 2
    assert capfd.readouterr().err == "x.yaml: no such configuration file.\n"


def test_a_variable_named_in_a_command_reaches_the_engine_from_this_process(root: Path) -> None:
    """`--env=NAME` without a value is what docker and podman fill in; this shell stands for them."""
    argv = _argv(root, network=True, environ={"HF_TOKEN": "hf_secret"})
    name = next(word.removeprefix("--env=") for word in argv if word.startswith("--env="))
    environ = {"HF_TOKEN": "hf_secret"}
    done = subprocess.run(_sh(f"printf %s ${name}"), env=environ, capture_output=True, text=True)
    assert done.stdout == "hf_secret"
