"""Processes that share a compile cache: one compiles, the others wait for it by name and load what it made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from pipeline import compile_lock
from pipeline.compile_lock import compiling
from pipeline.launch import launch
from tests.tiny_run import TinyRun

ROOT = Path(__file__).resolve().parents[2]

HOLD = """
import sys, time
from pathlib import Path
from pipeline.compile_lock import compiling
with compiling(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(120)
"""

COMPILE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from dflash.compile import CompileGate
from pipeline.compile_lock import cache_folder, compiling
gate = CompileGate(workers=1)
linear = torch.nn.Linear(8, 8)
body = gate.compile(lambda x: linear(x).relu(), name="body")
lines = []
with compiling(cache_folder(), lines.append), gate.worker("w"):
    gate.warm_up(lambda: body(torch.randn(3, 8)).sum().backward())
report = gate.report()["functions"][0]
print(json.dumps({"forward": report["forward_compiles"], "backward": report["backward_compiles"], "lines": lines}))
"""


def start(script: str, *arguments: str, cache: Path | None = None) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cache is not None:
        environ |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_holder_frees_the_key_within_two_seconds_and_was_named(tmp_path: Path) -> None:
    holder = start(HOLD, str(tmp_path))
    assert holder.stdout is not None and holder.stdout.readline().strip() == "held"
    lines: list[str] = []
    killed = 0.0

    def kill_when_named(line: str) -> None:
        lines.append(line)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        nonlocal killed
        killed = time.monotonic()

    with compiling(tmp_path, kill_when_named):
        waited = time.monotonic() - killed
    assert f"process {holder.pid}" in lines[0]
    assert waited < 2.0


def test_a_file_system_that_refuses_locks_is_named_and_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FileLock, timeout: float | None = None) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(compile_lock.FileLock, "acquire", refuse)
    lines: list[str] = []
    with compiling(tmp_path, lines.append):
        worked = True
    assert worked and "refuses locks" in lines[0]


@pytest.mark.slow
def test_processes_started_together_compile_once_and_the_rest_load_it(tmp_path: Path) -> None:
    """triton#2688, #11512: several processes, one cache, cold. Counted in the backend: only one traced a backward."""
    children = [start(COMPILE, cache=tmp_path) for _ in range(3)]
    results = []
    for child in children:
        out, err = child.communicate(timeout=280)
        assert child.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    assert sorted(r["backward"] for r in results) == [0, 0, 1]
    assert sum(bool(r["lines"]) for r in results) >= 1


# As `python -m pipeline`; a rank that has the key waits until the other one wants it, and notes how long it held it.
NOTING = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from pipeline import train
from pipeline.__main__ import _leave, main

whole, notes, rank = train.compiling, Path(os.environ["NOTES"]), os.environ["RANK"]
@contextmanager
def noting(*given):
    (notes / f"{rank}-came").touch()
    with whole(*given):
        while len(list(notes.glob("*-came"))) < 2:
            time.sleep(0.02)
        begin = time.time()
        yield
        (notes / rank).write_text(f"{begin} {time.time()}")
train.compiling = noting
_leave(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_ranks_of_a_training_hold_their_key_one_after_the_other(
    bench: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each until it is warm; the first collective comes when all are, so that waiting for the key blocks nobody."""
    given = ("train.steps=2", "topology.drafters=[cpu, cpu]", "topology.workers=processes")
    run = bench.go(*given, stages=("cache",))
    notes, script = tmp_path / "notes", tmp_path / "pipeline_rank.py"
    notes.mkdir()
    script.write_text(NOTING)
    key = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "key" / "inductor")}
    for name, value in {**key, "NOTES": str(notes), "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    assert launch(run, command=(sys.executable, str(script)))["steps"] == 2
    (_, end), (begin, _) = sorted([*map(float, (notes / str(rank)).read_text().split())] for rank in range(2))
    assert end <= begin
