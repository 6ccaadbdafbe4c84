"""Leftover variables: named with their effect, silent where they change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from env.caches import environment_for_compile
from env.variables import check_variables


@pytest.mark.parametrize(
    "name, value, level",
    [
        ("TORCHDYNAMO_DISABLE", "1", "error"),
        ("TORCH_COMPILE_DISABLE", "1", "error"),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "1", "error"),
        ("TRITON_INTERPRET", "1", "error"),
        ("TORCH_COMPILE_DISABLE", "0", "warning"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "warning"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "1", "warning"),
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1", "warning"),
        ("TRITON_PTXAS_PATH", "/opt/ptxas", "warning"),
        ("TRITON_CACHE_MANAGER", "remote:Manager", "warning"),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("LD_PRELOAD", "libjemalloc.so", "warning"),
        ("PYTHONPATH", "/opt/other", "warning"),
    ],
)
def test_a_leftover_variable_is_found(name: str, value: str, level: str) -> None:
    (finding,) = check_variables({"HOME": "/root", name: value})
    assert (finding.level, finding.where) == (level, name)
    assert value in finding.what and f"unset {name}" in finding.fix


def test_our_own_cache_variables_empty_ones_and_harmless_ones_are_no_leftovers(tmp_path: Path) -> None:
    harmless = {"TORCH_LOGS": "recompiles", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO"}
    ours = {**environment_for_compile(tmp_path), "DFLASH_RUNS": "/runs"}
    torchruns = {"TORCHELASTIC_RUN_ID": "7", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert check_variables({**ours, **harmless, **torchruns, "PYTHONPATH": "", "TRITON_INTERPRET": ""}) == []


def test_a_library_path_is_named_for_the_libraries_that_are_in_it(tmp_path: Path) -> None:
    for folder, name in (("driver", "libcuda.so.1"), ("cuda", "libcublas.so.12"), ("cuda", "readme.txt")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("")
    value = f"{tmp_path}/driver::{tmp_path}/gone:{tmp_path}/cuda"
    (finding,) = check_variables({"LD_LIBRARY_PATH": value})
    assert (finding.level, finding.where) == ("warning", "LD_LIBRARY_PATH")
    assert finding.what.startswith(f"{tmp_path}/cuda holds libcublas.so.12, ")
    (tmp_path / "cuda/libcublas.so.12").unlink()
    assert check_variables({"LD_LIBRARY_PATH": value}) == []
