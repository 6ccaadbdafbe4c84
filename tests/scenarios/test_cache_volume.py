"""The compile cache across processes: counted compiles, damage, a killed compile, a full disk, and another place.

Most of it with one small function and the real compilers; the last test with the whole pipeline.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from env.cache_archive import export_key, import_archive
from env.cache_volume import listed_files
from env.caches import OWNED_VARIABLES, cache_key, environment_for_compile

ROOT = Path(__file__).resolve().parents[2]
FACTORS = {"torch": "this", "machine": "this"}
KEY = cache_key(FACTORS)[0]

START = """
import json, os, sys
from pathlib import Path
from env import cache_volume
from env.caches import cache_key, environment_for_compile

place, how = sys.argv[1:]
lines = []
if how == "unchecked":
    cache_volume.damaged_files = lambda folder: set()
factors = {"torch": "this", "machine": "this"}
folder = cache_volume.open_key(Path(place), cache_key(factors)[0], factors, lines.append)
os.environ.update(environment_for_compile(folder))

import torch
from dflash.compile import CompileGate
from dflash.compile.counters import disk_counts
from pipeline.compile_lock import cache_folder, compiling

torch.set_num_threads(1)
torch.manual_seed(0)
device = "cuda" if how == "cuda" else "cpu"
linear = torch.nn.Linear(8, 8, device=device)
gate = CompileGate(workers=1)
body = gate.compile(lambda x: linear(x).relu(), name="body")
given = torch.randn(3, 8, device=device)
with compiling(cache_folder(), lines.append):
    with gate.worker("worker"):
        gate.warm_up(lambda: body(given).sum().backward())
    if how == "killed":
        (folder / "inductor" / "half.so").write_bytes(b"half")  # the C++ compiler writes the final name in place
        print("compiled", flush=True)
        sys.stdin.read()
owned = {name: value for name, value in os.environ.items() if "CACHE" in name or "TRITON" in name or "TORCH" in name}
print(json.dumps({**disk_counts(), "lines": lines, "value": linear.weight.grad.sum().item(), "environment": owned}))
"""
"""What a stage does: open the key, compile forward and backward, publish. Prints counts, lines and a number."""


def _environment(tmp: Path) -> dict[str, str]:
    tmp.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in OWNED_VARIABLES}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp)}


def begin(place: Path, how: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START, str(place), how],
        env=_environment(place.parent / "tmp"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(place: Path, how: str = "") -> dict[str, Any]:
    with begin(place, how) as process:
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A compile folder that one cold start filled, and what that start printed."""
    place = tmp_path_factory.mktemp("volume") / "compile"
    return place, start(place)


@pytest.fixture
def warm(first: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(first[0], tmp_path / "compile"))


@pytest.mark.slow
def test_a_second_start_builds_nothing_and_puts_nothing_beside_the_key(
    first: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """bug-reports.md 3, 4 (sglang-omni#439): counted; the temporary folder is another, empty one at each start.

    torch 2.11.0 by itself compiles a header of 120 MB into it in every process that loads a C++ kernel from disk.
    """
    place, cold = first
    assert cold["built"] > 0 and cold["loaded"] == 0
    assert cold["lines"] == ["compile cache: empty, so this start compiles"]
    again = tmp_path / "compile"
    again.symlink_to(place)
    found = start(again)
    assert (found["built"], found["lines"], found["value"]) == (0, [], cold["value"])
    assert found["loaded"] >= 2
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()] == []
    expected = environment_for_compile(again / KEY)
    assert {name: found["environment"].get(name) for name in expected} == expected


KINDS = {
    "library": "inductor/*/*.so",
    "source": "inductor/*/*.cpp",
    "generated code": "inductor/*/*.py",
    "graph": "inductor/fxgraph/*/*/*",
    "autograd entry": "inductor/aotautograd/*/*",
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["library", "source"], ["generated code"], ["graph"], ["autograd entry"]])
def test_damaged_files_are_moved_away_and_built_again(
    first: tuple[Path, dict[str, Any]], warm: Path, kinds: list[str]
) -> None:
    """bug-reports.md 16, pytorch/pytorch PR 172144: an entry cut short must never be loaded, nor end the process."""
    spoilt = [path for kind in kinds for path in (warm / KEY).glob(KINDS[kind])]
    assert len(spoilt) >= len(kinds)
    for path in spoilt:
        path.write_bytes(path.read_bytes()[:40])
    found = start(warm)
    assert found["value"] == first[1]["value"]
    assert len(found["lines"]) == 1 and "damaged" in found["lines"][0]
    moved = {path.name for path in (warm / "quarantine").rglob("*") if path.is_file()}
    assert moved == {path.name for path in spoilt}
    # Code is written from the graph's entry, without a compiler; without its entry of autograd a graph is traced anew
    # and then found.
    assert (found["built"] > 0) is ("library" in kinds or "graph" in kinds)


@pytest.mark.slow
def test_without_the_check_truncated_libraries_end_the_process(warm: Path) -> None:
    """Also the tiny library is cut with which Inductor asks what the CPU can do: the code it then makes is refused."""
    for path in (warm / KEY).glob(KINDS["library"]):
        path.write_bytes(path.read_bytes()[:40])
    with begin(warm, "unchecked") as process:
        process.communicate(timeout=280)
    assert process.returncode != 0


@pytest.mark.slow
def test_what_a_killed_compile_left_is_not_loaded_by_the_next(first: tuple[Path, dict[str, Any]], warm: Path) -> None:
    """pytorch/pytorch#189245: the lock goes with its holder; what was not published goes to quarantine."""
    with begin(warm, "killed") as process:
        assert process.stdout is not None and process.stdout.readline() == "compiled\n"
        process.send_signal(signal.SIGKILL)
    found = start(warm)
    assert (found["built"], found["value"]) == (0, first[1]["value"])
    assert len(found["lines"]) == 1 and "left by a killed process" in found["lines"][0]
    assert (warm / "quarantine" / f"{KEY}-1" / "inductor" / "half.so").is_file()


@pytest.mark.slow
def test_a_moved_cache_hits(first: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """pytorch/pytorch#144859: 3.8 GB of cache at another path were not used."""
    export_key(first[0] / KEY, tmp_path / "cache.tar")
    import_archive(tmp_path / "cache.tar", tmp_path / "moved", FACTORS, print)
    found = start(tmp_path / "moved")
    assert (found["built"], found["lines"], found["value"]) == (0, [], first[1]["value"])
    assert len(listed_files(tmp_path / "moved" / KEY)) == len(listed_files(first[0] / KEY))


_FULL = """
mount -t tmpfs -o size=32m tmpfs "$1" || exit 77
head -c 33400000 /dev/zero > "$1/filler"
"$2" -c "$3" "$1/compile" "" 2> "$4/err" > "$4/out"
echo "code $?"
rm "$1/filler"
exec "$2" -c "$3" "$1/compile" ""
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_cache_is_one_message_and_harms_nothing(first: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """pytorch/pytorch#121122: a cache on memory-backed storage ran full."""
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _FULL, "sh"]
    command += [str(mount), sys.executable, START, str(tmp_path)]
    try:
        done = subprocess.run(command, env=_environment(tmp_path / "tmp"), capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    code, result = done.stdout.splitlines()
    assert code == "code 1"
    message = (tmp_path / "err").read_text().splitlines()[-1]
    assert message.startswith("env.errors.EnvError: ") and "the compile cache is full (32 MiB" in message
    assert json.loads(result)["value"] == first[1]["value"]
