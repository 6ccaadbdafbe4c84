"""The image as pure functions: what is in it, what it is called, and the exact commands that build and run it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from env.engines import Engine, HostFacts
from env.errors import EnvError
from env.image import (
    COPIED,
    LOOSE,
    ImagePins,
    Mount,
    build_argv,
    content_tag,
    context_files,
    describe,
    image_name,
    in_image,
    run_argv,
)

DOCKER, PODMAN, BUILDAH = (Engine(name=name, why="") for name in ("docker", "podman", "buildah"))
HARD_HOST = HostFacts(hybrid_cgroups=True, may_raise_limits=False, rootless=True)
NARROW = Engine(name="podman", why="", facts=HARD_HOST)
"""podman inside a container: mixed cgroups, no CAP_SYS_RESOURCE, not root."""
SAFE = ["--rm", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
SAFE += ["--security-opt=label=disable"]
SAFE += ["--tmpfs=/tmp:rw,nosuid,nodev,mode=1777"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in COPIED:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(f"# {folder}\n")
    for name in (*LOOSE, "README.md"):
        (tmp_path / name).write_text(f"{name}\n")
    return tmp_path


def _tag(root: Path, base: str = "debian") -> str:
    return content_tag(root, context_files(root, None), base)


def test_what_shapes_the_image_changes_its_tag(checkout: Path) -> None:
    tags = [_tag(checkout), _tag(checkout, base="another")]
    (checkout / "dflash/a.py").write_text("# dflasH\n")
    tags.append(_tag(checkout))
    (checkout / "dflash/a.py").chmod(0o755)
    tags.append(_tag(checkout))
    (checkout / "env/b.py").write_text("")
    tags.append(_tag(checkout))
    (checkout / "env/b.py").rename(checkout / "env/c.py")
    tags.append(_tag(checkout))
    (checkout / "Dockerfile").write_text("FROM x\n")
    tags.append(_tag(checkout))
    (checkout / "LICENSE").unlink()
    tags.append(_tag(checkout))
    assert len(set(tags)) == len(tags) and all(re.fullmatch("[0-9a-f]{12}", tag) for tag in tags)


def test_what_does_not_shape_the_image_leaves_its_tag(checkout: Path) -> None:
    before = _tag(checkout)
    (checkout / "README.md").write_text("other words\n")
    (checkout / "tests").mkdir()
    (checkout / "tests/test_a.py").write_text("")
    (checkout / "env/__pycache__").mkdir()
    (checkout / "env/__pycache__/a.cpython-311.pyc").write_text("")
    os.utime(checkout / "dflash/a.py", (1, 1))
    (checkout / "dflash/a.py").chmod(0o600)  # the umask of a clone; only the x bit is kept
    assert _tag(checkout) == before


def test_bytes_that_move_from_one_file_to_the_next_change_the_tag(checkout: Path) -> None:
    names = ["dflash/a.py", "env/a.py"]
    tags = set()
    for first, second in (("ab", "c"), ("a", "bc"), ("", "abc")):
        (checkout / names[0]).write_text(first)
        (checkout / names[1]).write_text(second)
        tags.add(content_tag(checkout, names, ""))
    assert len(tags) == 3
    (checkout / names[0]).write_text("a")
    (checkout / names[1]).write_text("bc")
    two = content_tag(checkout, names, "")
    (checkout / names[0]).write_text("\0".join([f"a{names[1]}", "0", "bc"]))  # one file that spells both
    assert content_tag(checkout, names[:1], "") != two


def test_version_control_decides_what_is_in_the_context(checkout: Path) -> None:
    (checkout / "env/ignored.py").write_text("")
    tracked = [
        "env/a.py",
        "env/gone.py",
        "Dockerfile",
        "README.md",
        "tests/test_a.py",
        "environment/a.py",
        "x/env/a.py",
    ]
    assert context_files(checkout, tracked) == ["Dockerfile", "env/a.py"]


def test_a_tarball_without_version_control_takes_every_file_but_bytecode(checkout: Path) -> None:
    (checkout / "env/__pycache__").mkdir()
    (checkout / "env/__pycache__/a.cpython-311.pyc").write_text("")
    (checkout / "configs/deep/er").mkdir(parents=True)
    (checkout / "configs/deep/er/x.yaml").write_text("")
    wanted = {*LOOSE, *(f"{folder}/a.py" for folder in COPIED), "configs/deep/er/x.yaml"}
    assert context_files(checkout, None) == sorted(wanted)


@pytest.fixture
def pins(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / "lockfiles/images.yaml").read_text())
    return found


def _read(tmp_path: Path, value: Any) -> ImagePins:
    path = tmp_path / "images.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return ImagePins.read(path)


def test_the_pins_of_this_checkout_can_be_read(repository: Path, pins: dict[str, Any]) -> None:
    found = ImagePins.read(repository / "lockfiles/images.yaml")
    assert found.registry == pins["registry"] and re.search(r"@sha256:[0-9a-f]{64}$", found.registry)
    assert {"g++", "python3-dev", "tini"} <= set(found.packages)  # pytorch#116696: Triton compiles at run time
    assert found.epoch > 1_700_000_000


@pytest.mark.parametrize("registry", ["debian:bookworm", "debian@sha256:12ab", "@sha256:" + "0" * 64, None])
def test_a_base_without_a_digest_is_refused(tmp_path: Path, pins: dict[str, Any], registry: str | None) -> None:
    with pytest.raises(EnvError, match=r"images\.yaml: registry: .* is not pinned by digest\. Write NAME:TAG@sha256"):
        _read(tmp_path, pins | {"registry": registry})


@pytest.mark.parametrize("change", [{"more": 1}, {"epoch": ...}, "- a\n", ""])
def test_pins_with_a_missing_or_unknown_key_are_refused(tmp_path: Path, pins: dict[str, Any], change: Any) -> None:
    value = {key: v for key, v in (pins | change).items() if v is not ...} if isinstance(change, dict) else change
    with pytest.raises(EnvError, match=r"images\.yaml: must hold registry, suite, packages and epoch\."):
        _read(tmp_path, value)


@pytest.mark.parametrize(
    "change",
    [
        {"registry": "debian:bookworm-slim@sha256:" + "z" * 64},
        {"packages": "tini"},  # would be the packages t, i, n and i
        {"packages": None},
        {"packages": [1]},
        {"epoch": "soon"},
        {"epoch": True},
        "registry: [\n",
    ],
)
def test_pins_with_a_wrong_value_are_refused_by_the_key(tmp_path: Path, pins: dict[str, Any], change: Any) -> None:
    with pytest.raises(EnvError, match=r"images\.yaml"):
        _read(tmp_path, pins | change if isinstance(change, dict) else change)


def test_pins_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"images\.yaml"):
        ImagePins.read(tmp_path / "images.yaml")


def _build(engine: Engine, **how: Any) -> list[str]:
    context, name = Path("/c x"), image_name("0123")
    return build_argv(engine, context=context, name=name, epoch=9, arguments={"B": "2", "A": "1 x"}, **how)


def test_docker_builds_with_buildkit_and_loads_the_image() -> None:
    assert _build(DOCKER, secrets={"packages": Path("/s/p.env"), "ca": Path("/s/ca.crt")}) == [
        *("docker", "buildx", "build", "--quiet", "--build-arg=A=1 x", "--build-arg=B=2"),
        *("--secret=id=ca,src=/s/ca.crt", "--secret=id=packages,src=/s/p.env"),
        *("--build-arg=SOURCE_DATE_EPOCH=9", "--provenance=false", "--output=type=docker"),
        *("--tag=localhost/dflash:0123", "/c x"),
    ]


def test_docker_writes_an_archive_with_rewritten_times_for_the_check() -> None:
    argv = _build(DOCKER, scratch=True, archive=Path("/o/1.tar"))
    assert argv[:7] == ["docker", "buildx", "build", "--quiet", "--build-arg=A=1 x", "--build-arg=B=2", "--no-cache"]
    assert "--output=type=oci,dest=/o/1.tar,rewrite-timestamp=true" in argv and "--output=type=docker" not in argv


@pytest.mark.parametrize(
    "engine, program",
    [
        (PODMAN, ["podman", "--events-backend=none"]),
        (NARROW, ["podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none"]),
        (BUILDAH, ["buildah"]),
    ],
)
def test_podman_and_buildah_build_without_an_oci_runtime(engine: Engine, program: list[str]) -> None:
    assert _build(engine, scratch=True, secrets={"ca": Path("/s/ca.crt")}) == [
        *(*program, "build", "--quiet", "--build-arg=A=1 x", "--build-arg=B=2", "--secret=id=ca,src=/s/ca.crt"),
        *("--no-cache", "--isolation=chroot", "--format=oci", "--layers", "--timestamp=9"),
        *("--tag=localhost/dflash:0123", "/c x"),
    ]


def _run(engine: Engine, **how: Any) -> list[str]:
    mounts = [Mount(source=Path("/my cache"), target="/cache", writable=True), Mount(source=Path("/d"), target="/d")]
    settings = {"mounts": mounts, "user": "7:8", "network": False, "gpus": False, **how}
    return run_argv(engine, "image", ["train", "--config", "x.yaml"], **settings)


COMMAND = ["image", "train", "--config", "x.yaml"]
MOUNTS = ["--volume=/my cache:/cache:rw", "--volume=/d:/d:ro"]


def test_docker_runs_it_without_privileges_and_with_the_gpus_of_the_host() -> None:
    """The shared memory is 1 GiB: pytorch#5040."""
    shm = f"--shm-size={1 << 30}"
    assert _run(DOCKER, gpus=True) == [
        *("docker", "run", *SAFE, shm, "--user=7:8", "--network=none", "--gpus=all", *MOUNTS, *COMMAND)
    ]


