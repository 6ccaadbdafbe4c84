"""Running it: any uid, read-only root, no network, little shared memory, SIGTERM, and the cache on its mount."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from env.image import Mount
from tests.image.conftest import Image

pytestmark = pytest.mark.image

COMPILE = """
import os, torch
print(torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(64)).sum().item())
print(os.getuid(), os.environ["HOME"])
"""


def test_a_stranger_compiles_with_every_cache_below_the_mount(image: Image, places: list[Mount]) -> None:
    """pytorch#140765: no passwd entry, no home folder; the root is read-only, so nothing can be written elsewhere."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": "/cache/compile/x/inductor", "TRITON_CACHE_DIR": "/cache/compile/x/triton"}
    done = image.python(COMPILE, mounts=places, set_variables=variables)
    assert done.returncode == 0, done.stderr[-1500:]
    assert done.stdout.split() == ["192.0", "54321", "/cache/home"]
    assert list((places[0].source / "compile" / "x" / "inductor").rglob("*.so"))


def test_the_root_cannot_be_written_and_there_is_no_network_and_no_privilege(image: Image) -> None:
    script = """
import os
for path in ("/srv/dflash/x", "/opt/dflash/x", "/x", "/home/x"):
    try: open(path, "w"); print("wrote", path)
    except OSError as error: print(error.errno)
print(sorted(os.listdir("/sys/class/net")))
status = open("/proc/self/status").read()
print(status.split("CapEff:")[1].split()[0], status.split("NoNewPrivs:")[1].split()[0])
"""
    lines = image.python(script, user="0:0").stdout.splitlines()
    assert not [line for line in lines if line.startswith("wrote")] and len(lines) == 6
    assert lines[4] == "['lo']" and lines[5] == "0000000000000000 1"


def test_without_the_mounts_it_refuses_and_names_them(image: Image) -> None:
    """tao-skill-bank PR 150: a cache in the container's own layer is lost at each start, in silence."""
    done = image.run(["train", "--config", "configs/quickstart.yaml"])
    assert done.returncode == 3, done.stdout + done.stderr
    assert "/cache" in done.stderr and "/runs" in done.stderr and "Traceback" not in done.stderr


def test_little_shared_memory_is_refused_with_the_flag_to_add(image: Image, places: list[Mount]) -> None:
    """pytorch#5040: 64 MiB are the default, 8 MiB a surprise; what dies of it dies with a bus error."""
    done = image.run(["doctor"], mounts=places, shm_bytes=8 << 20)
    assert done.returncode == 3 and "--shm-size" in done.stderr, done.stdout + done.stderr
    enough = image.run(["doctor"], mounts=places)
    assert enough.returncode == 0, enough.stdout + enough.stderr


def test_a_leftover_switch_is_refused_before_the_command_starts(image: Image, places: list[Mount]) -> None:
    done = image.run(["python", "-c", "print('started')"], mounts=places, set_variables={"TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 3 and "TORCHDYNAMO_DISABLE" in done.stderr and "started" not in done.stdout
    clean = image.run(["python", "-c", "print('started')"], mounts=places)
    assert clean.returncode == 0 and "started" in clean.stdout, clean.stderr


def test_sigterm_reaches_python(image: Image, places: list[Mount]) -> None:
    """A shell as PID 1 ignores it, and the engine kills after its patience."""
    script = "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(7)); print('ready', flush=True)"
    script += "; time.sleep(60)"
    with subprocess.Popen(
        image.argv(["python", "-c", script], mounts=places), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=30) == 7


def test_what_is_no_command_is_one_line(image: Image, places: list[Mount]) -> None:
    done = image.run(["trian"], mounts=places)
    assert done.returncode == 3 and "train" in done.stderr and "Traceback" not in done.stderr


def test_the_shell_as_pid_1_would_ignore_sigterm(image: Image, places: list[Mount]) -> None:
    """The guard's other side: without tini in front the same signal does not end the program."""
    script = "import signal, time; print('ready', flush=True); time.sleep(4); print('outlived', flush=True)"
    argv = image.argv(["-c", f'/opt/dflash/bin/python -c "{script}"; true'], mounts=places, entrypoint="/bin/sh")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        assert "outlived" in run.stdout.read()


def test_a_path_of_the_user_is_seen_where_he_wrote_it(image: Image, places: list[Mount], tmp_path: Path) -> None:
    """A mount point that the read-only image does not have."""
    (tmp_path / "prompts.jsonl").write_text("{}")
    (tmp_path / "prompts.jsonl").chmod(0o644)
    file = Mount(source=tmp_path / "prompts.jsonl", target="/home/someone/data/prompts.jsonl")
    relative = Mount(source=tmp_path / "prompts.jsonl", target="/srv/dflash/data/prompts.jsonl")
    script = "print(open('/home/someone/data/prompts.jsonl').read(), open('data/prompts.jsonl').read())"
    done = image.run(["python", "-c", script], mounts=[*places, file, relative])
    assert done.stdout.split() == ["{}", "{}"], done.stderr
