"""What each project computes in a sliding layer whose config.json does not say (anatomy 1.6).

Six code bases read the same silent file in different ways, and the wrong one costs acceptance without an error
(vllm#40898). So a file's own words win, and a reading chosen by name fills in the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash.errors import DFlashError


@dataclass(frozen=True)
class Reading:
    """is_causal and window_reading of DrafterConfig, for a file with sliding layers that leaves them open."""

    is_causal: bool | None
    window: str


READINGS = {
    "zlab": Reading(None, "slot"),
    "specforge": Reading(None, "slot"),
    "speculators": Reading(None, "anchor"),
    "model-optimizer": Reading(False, "slot"),
    "automodel": Reading(False, "slot"),
}


def find_reading(name: str) -> Reading:
    """Return a reading by name. Raises DFlashError listing the names."""
    if name not in READINGS:
        raise DFlashError(f"{name!r} is no reading", where="--reading", fix=f"One of {', '.join(READINGS)}.")
    return READINGS[name]
