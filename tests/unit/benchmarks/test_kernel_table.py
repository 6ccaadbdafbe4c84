"""How the kernels of a profiled step are told apart."""

from __future__ import annotations

from typing import Any

from benchmarks.kernel_table import kernel_table


def kernel(name: str, start: float, duration: float, launched: float) -> list[dict[str, Any]]:
    """Return a kernel of a chrome trace and its launch; times in microseconds."""
    args = {"correlation": start}
    return [
        {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": launched, "dur": 1.0, "args": args},
        {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": args},
    ]


def test_kernels_are_grouped_by_name_and_by_the_head_that_launched_them() -> None:
    head = {"cat": "cpu_op", "name": "_HeadLoss", "ts": 100.0, "dur": 50.0}
    backward = {"cat": "cpu_op", "name": "_HeadLossBackward", "ts": 0.0, "dur": 99.0}
    events = [
        head,
        backward,
        *kernel("nvjet_tst_128x256", 1000.0, 4000.0, launched=10.0),
        *kernel("triton_tem_fused__to_copy_flex_attention_0", 5000.0, 2000.0, launched=20.0),
        *kernel("triton_poi_fused_flex_attention_mm_mul_3", 7000.0, 1000.0, launched=30.0),
        *kernel("nvjet_tst_128x256", 8000.0, 6000.0, launched=110.0),  # runs long after the head has returned
        *kernel("some_new_softmax", 14000.0, 3000.0, launched=149.0),
        *kernel("Memcpy HtoD", 19000.0, 1000.0, launched=200.0),
    ]
    lines = kernel_table(events, steps=2).splitlines()
    groups = {line[:24].strip(): float(line[24:]) for line in lines[1 : lines.index("")]}
    assert groups == {
        "matmul, head": 3.0,
        "matmul": 2.0,
        "head softmax and loss": 1.5,
        "attention": 1.0,
        "no kernel runs": 1.0,
        "norms, pointwise, other": 0.5,
        "copies": 0.5,
    }
    assert any(line.split()[:2] == ["1.500", "0"] and "some_new_softmax" in line for line in lines)
    without = kernel_table(events[1:], steps=2)
    assert "names no head loss" in without and "head softmax" not in without
