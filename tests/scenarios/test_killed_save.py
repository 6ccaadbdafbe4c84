"""A process that is killed while it saves: what the next start finds (bug-reports 45)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints import latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]

# Every file operation of a save is drawn out here, in the test's own process, so that a kill falls between any two.
_SLOW_SAVES = """
import json, os, sys, time
from pathlib import Path
import torch
from pipeline import checkpoints

def slowed(function):
    def slow(*arguments, **named):
        time.sleep(0.01)
        result = function(*arguments, **named)
        time.sleep(0.01)
        return result
    return slow

for name in ("save_file", "fsync_file", "fsync_folder", "sha256_file"):
    setattr(checkpoints, name, slowed(getattr(checkpoints, name)))
for name in ("rename", "mkdir", "write_text"):
    setattr(Path, name, slowed(getattr(Path, name)))

def save_without_end(root, step):
    while True:
        step += 1
        value = float(step)
        tensors = {"weights": {"w": torch.full((64, 64), value)}, "optimizer": {"m": torch.full((9,), -value)}}
        checkpoints.save_checkpoint(root, step, tensors, {"step": step})
        print("saved", step, flush=True)
        checkpoints.save_checkpoint(root, step, tensors, {"step": step})  # the same step again is a replacement
        checkpoints.prune_checkpoints(root, keep=3)

def save_in_place_without_end(root, step):
    # The fault of the projects in bug-reports 45: files at their final names, one after the other.
    while True:
        step += 1
        folder = root / f"step-{step:06d}"
        folder.mkdir(parents=True)
        checkpoints.save_file({"w": torch.ones(64, 64)}, folder / "weights.safetensors")
        checkpoints.save_file({"m": torch.ones(9)}, folder / "optimizer.safetensors")
        (folder / "state.json").write_text("{}")
        print("saved", step, flush=True)

# torch is imported once; each saving process is a fork that the test kills.
for first in sys.stdin:
    child = os.fork()
    if child == 0:
        save = save_in_place_without_end if sys.argv[2] == "in place" else save_without_end
        save(Path(sys.argv[1]), int(first))
    print("process", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("killed by", os.WTERMSIG(status), flush=True)
"""


class Savers:
    """Processes that save without end, one at a time."""

    def __init__(self, root: Path, how: str) -> None:
        command = [sys.executable, "-c", _SLOW_SAVES, str(root), how]
        self.parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def kill_after(self, first: int, seconds: float) -> int:
        """Save from step first + 1 on, SIGKILL after `seconds`, and return the last step whose save had returned."""
        assert self.parent.stdin is not None and self.parent.stdout is not None
        self.parent.stdin.write(f"{first}\n")
        self.parent.stdin.flush()
        saved, pid = first, 0
        for line in self.parent.stdout:
            word, *_, number = line.split()
            if word == "process":
                pid = int(number)
                time.sleep(seconds)
                os.kill(pid, signal.SIGKILL)
            elif word == "saved":
                saved = int(number)
            else:
                assert (line, pid > 0) == ("killed by 9\n", True)
                return saved
        raise AssertionError("the saving process ended by itself")


@contextmanager
def _savers(root: Path, how: str) -> Iterator[Savers]:
    started = Savers(root, how)
    try:
        yield started
    finally:
        started.parent.communicate(timeout=30)  # closes its input, which ends it


@pytest.mark.slow
def test_ten_kills_at_random_moments_never_lose_a_finished_save(tmp_path: Path) -> None:
    """speculators PR 739, SpecForge PR 659, torchtitan PR 315, returnn#1444."""
    root = tmp_path / "checkpoints"
    moments = random.Random(45)
    done, saw_leftovers = 0, 0
    with _savers(root, "by rename") as savers:
        for _ in range(10):
            done = savers.kill_after(done, moments.uniform(0.05, 1.0))
            saw_leftovers += any(root.glob(".*"))
            lines: list[str] = []
            newest = latest_checkpoint(root, lines.append)
            assert lines == []  # a kill leaves nothing that looks like a checkpoint and is none
            if newest is None:
                assert done == 0
                continue
            found = load_checkpoint(newest)
            # The kill may fall between the rename and the line that tells of it, so one step more may be there.
            assert found.step in (done, done + 1)
            assert found.state == {"step": found.step}
            assert (found.tensors["weights"]["w"] == found.step).all()
            assert (found.tensors["optimizer"]["m"] == -found.step).all()
            done = found.step
    assert done > 0
    assert saw_leftovers > 0, "no kill fell into a save: the moments prove nothing"
    prune_checkpoints(root, keep=2)
    assert all(path.name.startswith("step-") for path in root.iterdir())


def test_saves_written_in_place_leave_halves_which_are_passed_over(tmp_path: Path) -> None:
    """With the guard off: the same kills leave newest folders that lack files, and only the marker tells."""
    root = tmp_path / "checkpoints"
    save_checkpoint(root, 1, {"weights": {"w": torch.ones(2)}}, {})
    moments = random.Random(45)
    halves, step = 0, 1
    with _savers(root, "in place") as savers:
        for _ in range(5):
            savers.kill_after(step, moments.uniform(0.03, 0.3))
            newest = max(root.iterdir())
            step = int(newest.name.removeprefix("step-"))
            halves += step > 1 and len(list(newest.iterdir())) < 3
    lines: list[str] = []
    assert latest_checkpoint(root, lines.append) == root / "step-000001"
    assert len(lines) == step - 1
    assert all("is incomplete (no COMPLETE marker). Resuming from step-000001." in line for line in lines)
    assert halves > 0


def test_a_weight_file_cut_by_one_byte_after_completion_is_not_resumed_from(tmp_path: Path) -> None:
    for step in (400, 500):
        save_checkpoint(tmp_path, step, {"weights": {"w": torch.full((8,), float(step))}}, {"step": step})
    weights = tmp_path / "step-000500" / "weights.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    # Even a marker that was made to agree with the new size does not get past the checksum.
    marker = weights.parent / "COMPLETE"
    content = json.loads(marker.read_text())
    content["files"]["weights.safetensors"]["bytes"] -= 1
    for text, fault in ((None, "instead of"), (json.dumps(content), "does not match its checksum")):
        if text is not None:
            marker.write_text(text)
        lines: list[str] = []
        newest = latest_checkpoint(tmp_path, lines.append)
        assert newest == tmp_path / "step-000400"
        assert load_checkpoint(newest).tensors["weights"]["w"][0] == 400
        assert len(lines) == 1
        assert fault in lines[0]
