"""Container engines of the host. Pure: looks at PATH and starts nothing."""

from __future__ import annotations

import shutil

ENGINES = ("docker", "podman", "buildah")


def find_engine(path: str | None = None) -> str | None:
    """Return the first of ENGINES with a program on `path` (default: PATH), or None.

    A client without a running daemon counts: whether it works is known only when it is used.
    """
    return next((name for name in ENGINES if shutil.which(name, path=path)), None)
