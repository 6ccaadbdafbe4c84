"""Slurm's recipes are started here, with programs that stand for Slurm's and the engines'."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.env.test_launch import HOSTS, SLURM


def _slurm(tmp_path: Path, step: str, *, script: Path = SLURM, **variables: str) -> subprocess.Popen[str]:
    """Start the batch script with an srun that runs Python code `step`, and a scontrol that writes down its words."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(f"#!{sys.executable}\nimport sys, signal, time\n{step}\n")
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/scontrol.txt\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "DFLASH_IMAGE": "image"}
    environ |= {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    environ |= {"DFLASH_CACHE": f"{tmp_path}/cache", "DFLASH_SHARED": f"{tmp_path}/shared", **variables}
    command = ["bash", str(script), "train.steps=9"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("engine", ["docker", "podman", "apptainer"])
def test_a_slurm_job_runs_one_step_and_ends_with_its_code(engine: str, tmp_path: Path) -> None:
    job = _slurm(tmp_path, "print(*sys.argv[1:]); sys.exit(4)", DFLASH_ENGINE=engine)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (4, "")
    assert out.startswith(f"--ntasks=1 {engine} ") and f"{tmp_path}/shared/data:/cache/data" in out
    assert out.endswith("train --config configs/smollm2-gpu.yaml train.steps=9\n")
    assert not (tmp_path / "scontrol.txt").exists()


SAVING = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), sys.exit(5)))"
"""A step that needs a second to save."""


def test_near_the_time_limit_the_step_saves_and_the_job_is_queued_again(tmp_path: Path) -> None:
    job = _slurm(tmp_path, f"{SAVING}; print('up', flush=True); time.sleep(30)")
    assert job.stdout is not None and job.stdout.readline() == "up\n"
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300, to the shell alone
    job.communicate(timeout=20)
    assert job.returncode == 5
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77\n"


@pytest.mark.parametrize("trapped", [True, False])
def test_a_job_that_is_cancelled_or_preempted_outlives_its_step_and_queues_nothing(
    tmp_path: Path, trapped: bool
) -> None:
    """Without the trap the shell ends at once, and Slurm with it the step that is still saving."""
    script = tmp_path / "job.sh"
    script.write_text(SLURM.read_text() if trapped else SLURM.read_text().replace("trap : TERM", ""))
    job = _slurm(tmp_path, "print('up', flush=True); time.sleep(1.5); sys.exit(5)", script=script)
    assert job.stdout is not None and job.stdout.readline() == "up\n"
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)  # to the shell alone; the step was signalled by Slurm
    job.communicate(timeout=60)
    assert job.returncode == (5 if trapped else -signal.SIGTERM)
    assert not (tmp_path / "scontrol.txt").exists()


@pytest.mark.parametrize(
    ("engine", "gpus", "flags"),
    [
        ("docker", "", ["--gpus=all"]),
        ("docker", "2,5", ['--gpus="device=2,5"']),
        ("podman", "", ["--device=nvidia.com/gpu=all"]),
        ("podman", "2,5", ["--device=nvidia.com/gpu=2", "--device=nvidia.com/gpu=5"]),
    ],
)
def test_a_slurm_job_gets_the_gpus_that_it_was_given_and_no_others(
    engine: str, gpus: str, flags: list[str], tmp_path: Path
) -> None:
    given: Any = {"SLURM_JOB_GPUS": gpus} if gpus else {}
    out, err = _slurm(tmp_path, "print(*sys.argv[1:])", DFLASH_ENGINE=engine, **given).communicate(timeout=60)
    assert err == "" and [word for word in out.split() if word.startswith(("--gpus", "--device"))] == flags


def test_a_slurm_job_without_a_shared_folder_or_with_an_unknown_engine_says_so(tmp_path: Path) -> None:
    job = _slurm(tmp_path, "", DFLASH_SHARED="")
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and "DFLASH_SHARED: a folder on storage that every node sees" in err
    (tmp_path / "other").mkdir()
    job = _slurm(tmp_path / "other", "", DFLASH_ENGINE="rkt")
    assert job.communicate(timeout=60)[1] == "DFLASH_ENGINE is rkt: docker, podman or apptainer\n"
    assert job.returncode == 2


