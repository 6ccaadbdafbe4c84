"""The workflows of .github/ cannot run here; what makes them safe to run elsewhere can be read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / ".github" / "workflows"
NAMES = sorted(path.name for path in FOLDER.glob("*.y*ml"))

_PINNED = re.compile(r"^\s*(?:- )?uses: [\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
_HOST = re.compile(r"\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:ai|app|cloud|com|cr|de|dev|eu|io|net|org|sh)\b", re.I)


def faults(text: str) -> list[str]:
    """Return what is wrong with a workflow, one entry for each fault."""
    workflow = yaml.safe_load(text)
    jobs: dict[str, Any] = workflow["jobs"]
    found = [f"not pinned: {line.strip()}" for line in text.splitlines() if "uses:" in line and not _PINNED.match(line)]
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("permissions are not contents: read")
    found += [f"{name} takes more permissions" for name, job in jobs.items() if "permissions" in job]
    if "pull_request_target" in workflow[True]:  # YAML 1.1 reads the key `on` as true
        found.append("pull_request_target gives secrets to foreign code")
    if "group" not in workflow.get("concurrency", {}):
        found.append("no concurrency group")
    found += [f"{name} has no time limit" for name, job in jobs.items() if "timeout-minutes" not in job]
    found += [f"names a host: {match[0]}" for match in _HOST.finditer(text)]
    for name, run in runs(jobs):
        # Substituted before the shell reads it, so that a branch's or tag's name would be run as code.
        if "${{" in run:
            found.append(f"{name}: an expression in a run line")
        found += [f"{name}: {fault}" for line in run.splitlines() if "docker run" in line for fault in _of_docker(line)]
        if "docker run" in run and not re.search(r'^image="\$REGISTRY/dflash@\$DIGEST"$', run, re.M):
            found.append(f"{name}: not run by digest")
    if "pull_request" in workflow[True] and ("secrets." in text or "self-hosted" in text):
        found.append("a pull request reaches secrets or a host of ours")
    return found


def runs(jobs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, job in jobs.items():
        for step in job["steps"]:
            if "run" in step:
                yield name, step["run"]


def _of_docker(line: str) -> list[str]:
    wanted = ("--rm ", "--shm-size=1g ", "-v cache:/cache ", "-v runs:/runs ", '"$image" ')
    return [f"docker run without {flag.strip()}" for flag in wanted if flag not in line]


def test_the_workflows_are_there() -> None:
    assert NAMES == ["ci.yml", "image.yml", "published.yml"]


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_is_pinned_limited_and_names_no_host(name: str) -> None:
    assert faults((FOLDER / name).read_text(encoding="utf-8")) == []


CI, IMAGE = ((FOLDER / name).read_text(encoding="utf-8") for name in ("ci.yml", "image.yml"))


@pytest.mark.parametrize(
    ("text", "old", "new", "fault"),
    [
        (CI, "checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2", "checkout@v6", "not pinned: "),
        (CI, "ce83dd # v6.0.2", "ce83dd", "not pinned: "),
        (CI, "contents: read", "contents: write", "permissions are not contents: read"),
        (CI, "permissions:\n  contents: read\n", "", "permissions are not contents: read"),
        (CI, "    timeout-minutes: 120\n", "    permissions: write-all\n    timeout-minutes: 9\n", "ci takes more"),
        (CI, "  pull_request:\n", "  pull_request_target:\n", "pull_request_target gives"),
        (CI, "concurrency:\n", "x:\n", "no concurrency group"),
        (CI, "    timeout-minutes: 120\n", "", "ci has no time limit"),
        (CI, "run: .ci/run", "run: .ci/run ${{ github.head_ref }}", "ci: an expression in a run line"),
        (CI, "runs-on: ubuntu-24.04", "runs-on: self-hosted", "a pull request reaches"),
        (
            IMAGE,
            "REGISTRY: ${{ vars.REGISTRY }}",
            "REGISTRY: registry.example.com/us",
            "names a host: registry.example",
        ),
        (IMAGE, "--shm-size=1g ", "", "gpu: docker run without --shm-size=1g"),
        (IMAGE, 'dflash@$DIGEST"\n', 'dflash:latest"\n', "gpu: not run by digest"),
    ],
)
def test_what_is_wrong_with_a_workflow_is_found(text: str, old: str, new: str, fault: str) -> None:
    assert old in text
    (first, *_) = faults(text.replace(old, new))
    assert first.startswith(fault)


@pytest.mark.parametrize("name", NAMES)
def test_free_disk_is_shown_before_and_after(name: str) -> None:
    """accelerate PR 1915, actions/runner-images#10237: hosted runners run out of disk over CUDA images."""
    jobs = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["jobs"]
    for job in ("ci", "build", "doctor"):
        if job in jobs:
            steps = [step for step in jobs[job]["steps"] if "df -h" in step.get("run", "")]
            assert steps[0]["name"] == "Free disk"
            assert (steps[-1]["name"], steps[-1]["if"]) == ("Disk afterwards", "always()")


@pytest.mark.parametrize("name", NAMES)
def test_every_run_line_is_shell_that_parses(name: str) -> None:
    for job, run in runs(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["jobs"]):
        parsed = subprocess.run(["bash", "-n"], input=run, capture_output=True, text=True, check=False)
        assert (parsed.returncode, parsed.stderr) == (0, ""), job


def test_latest_is_moved_only_after_the_gpu_ran_the_image() -> None:
    jobs = yaml.safe_load(IMAGE)["jobs"]
    assert jobs["publish"]["needs"] == ["build", "gpu"]
    assert "self-hosted" in jobs["gpu"]["runs-on"]
    assert [name for name, run in runs(jobs) if "dflash:latest" in run] == ["publish"]
