"""The command and the preflight before every run: order, exit codes, the file of findings, and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from env.doctor import check_lock, preflight
from env.importpath import START_PATH


def test_errors_come_before_warnings_and_every_finding_says_what_to_do(repository: Path) -> None:
    leftovers = {"LD_PRELOAD": "x.so", "TORCHDYNAMO_DISABLE": "1", "PATH": "/nowhere", "TMPDIR": "/gone"}
    findings = preflight(repository, environ={**os.environ, **leftovers})
    levels = [f.level for f in findings]
    assert levels == sorted(levels) and {"error", "warning"} == set(levels)
    assert {"TORCHDYNAMO_DISABLE", "PATH", "LD_PRELOAD", "TMPDIR"} <= {f.where for f in findings}
    assert all(f.what and f.where and f.fix for f in findings)


def _doctor(repository: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "PYTORCH", "TRITON"))}
    command = [sys.executable, "-m", "env.doctor", *arguments]
    return subprocess.run(command, cwd=repository, env={**environ, **variables}, capture_output=True, text=True)


def test_the_command_says_one_line_each_and_exits_3_for_errors_only(repository: Path, tmp_path: Path) -> None:
    fit = _doctor(repository, "--json", str(tmp_path / "fit.json"))
    assert fit.returncode == 0, fit.stderr
    ill = _doctor(repository, "--json", str(tmp_path / "ill.json"), TORCHDYNAMO_DISABLE="1")
    assert ill.returncode == 3
    assert ill.stderr.startswith("error: TORCHDYNAMO_DISABLE: is '1': torch.compile does nothing.")
    assert json.loads((tmp_path / "ill.json").read_text())[0]["where"] == "TORCHDYNAMO_DISABLE"
    missing = _doctor(repository, "--lock", "nowhere.txt")
    assert (
        missing.returncode == 3
        and missing.stderr == "nowhere.txt: no such lock. lockfiles/runtime.txt is the usual one.\n"
    )


def test_a_file_of_findings_that_cannot_be_written_is_one_line(repository: Path, tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no/doctor.json", "No such file or directory"), (tmp_path, "Is a directory")):
        done = _doctor(repository, "--json", str(path))
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1] == (
            f"{path}: cannot be written ({reason}). Give --json a file in a folder that is there."
        )
        assert "Traceback" not in done.stderr and "doctor: 0 errors" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_imports_no_torch(repository: Path) -> None:
    script = "import sys, tasks, env.doctor, env.fingerprint, env.caches; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=repository).returncode == 0


def test_what_a_library_adds_to_the_path_later_is_no_drift(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools puts its _vendor folder there when torch imports it; verify then found eleven strangers."""
    import setuptools  # type: ignore[import-untyped]

    vendored = Path(setuptools.__file__).parent / "_vendor"
    monkeypatch.setattr(sys, "path", [*START_PATH, str(vendored)])
    lock = repository / "lockfiles" / "runtime.txt"
    assert [finding for finding in check_lock(repository, lock) if finding.level == "error"] == []
    assert [finding for finding in check_lock(repository, lock, list(sys.path)) if finding.level == "error"]