def test_podman_gets_gpus_by_cdi_and_a_rootless_one_keeps_the_users_id() -> None:
    rootless = Engine(name="podman", why="", facts=HostFacts(rootless=True))
    argv = ["podman", "--events-backend=none", "run", *SAFE, f"--shm-size={1 << 30}", "--user=7:8"]
    gpu = "--device=nvidia.com/gpu=all"
    assert _run(PODMAN, network=True, gpus=True) == [*argv, "--network=host", gpu, *MOUNTS, *COMMAND]
    assert _run(rootless, gpus=True) == [*argv, "--network=none", "--userns=keep-id", gpu, *MOUNTS, *COMMAND]
    assert _run(rootless) == [*argv, "--network=none", "--userns=keep-id", *MOUNTS, *COMMAND]


def test_podman_on_a_host_with_mixed_cgroups_and_fixed_limits_is_told_so() -> None:
    assert _run(NARROW, shm_bytes=8 << 20) == [
        *("podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none", "run", *SAFE),
        *("--shm-size=8388608", "--user=7:8", "--network=none", "--userns=keep-id"),
        *("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096", *MOUNTS, *COMMAND),
    ]


def test_the_facts_of_the_host_change_nothing_for_docker() -> None:
    assert _run(Engine(name="docker", why="", facts=HARD_HOST)) == _run(DOCKER)


