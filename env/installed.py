"""Installed distributions against the lock: missing, other version, changed files, and strangers that touch torch."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

CHECKED_FILES = ("torch", "transformers", "triton", "safetensors", "tokenizers")
"""Distributions whose files are compared with RECORD."""
HASHED_UP_TO_BYTES = 8_000_000
"""Larger files (14 of them, libtorch_cuda.so and its like) are compared by size only: hashing what is smaller took
0.5 s with a warm page cache and 2.3 s with a cold one on 2 cores; the larger ones would add the reading of 1.3 GB."""
INTRUDERS = {
    "flash-attn": "replaces attention kernels",
    "flash-attn-3": "replaces attention kernels",
    "xformers": "replaces attention kernels",
    "sageattention": "replaces attention kernels",
    "flashinfer-python": "replaces attention kernels",
    "vllm": "brings its own torch and patches transformers",
    "sglang": "brings its own torch and patches transformers",
    "deepspeed": "patches torch and transformers",
    "unsloth": "patches transformers and torch.compile",
    "unsloth-zoo": "patches transformers and torch.compile",
    "liger-kernel": "patches transformers",
    "kernels": "lets transformers swap in kernels from a hub",
    "apex": "replaces torch modules",
    "transformer-engine": "replaces torch modules",
    "torch-nightly": "is a second torch",
    "torchtriton": "is a second triton",
    "pytorch-triton": "is a second triton",
    "triton-nightly": "is a second triton",
    "pytorch-transformers": "is an older transformers",
}
_BUILD_TOOLS = frozenset({"pip", "setuptools", "wheel"})
_TOUCHED = frozenset({"torch", "triton", "transformers"})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that doctor found: an error stops a run, a warning is worth knowing."""

    level: Literal["error", "warning"]
    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}. {self.fix}"


def canonical(name: str) -> str:
    """Return a distribution's name as locks write it: lower case, runs of "-", "_" and "." as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_distributions(path: list[str] | None = None) -> dict[str, list[metadata.Distribution]]:
    """Return {name: its distributions in the order of `path`} (default: sys.path); more than one means shadowing."""
    found: dict[str, list[metadata.Distribution]] = {}
    folders = list(dict.fromkeys(os.path.realpath(entry or ".") for entry in (sys.path if path is None else path)))
    for distribution in metadata.distributions(path=folders):
        name = distribution.metadata["Name"] if distribution.metadata is not None else None
        if name:
            found.setdefault(canonical(name), []).append(distribution)
    return found


def compare_with_lock(
    found: Mapping[str, list[metadata.Distribution]],
    lock: Mapping[str, tuple[str, str | None]],
    *,
    lock_name: str,
    also_allowed: Iterable[str] = (),
) -> list[Finding]:
    """Return what differs between the installed distributions and the lock.

    also_allowed   names that are no strangers although the lock lacks them (the development tools)
    """
    remake = "Make the environment anew: delete its folder and run: invoke train"
    findings: list[Finding] = []
    for name, (version, _) in lock.items():
        if name not in found:
            findings.append(
                Finding(level="error", what="is not installed", where=f"{name}=={version} ({lock_name})", fix=remake)
            )
            continue
        installed = found[name][0].version
        if installed != version:
            what = f"version {installed} is installed, the lock says {version}"
            findings.append(Finding(level="error", what=what, where=name, fix=remake))
    for name, copies in found.items():
        places = [str(copy.locate_file("")) for copy in copies]
        if len(places) > 1:
            what = f"is installed {len(places)} times; the first of {', '.join(places)} is imported"
            level: Literal["error", "warning"] = "error" if name in CHECKED_FILES else "warning"
            findings.append(
                Finding(level=level, what=what, where=name, fix="Unset PYTHONPATH, or remove the other copy.")
            )
    allowed = {*lock, *map(canonical, also_allowed), *_BUILD_TOOLS}
    for name in sorted(set(found) - allowed):
        findings.append(_stranger(name, found[name][0], remake))
    return findings


def _stranger(name: str, distribution: metadata.Distribution, remake: str) -> Finding:
    requirements = distribution.requires or []
    needs = {canonical(re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0]) for text in requirements}
    where = f"{name}=={distribution.version}"
    if name in INTRUDERS:
        return Finding(level="error", what=f"is not in the lock and {INTRUDERS[name]}", where=where, fix=remake)
    if touched := sorted(needs & _TOUCHED):
        what = f"is not in the lock and builds on {', '.join(touched)}, which it can patch"
        return Finding(level="error", what=what, where=where, fix=remake)
    return Finding(
        level="warning", what="is not in the lock", where=where, fix="Keep other tools in an environment of their own."
    )


def changed_files(distribution: metadata.Distribution) -> list[str]:
    """Return the files of a distribution that are gone or differ from RECORD, as "path (how)"; [] when all agree.

    Files above HASHED_UP_TO_BYTES are compared by size. Files without a hash in RECORD (bytecode) are left out.
    """
    changed: list[str] = []
    record = distribution.read_text("RECORD")
    if record is None:
        return ["RECORD (gone)"]
    base = Path(str(distribution.locate_file("")))
    for relative, recorded, size in csv.reader(record.splitlines()):
        algorithm, _, digest = recorded.partition("=")
        if algorithm != "sha256":
            continue
        try:
            actual = (base / relative).stat().st_size
            if size and actual != int(size):
                changed.append(f"{relative} (size)")
            elif actual <= HASHED_UP_TO_BYTES and _urlsafe_sha256(base / relative) != digest:
                changed.append(f"{relative} (content)")
        except OSError:
            changed.append(f"{relative} (gone)")
    return changed


def check_files(
    found: Mapping[str, list[metadata.Distribution]], names: Iterable[str] = CHECKED_FILES
) -> list[Finding]:
    """Return one error per distribution with changed files, naming the first three."""
    findings = []
    for name in names:
        if name not in found:
            continue
        if changed := changed_files(found[name][0]):
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"differs from what was installed: {', '.join(changed[:3])}{more}"
            fix = "Something patched it in place; delete the environment's folder and run: invoke train"
            findings.append(Finding(level="error", what=what, where=f"{name}=={found[name][0].version}", fix=fix))
    return findings


def _urlsafe_sha256(path: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
