"""The smoke test as a person runs it on a new machine. A second one is in tests/image, and on a GPU in tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    *("doctor", "torch", "C extension", "Triton kernel", "flex attention"),
    *("cache stage", "train stage", "verify stage"),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    written: dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """The places of one user, with a run in them that must stay."""

    folder: Path

    def smoke(self, name: str) -> Finished:
        path = self.folder / f"{name}.json"
        environ = {
            **os.environ,
            "DFLASH_CACHE": str(self.folder / "cache"),
            "DFLASH_RUNS": str(self.folder / "runs"),
            # Whoever asks the network meets a closed port.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
        }
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "smoke", "--device", "cpu", "--json", str(path)],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr, json.loads(path.read_text()))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "runs" / "mine-12345678").mkdir(parents=True)
    (folder / "runs" / "latest").symlink_to("mine-12345678")
    return Machine(folder)


@pytest.fixture(scope="module")
def cold(machine: Machine) -> Finished:
    return machine.smoke("cold")


def test_all_checks_pass_and_all_gates_of_the_run_are_computed(cold: Finished) -> None:
    """pytorch#116696: what compiles at run time is compiled; vllm#41871: and its numbers are compared."""
    assert cold.code == 0, cold.out + cold.err
    assert [row["name"] for row in cold.written["checks"]] == CHECKS
    assert {row["result"] for row in cold.written["checks"]} == {"passed"}
    assert cold.out.splitlines()[-1] == f"smoke: all {len(CHECKS)} checks passed"
    assert cold.written["verdict"] == "pass"
    gates = cold.written["gates"]
    assert len(gates) == 14
    assert all(gate["verdict"] == "pass" and gate["value"] is not None for gate in gates)
    by_name = {gate["name"]: gate for gate in gates}
    assert by_name["replicas equal"]["detail"] == "2 replicas"
    assert by_name["loss finite and fell"]["detail"].endswith("over 3 records")
    assert by_name["lossless greedy decoding"]["detail"].startswith("48 tokens of 4 prompts")


def test_it_leaves_compiled_code_and_nothing_else(machine: Machine, cold: Finished) -> None:
    assert [path.name for path in (machine.folder / "cache").iterdir()] == ["compile"]
    assert sorted(path.name for path in (machine.folder / "runs").iterdir()) == ["latest", "mine-12345678"]
    assert os.readlink(machine.folder / "runs" / "latest") == "mine-12345678"
    compiled = Path(cold.written["compiled"]["folder"])
    assert compiled.parent == machine.folder / "cache" / "compile"
    assert cold.written["compiled"]["new_files"] > 0
    assert any(compiled.rglob("*.cubin"))
    assert any(compiled.rglob("*.so"))
    assert str(compiled) in cold.out
