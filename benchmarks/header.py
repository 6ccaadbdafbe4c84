"""What every record of a benchmark says first: when, of which source, by which command, on what; where it may go."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash.errors import DFlashError
from env.fingerprint import fingerprint

ROOT = Path(__file__).resolve().parent.parent


def header(command: str, device: torch.device) -> dict[str, Any]:
    """Return date, git, command, torch and device (its name) of a measurement made now."""
    about = fingerprint(ROOT)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": about["git"],
        "command": command.strip(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else about["cpu"]["model"],
    }


def check_record(path: Path | None) -> None:
    """Raise DFlashError before anything is measured when the record could not be written to `path`."""
    if path and not path.absolute().parent.is_dir():
        raise DFlashError(f"{path} is in no folder that exists", where="--json", fix="Make it first.")
