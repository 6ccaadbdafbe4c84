"""Running the project's commands in its image: what is mounted, who it runs as, and whether it gets a network.

Runs and cache are the host's, so a run begun in the image goes on in the locked environment, and the other way round.
The commands themselves decide what they need: the container is asked first, without a network.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from env.caches import CacheDirs
from env.engines import Engine
from env.errors import EnvError
from env.image import Mount, in_image, run_argv

CHOOSES_GPUS = ("CUDA_VISIBLE_DEVICES",)
"""Always passed, also when it is empty, which means none."""
CA_IN_IMAGE = "/etc/ssl/dflash-ca.crt"
PASSED = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    *("https_proxy", "http_proxy", "no_proxy", "HF_TOKEN", "HF_ENDPOINT"),
)
"""Variables that say how to reach an index or a hub; passed only with a network."""


def has_gpus(dev: Path = Path("/dev")) -> bool:
    """Return whether the host has an NVIDIA GPU that a container could be given."""
    return any(dev.glob("nvidia[0-9]*"))


def wants_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> bool:
    """Return whether the container gets the host's GPUs: it has some, and CUDA_VISIBLE_DEVICES does not hide all."""
    return has_gpus(dev) and environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1", "none", "void", "NoDevFiles")


def base_mounts(root: Path, caches: CacheDirs, named: Sequence[str], home: Path) -> list[Mount]:
    """Return the two written places and, read-only, the files of the host that the command names.

    named   paths as a person wrote them, in the command or in the configuration; what is not there is left out, and
            the command itself says so
    """
    mounts = [Mount(source=caches.root, target="/cache", writable=True)]
    mounts.append(Mount(source=caches.runs, target="/runs", writable=True))
    seen = set()
    for path in named:
        here, there = in_image(path, root, home)
        if os.path.exists(here) and there not in seen:
            seen.add(there)
            mounts.append(Mount(source=here.resolve(), target=there))
    return mounts


def container_argv(
    engine: Engine,
    image: str,
    command: Sequence[str],
    *,
    root: Path,
    caches: CacheDirs,
    named: Sequence[str] = (),
    network: bool = False,
    environ: Mapping[str, str] | None = None,
    terminal: bool = False,
    keyboard: bool = False,
    gpus: bool | None = None,
    entrypoint: str = "",
    more: Sequence[Mount] = (),
) -> list[str]:
    """Return the command that runs `command` in the image as this user, on this host's GPUs, cache and runs."""
    variables = os.environ if environ is None else environ
    home = Path(variables.get("HOME") or "/")
    mounts = [*base_mounts(root, caches, named, home), *more]
    passed = [name for name in CHOOSES_GPUS if name in variables]
    settings: dict[str, str] = {}
    if network:
        passed += [name for name in PASSED if variables.get(name)]
        bundle = variables.get("SSL_CERT_FILE")
        if bundle and Path(bundle).is_file():
            mounts.append(Mount(source=Path(bundle).resolve(), target=CA_IN_IMAGE))
            settings = {"SSL_CERT_FILE": CA_IN_IMAGE, "REQUESTS_CA_BUNDLE": CA_IN_IMAGE}
    return run_argv(
        engine,
        image,
        command,
        mounts=mounts,
        user=f"{os.getuid()}:{os.getgid()}",
        network=network,
        gpus=wants_gpus(variables) if gpus is None else gpus,
        pass_variables=passed,
        set_variables=settings,
        terminal=terminal,
        keyboard=keyboard,
        entrypoint=entrypoint,
    )


def make_places(caches: CacheDirs) -> None:
    """Make the two mounted folders; an engine would make them as root. Raises EnvError."""
    for place, variable in ((caches.root, "DFLASH_CACHE"), (caches.runs, "DFLASH_RUNS")):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = f"Set {variable} to a folder that is writable."
            raise EnvError(f"cannot be created ({error.strerror})", where=str(place), fix=fix) from None


def needs(argv: Sequence[str]) -> dict[str, Any] | int:
    """Run `argv` (a container with `needs --config ...`) and return what it says: {"files": [...], "fetch": [...]}.

    An exit code when it ended with an error, e.g. 2 for a bad configuration; what it printed is repeated.
    """
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return checked_code(done.returncode, argv[0])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def checked_code(code: int, engine: str) -> int:
    """Return a container's exit code. Raises EnvError for 125: the engine itself failed, and nothing of ours ran."""
    if code == 125:
        fix = "For GPUs install the NVIDIA container toolkit (podman: nvidia-ctk cdi generate), or use --in venv."
        raise EnvError("could not start the container (its reason is above)", where=engine, fix=fix)
    return code