# An srun that runs its step here as on a node whose share of the GPUs is {gpus}, and an engine that runs the step's
# part: the cache stage names the run, torchrun ends with 1 whatever happens.
_SRUN = """
import os
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
os.environ["SLURM_STEP_GPUS"] = {gpus!r}
print("srun", *sys.argv[1:][:2], flush=True)
os.execvp(words[0], words)
"""
_ENGINE = """
import os
words = sys.argv
stage = next((w for w in words if w.startswith("--stage")), "ranks")
environ = [f"{{n}}={{v}}" for n, v in os.environ.items() if n.startswith("APPTAINERENV_")]
print("words", *words, *environ, flush=True)
if stage == "--stage=cache":
    print("run ../runs/tiny-0000", flush=True)
if stage == "ranks":
    os.makedirs({runs!r} + "/tiny-0000", exist_ok=True)
    def state(name):
        with open({runs!r} + "/tiny-0000/stages.json", "w") as file:
            file.write('{{"name": "train",\\n"state": "' + name + '"}}')
    {ranks}
"""


def _several_hosts(tmp_path: Path, ranks: str, *, gpus: str = "2,5", **variables: str) -> subprocess.Popen[str]:
    """Start the recipe for several hosts; its ranks are the Python code `ranks`, in which state(name) notes the stage's
    in stages.json."""
    runs = tmp_path / "shared" / "runs"
    runs.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("podman", "docker", "apptainer"):
        code = _ENGINE.format(runs=str(runs), ranks=ranks)
        (tmp_path / "bin" / name).write_text(f"#!{sys.executable}\nimport sys, signal, time\n{code}")
    given = {"DFLASH_CONFIG": "/runs/mine.yaml", "SLURM_JOB_GPUS": "7", **variables}
    return _slurm(tmp_path, _SRUN.format(gpus=gpus), script=HOSTS, **given)


def _until(job: subprocess.Popen[str], word: str) -> None:
    assert job.stdout is not None
    assert any(word in line for line in job.stdout), "it never came"


@pytest.mark.parametrize(("code", "state", "expected"), [(0, "done", 0), (1, "failed", 1), (1, "interrupted", 5)])
def test_a_slurm_job_of_several_hosts_runs_ranks_between_two_stages_of_one(
    code: int, state: str, expected: int, tmp_path: Path
) -> None:
    job = _several_hosts(tmp_path, f"state({state!r}); sys.exit({code})")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (expected, "")
    assert re.findall("srun (.*)", out) == ["--nodes=1 --ntasks=1", "--ntasks-per-node=1 bash"] + (
        ["--nodes=1 --ntasks=1"] if code == 0 else []
    )
    _, ranks, *verify = re.findall("words (.*)", out)
    assert "/podman run " in ranks and "--network=host" in ranks and ranks.endswith("-m pipeline rank tiny-0000")
    assert "--nnodes=2 --nproc-per-node=4 --rdzv-id=77" in ranks
    assert [line.endswith("train --config /runs/mine.yaml --stage=verify train.steps=9") for line in verify] == (
        [True] if code == 0 else []
    )
    assert not (tmp_path / "scontrol.txt").exists() or "requeue" not in (tmp_path / "scontrol.txt").read_text()
    assert not list((tmp_path / "shared" / "runs").glob(".slurm-*"))


@pytest.mark.parametrize(
    ("engine", "gpus", "flags"),
    [
        ("docker", "2,5", ['--gpus="device=2,5"']),
        ("podman", "2,5", ["--device=nvidia.com/gpu=2", "--device=nvidia.com/gpu=5"]),
        ("apptainer", "2,5", ["APPTAINERENV_CUDA_VISIBLE_DEVICES=0,1", "APPTAINERENV_HF_TOKEN=secret"]),
    ],
)
def test_each_node_of_several_gives_its_own_share_of_the_gpus(
    engine: str, gpus: str, flags: list[str], tmp_path: Path
) -> None:
    """The job's variable is the first node's, and all GPUs of a node are also another job's."""
    given = {"DFLASH_ENGINE": engine, "CUDA_VISIBLE_DEVICES": "0,1", "HF_TOKEN": "secret"}
    out, err = _several_hosts(tmp_path, "", gpus=gpus, **given).communicate(timeout=60)
    starts = ("--gpus", "--device", "APPTAINERENV")
    lines = re.findall("words (.*)", out)
    assert err == "" and len(lines) == 3
    switch = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    passed = f"APPTAINERENV_{switch}=1" if engine == "apptainer" else f"--env={switch}"
    for line in lines:
        assert passed in line.split()  # the ranks refuse torchrun's shared store
        assert sorted(word for word in line.split() if word.startswith(starts) and word != passed) == sorted(flags)
        assert "secret" not in line or engine == "apptainer"
        assert engine != "apptainer" or f"--bind {tmp_path}/cache/tmp:/tmp " in line


