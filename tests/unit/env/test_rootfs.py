"""The image as a tar with /start, which is run here with the shell of this machine and a made-up python."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from env.errors import EnvError
from env.rootfs import append_start, start_script, write_rootfs
from tests.engine_tools import BUILDAH, DOCKER, PODMAN, FakeEngines

SH = shutil.which("sh") or "/bin/sh"
NAME = "localhost/dflash:0123"
_PYTHON = '#!/bin/sh\nprintf "%s\\n" "$PWD" "$HOME" "$DFLASH_CACHE" "$DFLASH_RUNS" "$GREETING" "$@"\n'


def _config(tmp_path: Path, *more: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration like the image's, with its places below `tmp_path`."""
    for name in ("bin", "srv/my dflash"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "bin/python").write_text(_PYTHON)
    (tmp_path / "bin/python").chmod(0o755)
    places = ["DFLASH_CACHE=/cache", "DFLASH_RUNS=/runs", "HOME=/cache/home"]
    return {
        "Env": [f"PATH={tmp_path}/bin:{os.defpath}", *places, *more],
        "WorkingDir": f"{tmp_path}/srv/my dflash",
        "Entrypoint": ["/usr/bin/tini", "--", "python", "-m", "env.entrypoint"],
        "Cmd": ["train", "--config", "configs/quickstart.yaml"],
        **changes,
    }


def _start(tmp_path: Path, config: dict[str, Any], *arguments: str, **variables: str) -> list[str]:
    script = tmp_path / "start"
    script.write_text(start_script(config))
    done = subprocess.run([SH, str(script), *arguments], env=variables, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_start_does_what_the_entry_point_does(tmp_path: Path) -> None:
    lines = _start(tmp_path, _config(tmp_path, "GREETING=hello world"), "train", "--set", "a b", "$HOME", HOME="/root")
    assert lines[:5] == [f"{tmp_path}/srv/my dflash", "/cache/home", "/cache", "/runs", "hello world"]
    assert lines[5:] == ["-m", "env.entrypoint", "train", "--set", "a b", "$HOME"]


def test_start_alone_runs_the_images_command(tmp_path: Path) -> None:
    lines = _start(tmp_path, _config(tmp_path))
    assert lines[5:] == ["-m", "env.entrypoint", "train", "--config", "configs/quickstart.yaml"]


def test_places_that_the_caller_set_stay(tmp_path: Path) -> None:
    lines = _start(tmp_path, _config(tmp_path, "GREETING=a"), DFLASH_CACHE="/my cache", DFLASH_RUNS="", GREETING="b")
    assert lines[2:5] == ["/my cache", "/runs", "b"]  # an empty place is none


def test_the_images_programs_come_first_whatever_path_the_host_has(tmp_path: Path) -> None:
    assert _start(tmp_path, _config(tmp_path), PATH="/nowhere")[5:7] == ["-m", "env.entrypoint"]


def test_the_exit_code_is_the_commands_and_no_shell_stays_between(tmp_path: Path) -> None:
    config = _config(tmp_path)
    (tmp_path / "bin/python").write_text("#!/bin/sh\necho $$\nexit 4\n")
    (tmp_path / "start").write_text(start_script(config))
    with subprocess.Popen([SH, str(tmp_path / "start")], env={}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid  # a signal reaches it
        assert process.wait(timeout=60) == 4


@pytest.mark.parametrize("value", ['say "hi"', "$HOME", "a}b", "`exit 3`", "back\\\\slash"])
def test_a_value_of_the_image_is_never_shell(tmp_path: Path, value: str) -> None:
    assert _start(tmp_path, _config(tmp_path, f"GREETING={value}"))[4] == value


def test_an_image_without_any_of_it_runs_its_arguments(tmp_path: Path) -> None:
    bare = {"Env": None, "WorkingDir": "", "Entrypoint": None, "Cmd": None}
    (tmp_path / "start").write_text(start_script(bare))
    done = subprocess.run([SH, str(tmp_path / "start"), "/bin/echo", "x y"], capture_output=True, text=True, env={})
    assert (done.stdout, done.returncode) == ("x y\n", 0)


def _archive(path: Path) -> bytes:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("etc/passwd")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"root\n"))
    return path.read_bytes()


