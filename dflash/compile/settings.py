"""What the gate asks of torch: official switches, and one shim for a CUDA build on a machine without a GPU."""

from __future__ import annotations

import copyreg

import torch
import torch._dynamo

SETTINGS = {
    # A shape that was not declared must miss, not silently become a slower dynamic graph.
    "automatic_dynamic_shapes": False,
    # Past the limit torch runs the function eagerly for ever, in silence; this makes it an error.
    "fail_on_recompile_limit_hit": True,
    # Declared shapes are few, but more than torch's 8 when a run has many buckets and modes.
    "recompile_limit": 64,
    # Second line of defence: should a thread outside the gate trace, a compiled call here still runs compiled instead
    # of raising "Detected that you are using FX to symbolically trace ..." (pytorch#126024). It does not cure the
    # deadlock of two compiling backwards, which only the gate's exclusion does.
    "force_compile_during_fx_trace": True,
}


def configure_thread() -> None:
    """Apply SETTINGS. From torch 2.12 they are kept per thread, so every worker calls this; on 2.11 they are global."""
    for name, value in SETTINGS.items():
        setattr(torch._dynamo.config, name, value)
    # Its opposite would run unfused eager code in silence: 1,515 of 3,891 calls were seen to.
    torch._dynamo.config.error_on_nested_fx_trace = True


def keep_keys() -> None:
    """Let the keys of compiled graphs not depend on what a process imported first.

    torch 2.11.0 hashes a pickle of each input's layout, and a memory format is pickled by its name alone,
    "torch.contiguous_format". The module that goes with it is the first one in sys.modules that has a `torch`: another
    one where transformers, or a test, was imported before torch, and what one process built another built anew. (The
    name of a dtype is looked for likewise, but few modules have a `bfloat16` of their own.)
    """
    copyreg.pickle(torch.memory_format, lambda kept: (_memory_format, (str(kept),)))


def _memory_format(name: str) -> torch.memory_format:
    found: torch.memory_format = getattr(torch, name.removeprefix("torch."))
    return found


def shim_missing_gpu() -> bool:
    """Make threads safe to compile with a CUDA build where there is no GPU; return True if the shim is in place.

    FakeTensorMode.__enter__ then swaps the CUDA device guard for the whole process (_ensureCUDADeviceGuardSet), and
    threads that meet in it crash with a segmentation fault. The guard only matters for tracing CUDA code without a
    GPU, which a drafter on the CPU never does. Seen on torch 2.11.0
    (torch/_subclasses/fake_tensor.py, line 1446); to be dropped with the version that guards the swap.
    """
    if (
        torch.backends.cuda.is_built()
        and not torch.cuda.is_available()
        and hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    ):
        torch._C._ensureCUDADeviceGuardSet = lambda: None
        return True
    return False
