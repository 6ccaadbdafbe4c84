"""The GPUs that a plan can be made for, by the three rates that decide: matrix products, copies, the way to others."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import ConfigError

MATMUL_SHARE = 702.9 / 989
"""What an H200 reached of its data sheet in an 8192-cubed bf16 product (invoke bench, 2026-11-30)."""
COPY_SHARE = 4210.7 / 4800
"""The same of a copy's bytes, read and written."""
LINK_SHARE = 0.7
"""Assumed, not measured: what copies between GPUs reach of the data sheet, one way."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU; rates a second."""

    name: str
    matmul: float
    """Operations of large bf16 products."""
    copy: float
    """Bytes of a copy, read and written."""
    memory: float
    """Bytes that a process can have."""
    link: float
    """Bytes to other GPUs of the host, one way."""
    basis: str
    """Where the figures come from."""


def _data_sheet(name: str, *, tflops: float, gb: float, gib: float, link_gb: float) -> Gpu:
    return Gpu(
        name=name,
        matmul=tflops * 1e12 * MATMUL_SHARE,
        copy=gb * 1e9 * COPY_SHARE,
        memory=gib * 2**30,
        link=link_gb * 1e9 * LINK_SHARE,
        basis=f"data sheet ({tflops:g} TFLOP/s, {gb:g} GB/s) x what an H200 reached of its own: {MATMUL_SHARE:.0%} and "
        f"{COPY_SHARE:.0%}; link {link_gb:g} GB/s x {LINK_SHARE:.0%}, assumed",
    )


GPUS = {
    "h200": Gpu(
        name="h200",
        matmul=702.9e12,
        copy=4210.7e9,
        memory=139 * 2**30,
        link=450e9 * LINK_SHARE,
        basis=f"measured by invoke bench on 2026-11-30; link: data sheet 450 GB/s x {LINK_SHARE:.0%}, assumed",
    ),
    "h100": _data_sheet("h100", tflops=989, gb=3350, gib=79, link_gb=450),
    "a100": _data_sheet("a100", tflops=312, gb=2039, gib=79, link_gb=300),
    "b200": _data_sheet("b200", tflops=2250, gb=8000, gib=178, link_gb=900),
}
"""SXM modules with NVLink; data sheets' dense bf16 rates."""

_UNITS = {"matmul": 1e12, "copy": 1e9, "memory": 2**30, "link": 1e9}


def gpu_of(text: str) -> Gpu:
    """Return the GPU that `text` names, with rates of its own: "h200", "h200,link=50", "mine,matmul=300,copy=...".

    Rates are matmul in TFLOP/s, copy and link in GB/s, memory in GiB; a name that GPUS lacks needs all four.
    Raises ConfigError naming the part that is wrong.
    """
    name, *parts = text.split(",")
    given = {}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            given[key] = float(value) * _UNITS[key]
        except (KeyError, ValueError):
            fix = f"Write one of {', '.join(_UNITS)} and a number, e.g. link=50."
            raise ConfigError(f"{part!r} is no rate", where="--gpu", fix=fix) from None
        if not 0 < given[key] < float("inf"):
            raise ConfigError(f"{part!r} is not above 0", where="--gpu", fix="Give the rate that is reached.")
    if known := GPUS.get(name):
        rates = {key: given.get(key, getattr(known, key)) for key in _UNITS}
        return Gpu(name=name, **rates, basis=f"{known.basis}; given: {', '.join(parts)}") if given else known
    if missing := [key for key in _UNITS if key not in given]:
        fix = f"Choose one of {', '.join(GPUS)}, or add {', '.join(f'{key}=...' for key in missing)}."
        raise ConfigError(f"{name!r} is not known", where="--gpu", fix=fix)
    return Gpu(name=name, **given, basis="given")
