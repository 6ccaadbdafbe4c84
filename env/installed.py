"""Installed distributions against the lock: missing, other version, other origin, changed files, and strangers."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata

from env.findings import Finding, error, warning

CORE = ("torch", "transformers", "triton", "safetensors", "tokenizers")
"""Distributions of which no second copy may be on the path, not even one that is not imported."""
HASHED_UP_TO_BYTES = 8_000_000
"""Larger files (38 of 20,876 of the runtime lock, libtorch_cuda.so and its like) are compared by size only: the smaller
ones are 0.39 GB and take 1.0 s of one core from a warm page cache, 2.5 s of it from a cold one; the larger ones would
add the reading of 4.5 GB."""
INTRUDERS = {
    "flash-attn": "replaces attention kernels",
    "flash-attn-3": "replaces attention kernels",
    "flash-attn-4": "replaces attention kernels",
    "vllm-flash-attn": "replaces attention kernels",
    "xformers": "replaces attention kernels",
    "sageattention": "replaces attention kernels",
    "flashinfer-python": "replaces attention kernels",
    "sgl-kernel": "replaces attention kernels",
    "vllm": "brings its own torch and patches transformers",
    "sglang": "brings its own torch and patches transformers",
    "deepspeed": "patches torch and transformers",
    "unsloth": "patches transformers and torch.compile",
    "unsloth-zoo": "patches transformers and torch.compile",
    "liger-kernel": "patches transformers",
    "kernels": "lets transformers swap in kernels from a hub",
    "apex": "replaces torch modules",
    "transformer-engine": "replaces torch modules",
    "intel-extension-for-pytorch": "patches torch",
    "torch-nightly": "is a second torch",
    "torchtriton": "is a second triton",
    "pytorch-triton": "is a second triton",
    "pytorch-triton-rocm": "is a second triton",
    "triton-nightly": "is a second triton",
    "pytorch-transformers": "is an older transformers",
}
BUILD_TOOLS = frozenset({"pip", "setuptools", "wheel"})
"""Never strangers: venv and image builders leave them behind."""
REMAKE = "Make the environment anew: delete its folder (in a container: start a new one) and run: invoke train"
_TOUCHED = frozenset({"torch", "triton", "transformers"})
_LOADED_BY_TORCH = frozenset({"torch.backends", "torch_dynamo_backends", "triton.backends"})
"""Groups of entry points that torch and Triton load by themselves."""

Found = Mapping[str, list[metadata.Distribution]]


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


def base_folder(distribution: metadata.Distribution) -> str:
    """Return the folder that RECORD's paths are relative to."""
    return os.path.normpath(str(distribution.locate_file("")))


def read_record(distribution: metadata.Distribution) -> list[tuple[str, str, str]]:
    """Return RECORD's rows (path, "sha256=...", size in bytes); empty when there is none."""
    return [(row[0], row[1], row[2]) for row in csv.reader((distribution.read_text("RECORD") or "").splitlines())]


def compare_with_lock(
    found: Found,
    lock: Mapping[str, tuple[str, str | None]],
    *,
    lock_name: str,
    lock_hashes: Collection[str] = (),
    also_allowed: Iterable[str] = (),
) -> list[Finding]:
    """Return what differs between the installed distributions and the lock.

    lock_hashes    sha256 of every file that the lock names; a wheel with one of them may come from a file
    also_allowed   names that are no strangers although the lock lacks them (the development tools)
    """
    findings: list[Finding] = []
    for name, (version, _) in lock.items():
        if name not in found:
            findings.append(error(f"{name}=={version} ({lock_name})", "is not installed", REMAKE))
            continue
        for copy in found[name]:
            place = f" in {base_folder(copy)}" if len(found[name]) > 1 else ""
            if copy.version != version:
                what = f"version {copy.version} is installed{place}, the lock says {version}"
                findings.append(error(name, what, REMAKE))
            if origin := _other_origin(copy, lock_hashes):
                what = f"was installed from {origin}, not from the lock"
                findings.append(error(f"{name}=={copy.version}", what, REMAKE))
    for name, copies in found.items():
        if len(copies) > 1:
            places = ", ".join(base_folder(copy) for copy in copies)
            what = f"is installed {len(copies)} times; the first of {places} is imported"
            fix = "Unset PYTHONPATH, set PYTHONNOUSERSITE=1, or remove the other copy."
            findings.append((error if name in CORE else warning)(name, what, fix))
    allowed = {*lock, *map(canonical, also_allowed), *BUILD_TOOLS}
    strangers = sorted(set(found) - allowed)
    owned = _owned_names({name: found[name][0] for name in lock if name in found}) if strangers else {}
    return [*findings, *(_stranger(name, found[name][0], owned) for name in strangers)]