def test_variables_that_are_passed_stand_in_the_command_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    argv = _run(DOCKER, pass_variables=["HF_TOKEN"], set_variables={"B": "2", "A": "1"}, network=True)
    assert argv[argv.index("--volume=/d:/d:ro") + 1 :] == ["--env=HF_TOKEN", "--env=A=1", "--env=B=2", *COMMAND]
    assert not any("hf_secret" in word for word in argv)


def test_a_terminal_a_keyboard_and_another_entry_point_are_asked_for() -> None:
    plain = _run(DOCKER)
    argv = _run(DOCKER, terminal=True, keyboard=True, entrypoint="/bin/sh")
    assert [word for word in argv if word not in plain] == ["--tty", "--interactive", "--entrypoint=/bin/sh"]
    assert argv[-4:] == COMMAND


@pytest.mark.parametrize("mount", [Mount(source=Path("/a:b"), target="/c"), Mount(source=Path("/a"), target="/c:ro")])
def test_a_path_with_a_colon_is_refused_since_engines_would_cut_it_there(mount: Mount) -> None:
    with pytest.raises(EnvError, match=rf"^{mount.source}: a path with a colon cannot be mounted\. Rename it\.$"):
        _run(DOCKER, mounts=[mount])


def test_an_engine_that_only_builds_says_so_when_it_should_run() -> None:
    with pytest.raises(EnvError, match=r"buildah builds images and cannot run them\. Install podman, or use --in venv"):
        _run(BUILDAH)


@pytest.mark.parametrize(
    "written, here, there",
    [
        ("configs/a.yaml", "/repo/configs/a.yaml", "/srv/dflash/configs/a.yaml"),
        ("./my data/", "/repo/my data", "/srv/dflash/my data"),
        ("../other/x.jsonl", "/repo/../other/x.jsonl", "/srv/other/x.jsonl"),
        ("/data/x.jsonl", "/data/x.jsonl", "/data/x.jsonl"),
        ("/data/../x", "/data/../x", "/x"),
        ("~/x.jsonl", "/home/me/x.jsonl", "/cache/home/x.jsonl"),
        ("~", "/home/me", "/cache/home"),
        ("a~/x", "/repo/a~/x", "/srv/dflash/a~/x"),
    ],
)
def test_a_path_means_the_same_in_the_image(written: str, here: str, there: str) -> None:
    assert in_image(written, Path("/repo"), Path("/home/me")) == (Path(here), there)


def test_a_finished_build_is_one_line() -> None:
    packages = {"python": {"torch": "2", "numpy": "2"}, "debian": {"tini": "0"}}
    manifest = {"name": "n:t", "digest": "sha256:ab", "size_bytes": 5_310_000_000, "packages": packages}
    assert describe(manifest) == "n:t  sha256:ab  5.31 GB, 2 Python and 1 Debian packages"


def test_a_folder_that_is_not_there_is_not_in_the_context(checkout: Path) -> None:
    shutil.rmtree(checkout / "benchmarks")
    assert not any(name.startswith("benchmarks") for name in context_files(checkout, None))
