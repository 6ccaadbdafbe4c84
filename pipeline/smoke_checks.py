"""What the smoke test compiles by itself: a C extension, a Triton kernel, a flex attention block; results are compared.

Each check returns a line for a person. It raises EnvError for what the machine lacks, VerificationFailed for a wrong
result, and LeftOut when it cannot be made on this machine at all, though training can.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.attention import block_attention, build_mask
from dflash.masks import MaskLayout
from env.errors import EnvError
from pipeline.dense_step import FLOAT32_LIMIT, relative_difference
from pipeline.errors import VerificationFailed
from pipeline.smoke_results import LeftOut

AHEAD_OF_TIME = 90
"""The capability that a kernel is compiled for where no GPU is: sm_90."""
C_SOURCE = r"""
#include <Python.h>
static PyObject *add(PyObject *self, PyObject *args) {
    long a, b;
    if (!PyArg_ParseTuple(args, "ll", &a, &b)) return NULL;
    return PyLong_FromLong(a + b);
}
static PyMethodDef methods[] = {{"add", add, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "smoke_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_smoke_launcher(void) { return PyModule_Create(&module); }
"""
"""Needs what Triton's launcher needs: a C compiler, a linker, libc's headers and Python.h (pytorch#116696)."""
_DISTRUST = "Do not train here; run invoke doctor, and remove the compile cache if that finds nothing."


def c_extension(folder: Path, source: str = C_SOURCE) -> str:
    """Build an extension module in `folder` as Triton builds its launcher, import it and call it.

    It is built each time: no cache hides a compiler that is gone.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # Triton's order
    if not compiler or not shutil.which(compiler):
        what = f"CC names {compiler}, which is not there" if compiler else "no C compiler (gcc, clang)"
        raise EnvError(what, where="PATH", fix="On Debian: apt-get install gcc libc6-dev; elsewhere set CC to one.")
    code = folder / "smoke_launcher.c"
    code.write_text(source, encoding="ascii")
    library = folder / f"smoke_launcher{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    command = [compiler, str(code), "-O3", "-shared", "-fPIC", f"-I{include}", "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if built.returncode != 0:
        lines = [line for line in built.stderr.splitlines() if "error" in line] or [f"exit {built.returncode}"]
        fix = "On Debian: apt-get install gcc libc6-dev python3-dev, for the Python that runs this."
        raise EnvError(f"cannot build a Python extension ({lines[0].strip()[-200:]})", where=compiler, fix=fix)
    spec = importlib.util.spec_from_file_location("smoke_launcher", library)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        fix = "Set DFLASH_CACHE to a folder of a file system that is not mounted noexec."
        raise EnvError(f"built but cannot be loaded ({error})", where=str(library), fix=fix) from None
    found = module.add(2, 3)
    if found != 5:
        raise VerificationFailed(f"add(2, 3) gave {found}", where=compiler, fix=_DISTRUST)
    return f"built against Python.h by {Path(compiler).name}, loaded and called"


def triton_kernel(device: torch.device) -> str:
    """Compile a kernel and run it on the GPU; without one, compile it for sm_90, which needs no driver."""
    try:
        import triton  # type: ignore[import-untyped]
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
        from triton.compiler import ASTSource  # type: ignore[import-untyped]

        from pipeline import smoke_kernel
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise LeftOut("no triton here: only Linux wheels of torch bring it") from None
    kernel: Any = smoke_kernel.double_and_add
    if device.type == "cuda":
        return _run_kernel(kernel, device, smoke_kernel.BLOCK)
    source = ASTSource(kernel, smoke_kernel.SIGNATURE, {"BLOCK": smoke_kernel.BLOCK})
    compiled = triton.compile(source, target=GPUTarget("cuda", AHEAD_OF_TIME, 32))
    binary = compiled.asm["cubin"]
    if not binary.startswith(b"\x7fELF"):
        raise VerificationFailed("ptxas made no ELF file of the kernel", where="triton", fix=_DISTRUST)
    return f"compiled ahead of time for sm_{AHEAD_OF_TIME} by ptxas, {len(binary)} bytes; not run, as there is no GPU"


def _run_kernel(kernel: Any, device: torch.device, block: int) -> str:
    num = 1000  # no multiple of the block
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, num, generator=generator).to(device)
    out = torch.full((num + block,), -7.0, device=device)
    with torch.cuda.device(device):
        kernel[(-(-num // block),)](x, y, out, num, BLOCK=block)
    wrong = int((out[:num] != 2 * x + y).sum()) + int((out[num:] != -7).sum())
    if wrong:
        raise VerificationFailed(f"{wrong} of {num} numbers are wrong", where="triton", fix=_DISTRUST)
    name = torch.cuda.get_device_name(device)
    return f"compiled and run on {name}, {num} numbers as torch computes them"


def flex_block(device: torch.device, backend: str = "inductor") -> str:
    """Compile block attention over a training mask with flex and compare with the dense reference, in float32.

    On a GPU the gradients too; flex has no backward on the CPU.
    """
    layout = MaskLayout(context_len=140, block_size=10, window=60, causal=True)
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randperm(139, generator=generator)[:14].sort().values[None].to(device)
    num_queries = anchors.shape[1] * layout.block_size  # 140: the second tile is partly filled (SpecForge#501)
    leaves = [torch.randn(1, 4, num_queries, 32, generator=generator)]
    leaves += torch.randn(2, 1, 2, layout.context_len + num_queries, 32, generator=generator)
    backward = device.type == "cuda"
    leaves = [leaf.to(device).requires_grad_(backward) for leaf in leaves]

    def run(attention: Any, implementation: str) -> list[Tensor]:
        out = attention(*leaves, build_mask(anchors, layout, implementation), implementation)
        return [out.detach(), *(torch.autograd.grad(out.square().sum(), leaves) if backward else ())]

    try:
        found = run(torch.compile(block_attention, dynamic=False, fullgraph=True, backend=backend), "flex")
    except Exception as error:
        if device.type == "cpu" and "not supported for CPU" in str(error):  # no AVX2 (torch 2.11.0, flex_cpu.py)
            raise LeftOut("torch compiles flex for no CPU of this kind; training on it uses sdpa") from None
        raise
    parts = ("output", "gradient of q", "gradient of k", "gradient of v")[: len(found)]
    pairs = zip(parts, found, run(block_attention, "eager"), strict=True)
    differences = {part: relative_difference(ours, reference) for part, ours, reference in pairs}
    worst = max(differences, key=lambda part: differences[part])
    if not differences[worst] <= FLOAT32_LIMIT:
        what = f"{worst} differs from dense attention by {differences[worst]:.2e}, the limit is {FLOAT32_LIMIT:g}"
        raise VerificationFailed(what, where="flex attention", fix=_DISTRUST)
    return f"compiled; {', '.join(differences)} as dense attention's within {differences[worst]:.0e}"
