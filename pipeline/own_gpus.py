"""Which GPUs each process of a training sees: its own, counted from 0.

torch's key of a compiled graph has the number of its GPU. Ranks that see all of a host's would therefore each build the
same code for another number, one after the other; each with a GPU 0 of its own, one builds (as a rule the cache stage)
and the others load. A rank cannot touch another's GPU by accident either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field

import torch

from pipeline.config import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Places:
    """The drafter's and the target's device of one process, as the configuration names them; None: no target here."""

    drafter: str
    target: str | None

    @property
    def seen(self) -> dict[str, str]:
        """Return what this process calls its devices when it sees no other GPUs, by their names in the config."""
        gpus = dict.fromkeys(name for name in (self.drafter, self.target) if name and name != "cpu")
        return {"cpu": "cpu"} | {name: f"cuda:{number}" for number, name in enumerate(gpus)}


@dataclass(frozen=True)
class Names:
    """What this process calls devices, `seen` by their names in the config where that differs, and what people do."""

    seen: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    """Of a rank, as `rank` is; threads are all on one."""
    rank: int = 0

    def device(self, name: str) -> torch.device:
        """Return the device that the config calls so."""
        return torch.device(self.seen.get(name, name))

    def name(self, device: torch.device) -> str:
        """Return what the config calls a device, and on which host."""
        called = {own: name for name, own in self.seen.items()}.get(str(device), str(device))
        return f"{called} of {self.host}" if self.host else called

    def of_process(self, device: torch.device) -> str:
        """Return a name for this process's part of a device: two ranks may share a target's GPU."""
        return f"rank {self.rank}: {self.name(device)}" if self.host else self.name(device)


def places_of(config: RunConfig, local: int) -> Places:
    """Return where a host's process `local` has its drafter and, with features online, its target."""
    topology = config.topology
    online = config.data.features == "online"
    return Places(topology.drafters[local], topology.targets[local % len(topology.targets)] if online else None)


def see_only(
    places: Places, say: Callable[[str], None], environ: MutableMapping[str, str] = os.environ
) -> Mapping[str, str]:
    """Hide all other GPUs from this process, and return what its own are called now, by their names in the config.

    That is the process's first call of CUDA. Where the driver was asked before, by whatever was imported, nothing is
    hidden any more and the names stay. What tells is how many GPUs it gives; so where they would be as many as now,
    only in another order, the names stay too. `say` gets a line where that costs a compile.
    """
    names = {name: name for name in places.seen}
    gpus = [name for name in names if name != "cpu"]
    if not gpus or (names == places.seen and torch.cuda.device_count() == len(gpus)):
        return names
    as_they_are = f"train: {' and '.join(gpus)} keep their numbers, so code that others compiled is compiled again"
    if torch.cuda.device_count() == len(gpus):
        say(as_they_are)
        return names
    before = environ.get(VISIBLE)
    given = [entry.strip() for entry in (before or "").split(",") if entry.strip()]
    numbers = [int(name.partition(":")[2]) for name in gpus]
    environ[VISIBLE] = ",".join(given[number] if given else str(number) for number in numbers)
    if _count() == len(gpus):
        return places.seen
    if before is None:
        del environ[VISIBLE]
    else:
        environ[VISIBLE] = before
    say(as_they_are)
    return names


def _count() -> int:
    """Return how many GPUs the driver gives this process. torch.cuda.device_count asks NVML, which reads the variable
    each time; the driver does once."""
    torch.cuda.init()
    return torch._C._cuda_getDeviceCount()


def compiled_places(config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the devices for which the cache stage compiles drafter and target: all that a host's training will call
    them, but no GPU that the configuration does not name."""
    topology = config.topology
    if config.topology.workers == "threads":
        return _once(topology.drafters), _once(topology.targets)
    named = {*topology.drafters, *topology.targets}
    every = [places_of(config, local) for local in range(len(topology.drafters))]
    drafters = _once(places.seen[places.drafter] for places in every)
    targets = _once(places.seen[places.target] for places in every if places.target)
    return [name for name in drafters if name in named], [name for name in targets if name in named]


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
