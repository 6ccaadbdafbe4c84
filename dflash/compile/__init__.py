"""Race-safe torch.compile for threads: see gate.py."""

from dflash.compile.gate import CompileGate, CompileMiss, GateAborted, GatedFunction, GateError

__all__ = ["CompileGate", "CompileMiss", "GateAborted", "GateError", "GatedFunction"]
