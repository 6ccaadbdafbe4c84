"""Counters that cannot under-count: compiles in the backend itself, eager bodies in the branch that tracing removes.

torch's on_compile_start callbacks miss compiles that overlap (10 of 12 were seen), so they are not used.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from dflash.compile.settings import keep_keys


@dataclass(frozen=True)
class CompileEvent:
    """One graph compiled: of which function, forward or backward, in which thread, before or after the seal."""

    function: str
    direction: str
    thread: str
    sealed: bool


@dataclass
class FunctionCounters:
    """What happened to one gated function."""

    name: str
    eager_bodies: int = 0
    misses: int = 0
    events: list[CompileEvent] = field(default_factory=list)
    code: Any = None

    def compiles(self, direction: str, *, sealed: bool | None = None) -> int:
        """Return how many graphs of one direction were compiled; `sealed` picks those before or after the seal."""
        return sum(e.direction == direction and sealed in (None, e.sealed) for e in self.events)

    def cache_entries(self) -> int:
        """Return the compiled entries that torch holds for this function's own code object."""
        return len(_debug_get_cache_entry_list(self.code)) if self.code is not None else 0

    def report(self) -> dict[str, Any]:
        """Return all counts, for metrics and gates."""
        return {
            "name": self.name,
            "forward_compiles": self.compiles("forward"),
            "backward_compiles": self.compiles("backward"),
            "forward_compiles_after_warmup": self.compiles("forward", sealed=True),
            "backward_compiles_after_warmup": self.compiles("backward", sealed=True),
            "eager_bodies": self.eager_bodies,
            "misses": self.misses,
            "cache_entries": self.cache_entries(),
            "threads": sorted({e.thread for e in self.events}),
        }


def counting_backend(name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    """Return a torch.compile backend that calls `note("forward" | "backward")` before each graph it compiles.

    Backends: "inductor", or "aot_eager", which traces the same graphs and generates no code. A backward that comes out
    of torch's disk cache together with its forward is not traced again and not counted.
    """
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        keep_keys()
        patches = {
            # A precompiled header (about 120 MB) would go to the temporary folder, which a container loses at each
            # start: torch 2.11.0 then compiles it anew in every process that only loads C++ kernels from disk.
            "cpp_cache_precompile_headers": False,
            # Otherwise the tile of a reduction is the one that was fastest when it was built, and with it the order of
            # its sum: a run with a new compile cache ended with other bits than the one before (NOTES.md, 2026-12-01).
            "deterministic": True,
        }

        @functools.wraps(compile_fx_inner)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("is_backward"):
                note("backward")
            # Only Inductor's own CUDA graphs need to know which inputs never move. Told so, torch 2.11.0 also writes
            # where each lies in its storage into the key: ranks whose weights lie in one tensor would build anew what
            # the cache stage built for weights that lie apart.
            return compile_fx_inner(*args, **kwargs | {"static_input_idxs": ()})

        def backend(module: Any, inputs: Any) -> Any:
            note("forward")
            return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)

        return backend
    if name == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        def backward(module: Any, inputs: Any) -> Any:
            note("backward")
            return boxed_nop(module, inputs)

        traced = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward)

        def eager_backend(module: Any, inputs: Any) -> Any:
            note("forward")
            return traced(module, inputs)

        return eager_backend
    raise ValueError(f"unknown backend {name!r}: use inductor or aot_eager")


def disk_counts(since: dict[str, int] | None = None) -> dict[str, int]:
    """Return {"built", "loaded"} of Inductor in this process, less those of `since`.

    built    graphs that were compiled, and runs of the C++ compiler: a library can be missing though its graph is there
    loaded   graphs that came from disk
    torch's own counters (2.11.0); a test that builds fails if a later torch renames them.
    """
    from torch._dynamo.utils import compilation_time_metrics, counters

    found, runs = counters["inductor"], len(compilation_time_metrics.get("compile_file", ()))
    now = {
        "built": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"] + runs,
        "loaded": found["fxgraph_cache_hit"],
    }
    return {name: count - (since or {}).get(name, 0) for name, count in now.items()}


def thread_name() -> str:
    """Return the current thread's name; CUDA backwards run on autograd's own threads, which have generic ones."""
    return threading.current_thread().name