def _other_origin(distribution: metadata.Distribution, lock_hashes: Collection[str]) -> str | None:
    """Return what a direct reference installed it from (PEP 610), or None: from an index, or from the locked file.

    RECORD agrees with itself in such a copy, however it was changed before, and does not cover an editable one at all.
    """
    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    try:
        origin = json.loads(text)
        archive = origin.get("archive_info", {})
        hashes = {archive.get("hash", "").removeprefix("sha256="), archive.get("hashes", {}).get("sha256", "")}
        if hashes & set(lock_hashes):
            return None
        if "vcs_info" in origin:
            return f"a {origin['vcs_info'].get('vcs', 'source')} repository"
        if "dir_info" in origin:
            return "an editable folder" if origin["dir_info"].get("editable") else "a folder"
        return "a file or address"
    except (ValueError, AttributeError, TypeError):
        return "an origin that cannot be read (direct_url.json)"


def _owned_names(locked: Mapping[str, metadata.Distribution]) -> dict[str, str]:
    """Return {path: its distribution} for every file of the locked ones and for the folders of their packages.

    Namespace packages (nvidia, cuda) have no folder of their own: several distributions share them by design.
    """
    owned: dict[str, str] = {}
    for name, distribution in locked.items():
        base = base_folder(distribution)
        for relative, _, _ in read_record(distribution):
            owned[os.path.normpath(os.path.join(base, relative))] = name
            if relative.count("/") == 1 and relative.endswith("/__init__.py"):
                owned[os.path.join(base, relative.partition("/")[0])] = name
    return owned


def _stranger(name: str, distribution: metadata.Distribution, owned: Mapping[str, str]) -> Finding:
    requirements = distribution.requires or []
    needs = {canonical(re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0]) for text in requirements}
    reasons = [INTRUDERS[name]] if name in INTRUDERS else []
    if touched := sorted(needs & _TOUCHED):
        reasons.append(f"builds on {', '.join(touched)}, which it can patch")
    if hooks := sorted({entry.group for entry in distribution.entry_points} & _LOADED_BY_TORCH):
        reasons.append(f"is loaded through the entry points {', '.join(hooks)}")
    base = base_folder(distribution)
    taken: dict[str, str] = {}
    for relative, _, _ in read_record(distribution):
        top = os.path.join(base, relative.partition("/")[0])
        path = os.path.normpath(os.path.join(base, relative))
        if owner := owned.get(path) or owned.get(top):
            taken.setdefault(owner, relative)
    if taken:
        reasons.append("puts " + ", ".join(f"{path} among the files of {owner}" for owner, path in taken.items()))
    where = f"{name}=={distribution.version}"
    if reasons:
        return error(where, f"is not in the lock and {'; it '.join(reasons)}", REMAKE)
    return warning(where, "is not in the lock", "Keep other tools in an environment of their own.")


def changed_files(distribution: metadata.Distribution) -> list[str]:
    """Return the files of a distribution that are gone or differ from RECORD, as "path (how)"; [] when all agree.

    Files above HASHED_UP_TO_BYTES are compared by size. Files without a hash in RECORD (bytecode) are left out.
    """
    base = base_folder(distribution)
    rows = read_record(distribution)
    if not rows:
        return ["RECORD (gone)"]
    changed: list[str] = []
    for relative, recorded, size in rows:
        algorithm, _, digest = recorded.partition("=")
        if algorithm != "sha256":
            continue
        try:
            # Unbuffered and without pathlib: with 20,000 small files this halves the time.
            with open(os.path.join(base, relative), "rb", buffering=0) as file:
                actual = os.fstat(file.fileno()).st_size
                if size and actual != int(size):
                    changed.append(f"{relative} (size)")
                elif actual <= HASHED_UP_TO_BYTES and _urlsafe_sha256(file.readall()) != digest:
                    changed.append(f"{relative} (content)")
        except OSError:
            changed.append(f"{relative} (gone)")
    return changed


def check_files(found: Found, names: Iterable[str]) -> list[Finding]:
    """Return one error per distribution of `names` with changed files, naming the first three; every copy is read."""
    findings = []
    for copy in (copy for name in names for copy in found.get(name, [])):
        if changed := changed_files(copy):
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"differs from what was installed: {', '.join(changed[:3])}{more}"
            where = f"{canonical(copy.metadata['Name'])}=={copy.version}"
            findings.append(error(where, what, f"It was patched in place. {REMAKE}"))
    return findings


def _urlsafe_sha256(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