def test_start_is_added_as_a_program_and_the_rest_stays(tmp_path: Path) -> None:
    _archive(tmp_path / "x.tar")
    append_start(tmp_path / "x.tar", "#!/bin/sh\n")
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == ["etc/passwd", "start"]
        assert tar.getmember("start").mode == 0o755
        file = tar.extractfile("start")
        assert file is not None and file.read() == b"#!/bin/sh\n"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    (tmp_path / "fake").mkdir()
    made = FakeEngines.make(tmp_path / "fake", "docker", "podman")
    made.use(monkeypatch)
    (made.state / "config").write_text(json.dumps(_config(tmp_path)))
    _archive(made.state / "rootfs.tar")
    return made


@pytest.mark.parametrize("engine", [PODMAN, DOCKER])
def test_the_file_system_is_published_whole_and_the_container_goes(
    fakes: FakeEngines, tmp_path: Path, engine: Any
) -> None:
    out = tmp_path / "out here/root.tar"
    out.parent.mkdir()
    out.write_text("an earlier one")
    said: list[str] = []
    assert write_rootfs(engine, NAME, out, say=said.append) == out
    with tarfile.open(out) as tar:
        assert tar.getnames() == ["etc/passwd", "start"]
    assert list(out.parent.iterdir()) == [out] and said[0].startswith(f"{out}: 0.00 GB; unpack it")
    assert [call.split()[-2:] for call in fakes.calls()[-2:]] == [["export", "a-container"], ["rm", "a-container"]]


def test_an_export_that_fails_leaves_the_earlier_file_and_no_container(fakes: FakeEngines, tmp_path: Path) -> None:
    (fakes.state / "rootfs.tar").unlink()
    out = tmp_path / "root.tar"
    out.write_text("an earlier one")
    with pytest.raises(EnvError) as caught:
        write_rootfs(PODMAN, NAME, out)
    assert str(caught.value) == f"{out}: podman export failed (no such thing). Is the disk full?"
    assert out.read_text() == "an earlier one" and not list(tmp_path.glob(".root*"))
    assert fakes.calls()[-1].endswith("rm a-container")


@pytest.mark.parametrize(
    "engine, out, line",
    [
        (PODMAN, "nowhere/root.tar", "nowhere: no such folder. Make it first."),
        (BUILDAH, "root.tar", "--rootfs: buildah cannot write a file system. Use podman or docker."),
    ],
)
def test_what_cannot_be_written_is_said_before_an_engine_is_asked(
    fakes: FakeEngines, tmp_path: Path, engine: Any, out: str, line: str
) -> None:
    with pytest.raises(EnvError) as caught:
        write_rootfs(engine, NAME, tmp_path / out)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == line and fakes.calls() == []


def test_a_folder_in_the_place_of_the_file_is_one_line(fakes: FakeEngines, tmp_path: Path) -> None:
    (tmp_path / "root.tar").mkdir()
    with pytest.raises(EnvError):
        write_rootfs(PODMAN, NAME, tmp_path / "root.tar")


def test_an_image_that_is_not_there_is_one_line(fakes: FakeEngines, tmp_path: Path) -> None:
    (fakes.state / "config").unlink()
    with pytest.raises(EnvError, match=rf"^{NAME}: the image is not there\. Run: invoke build$"):
        write_rootfs(PODMAN, NAME, tmp_path / "root.tar")


def test_no_container_stays_of_an_image_that_cannot_be_read(fakes: FakeEngines, tmp_path: Path) -> None:
    (fakes.state / "config").unlink()
    with pytest.raises(EnvError):
        write_rootfs(PODMAN, NAME, tmp_path / "root.tar")
    assert len(fakes.calls("create")) == len(fakes.calls("rm"))
