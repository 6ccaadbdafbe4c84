"""The launch recipes cannot be submitted here; that they say what the code means can be read."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from env.caches import CacheDirs
from env.container import container_argv
from env.engines import Engine, HostFacts
from env.entrypoint import PIPELINE
from env.image import SHM_BYTES
from env.rootfs import START
from pipeline.config import load_config
from pipeline.errors import ConfigError, Interrupted, VerificationFailed
from tests.engine_tools import DOCKER

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "env" / "launch"
NAMES = ("slurm.sbatch", "slurm-hosts.sbatch", "kubernetes.yaml", "skypilot.yaml")
SLURM, HOSTS, KUBERNETES, SKYPILOT = RECIPES = tuple(FOLDER / name for name in NAMES)
ROOTLESS = Engine(name="podman", why="", facts=HostFacts(rootless=True))
IN_CONTAINER = ("/cache", "/runs", "/tmp", "/dev/shm", "/dev/null", "/dev/infiniband", f"/{START}")
_HOST = re.compile(r"\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:ai|app|cloud|com|cr|de|dev|eu|io|net|org|sh)\b", re.I)
_NOT_HOSTS = {"nvidia.com"}
"""The name that Kubernetes and CDI give NVIDIA's GPUs."""
_ABSOLUTE = re.compile(r"(?<![\w.\"$}~*/])/(?:[a-z][\w.-]*)(?:/[\w.-]+)*")


def faults(text: str) -> list[str]:
    """Return the hosts and absolute paths of a recipe that are none of the container's."""
    found = [f"host {match[0]}" for match in _HOST.finditer(text) if match[0] not in _NOT_HOSTS]
    paths = (match[0] for match in _ABSOLUTE.finditer(text.replace("#!/usr/bin/env bash", "").replace("$HOME/", "$")))
    return found + [f"path {path}" for path in paths if not path.startswith(IN_CONTAINER)]


def kubernetes() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load(KUBERNETES.read_text())
    return job


def skypilot() -> dict[str, Any]:
    task: dict[str, Any] = yaml.safe_load(SKYPILOT.read_text())
    return task


def flags(engine: Engine, tmp_path: Path) -> set[str]:
    """Return the options of a run of ours that do not depend on the host's folders and user."""
    caches = CacheDirs.from_environment(tmp_path, {})
    argv = container_argv(engine, "image", ["train"], root=tmp_path, caches=caches, environ={}, network=True, gpus=True)
    return {a for a in argv if a.startswith("--") and not a.startswith(("--volume", "--user=", "--events", "--ulimit"))}


def test_every_recipe_is_named_in_the_readme_and_so_is_every_variable_of_ours() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.iterdir()} == {"README.md", *(path.name for path in RECIPES)}
    for path in RECIPES:
        assert f"`{path.name}`" in readme
        for name in set(re.findall(r"DFLASH_[A-Z_]+", path.read_text())):
            assert f"`{name}`" in readme, name


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_names_no_host_no_image_and_no_path_of_a_machine(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "line", ["image: registry.example.com/dflash:1", "--volume=/mnt/nfs/runs:/runs:rw", "path: /var/lib/dflash"]
)
def test_a_host_or_a_path_would_be_found(line: str) -> None:
    assert len(faults(KUBERNETES.read_text() + line)) == 1


def test_the_shell_parts_parse(tmp_path: Path) -> None:
    run = tmp_path / "run.sh"
    run.write_text(skypilot()["run"])
    for script in (SLURM, HOSTS, run):
        assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("engine", "path"), [(DOCKER, SLURM), (ROOTLESS, SLURM), (DOCKER, HOSTS), (ROOTLESS, HOSTS), (DOCKER, SKYPILOT)]
)
def test_containers_are_started_as_the_tasks_start_them(engine: Engine, path: Path, tmp_path: Path) -> None:
    """Read-only root, no privileges, shared memory (pytorch#5040), GPUs: whatever env/image.py asks for."""
    text = path.read_text()
    if path in (SLURM, HOSTS):  # the flags for GPUs are put together there; tests of their own start the scripts
        text += "--gpus=all --device=nvidia.com/gpu=all"
    missing = [flag for flag in flags(engine, tmp_path) if flag not in text]
    assert missing == [] and "--read-only" in flags(engine, tmp_path)


def test_the_command_and_the_configuration_are_ours() -> None:
    (container,) = kubernetes()["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["train", "--config", "${DFLASH_CONFIG}"] and container["image"] == "${DFLASH_IMAGE}"
    assert "train" in PIPELINE
    for preset in {p for path in RECIPES for p in re.findall(r"configs/[\w-]+\.yaml", path.read_text())}:
        assert load_config(ROOT / preset).topology.drafters == ("cuda:0",)  # the recipes ask for one GPU
    for script in (SLURM.read_text(), skypilot()["run"]):
        words = shlex.split(script.replace("\n", " \n"), comments=True)
        assert words[words.index("train") :][:2] == ["train", "--config"]


def test_cache_is_the_nodes_and_runs_and_data_are_shared() -> None:
    spec = kubernetes()["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {m["mountPath"]: (m["name"], m.get("subPath")) for m in spec["containers"][0]["volumeMounts"]}
    assert "hostPath" in volumes["cache"] and "persistentVolumeClaim" in volumes["shared"]
    assert mounts["/cache"] == ("cache", None)
    assert mounts["/runs"] == ("shared", "runs") and mounts["/cache/data"] == ("shared", "data")
    assert mounts.keys() == {"/cache", "/cache/data", "/runs", "/tmp", "/dev/shm"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{SHM_BYTES >> 30}Gi"}
    in_image = CacheDirs.from_environment(ROOT, {"DFLASH_CACHE": "/cache", "DFLASH_RUNS": "/runs"})
    assert (str(in_image.data), str(in_image.runs)) == ("/cache/data", "/runs")
    for script in (SLURM.read_text(), skypilot()["run"]):
        shared = re.findall(r"--volume=\"?([^ ]*):(/[\w/]+):rw", script)
        assert {target: "hared" in source.lower() for source, target in shared} == {
            "/cache": False,
            "/cache/data": True,
            "/runs": True,
        }


def test_exit_codes_mean_to_the_scheduler_what_they_mean_to_us() -> None:
    spec = kubernetes()["spec"]
    never_again = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert never_again == [ConfigError.exit_code, 3, VerificationFailed.exit_code]
    assert Interrupted.exit_code not in never_again
    assert spec["podReplacementPolicy"] == "Failed" and spec["template"]["spec"]["restartPolicy"] == "Never"
    assert f'"$code" -eq {Interrupted.exit_code}' in SLURM.read_text()