@pytest.mark.parametrize("engine", ["docker", "podman", "apptainer"])
def test_the_ranks_in_the_containers_have_what_a_site_sets_for_its_network(engine: str, tmp_path: Path) -> None:
    """On a host with several cards NCCL and gloo may take one that the others cannot reach."""
    given = {"DFLASH_ENGINE": engine, "NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "NOT_NCCL_X": "1"}
    out, err = _several_hosts(tmp_path, "", gpus="0", **given).communicate(timeout=60)
    lines = re.findall("words (.*)", out)
    assert err == "" and len(lines) == 3
    for words in map(str.split, lines):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            assert (f"APPTAINERENV_{name}=eth1" if engine == "apptainer" else f"--env={name}") in words
        assert not any("NOT_NCCL_X" in word for word in words)


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("docker", "--device={}:/dev/infiniband --ulimit=memlock=-1:-1 --gpus="),
        ("podman", "--device={}:/dev/infiniband --ulimit=host --userns=keep-id"),
        ("apptainer", "/shared/runs:/runs --bind {}:/dev/infiniband "),
    ],
)
def test_containers_of_several_hosts_have_the_nodes_cards_where_there_are_any(
    engine: str, given: str, tmp_path: Path
) -> None:
    """Without them NCCL goes by TCP, which costs speed and says nothing."""
    cards = tmp_path / "infiniband"
    variables = {"DFLASH_ENGINE": engine, "DFLASH_RDMA": str(cards)}
    for there in (True, False):
        if there:
            cards.mkdir()
        else:
            cards.rmdir()
        out, err = _several_hosts(tmp_path / str(there), "", gpus="0", **variables).communicate(timeout=60)
        lines = re.findall("words (.*)", out)
        assert err == "" and len(lines) == 3
        assert all((given.format(cards) in line) is there for line in lines), lines
        assert there or all("memlock" not in line and str(cards) not in line for line in lines)


def test_a_step_that_was_given_no_gpus_of_the_jobs_says_so_and_nothing_runs(tmp_path: Path) -> None:
    job = _several_hosts(tmp_path, "", gpus="")
    out, err = job.communicate(timeout=60)
    assert job.returncode == 2 and "words" not in out
    assert err.endswith(": Slurm gave the job GPUs and this step none (SLURM_STEP_GPUS)\n")


_SAVES = (
    "state('running'); signal.signal(signal.SIGTERM, lambda *_: (state({!r}), sys.exit(1))); print('up', flush=True)"
)
"""Ranks that torchrun ends with 1, saved or killed while they save."""


@pytest.mark.parametrize("state", ["interrupted", "running"])
def test_near_the_time_limit_the_ranks_save_and_the_job_is_queued_again(state: str, tmp_path: Path) -> None:
    """Also when torchrun killed them after its 30 seconds: they go on from the checkpoint before."""
    job = _several_hosts(tmp_path, f"{_SAVES.format(state)}; time.sleep(30)")
    _until(job, "up")
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300, to the shell alone
    job.communicate(timeout=20)
    assert job.returncode == 5
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77\n"


def test_a_failure_near_the_time_limit_is_not_queued_again(tmp_path: Path) -> None:
    job = _several_hosts(tmp_path, f"{_SAVES.format('failed')}; time.sleep(30)")
    _until(job, "up")
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=20)
    assert job.returncode == 1 and "requeue" not in (tmp_path / "scontrol.txt").read_text()


@pytest.mark.parametrize(("state", "code"), [("interrupted", 5), ("running", 1)])
def test_a_job_of_several_hosts_that_is_cancelled_or_preempted_outlives_its_ranks_and_queues_nothing(
    state: str, code: int, tmp_path: Path
) -> None:
    """After a preemption Slurm does it, and twice would be two jobs on one run."""
    job = _several_hosts(tmp_path, f"state({state!r}); print('up', flush=True); time.sleep(1.5); sys.exit(1)")
    _until(job, "up")
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)  # to the shell; the ranks were signalled by Slurm
    job.communicate(timeout=60)
    assert job.returncode == code
    assert "requeue" not in (tmp_path / "scontrol.txt").read_text()


def test_a_time_limit_between_two_steps_starts_no_further_one(tmp_path: Path) -> None:
    """The signal comes while a step that had no more to save ends well."""
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(30)"
    job = _several_hosts(tmp_path, ends)
    _until(job, "up")
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=20)
    assert job.returncode == 5 and "--stage=verify" not in out
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77\n"
