"""The processes of one training (topology.workers: processes): who is where, and what they tell each other before, and
beside, the process group.

All of it goes through torch's key-value store: of `invoke train` (pipeline/launch.py), of torchrun's agent, or of rank
0. Nothing here waits inside a collective, so a rank that still compiles, or died, is named by the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dflash.compile import GateAborted
from pipeline.errors import ConfigError, DataError, Interrupted, PipelineError, VerificationFailed
from pipeline.interrupts import StopRequest

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 10.0
REMIND_SECONDS = 30.0
STORE_TIMEOUT = timedelta(minutes=5)
GROUP_TIMEOUT = timedelta(minutes=30)
"""Of one collective. The ranks wait in one for rank 0's evaluations and checkpoints; who died is found out sooner."""
STOP, FAILED, MANIFEST = "stop", "failed", "manifest"
WARM = "is warm"


class RankLost(PipelineError):
    """Another process of the training ended; what ended it is that one's to tell."""

    exit_code = 1


def namespace(store: dist.Store, attempt: str) -> dist.Store:
    """Return what the ranks see of a store: torchrun keeps its own across restarts, whose keys must not meet."""
    return dist.PrefixStore(f"dflash/{attempt}", store)


class Ranks:
    """This process among `world` of them. Variables are torchrun's: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ..."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        given = os.environ if environ is None else environ
        try:
            self.rank, self.local, self.world, self.local_world, port = (
                int(given[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
            )
            address = given["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{error} is not set to what torchrun sets it to", where="rank", fix="Start it by torchrun."
            ) from None
        self.host = socket.gethostname()
        # An agent's store is there before its ranks, and outlives them.
        hosting = self.rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(address, port, None, hosting, STORE_TIMEOUT, wait_for_workers=False)
        self.store = namespace(store, given.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # The main thread has its own: a wait keeps others off a connection. torch 2.11.0 does not declare clone.
        self._watching: dist.Store = self.store.clone()  # type: ignore[attr-defined]
        self._watched_at = 0.0
        self.state("loads")

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes the run's folder."""
        return self.rank == 0

    def say(self, line: str) -> None:
        """Print a line to stderr at once; of rank 0 as a training with threads prints it."""
        print(line if self.leads else f"rank {self.rank}: {line}", file=sys.stderr, flush=True)

    # -- telling -----------------------------------------------------------------------------------------------------

    def state(self, what: str) -> None:
        """Say what this rank does; the others read it when they wait for it."""
        self.store.set(f"state/{self.rank}", json.dumps([what, self.host]))

    def put(self, key: str, value: Any) -> None:
        """Let the others see a value of this rank's, one that JSON can hold."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def all(self, key: str) -> list[Any]:
        """Return every rank's value of `key`, in their order; waits for those that are not there yet."""
        return [self._get(f"{key}/{rank}") for rank in range(self.world)]

    def shared(self, key: str, value: Any) -> Any:
        """Return rank 0's `value`; the others wait for it, and theirs is not looked at."""
        if self.leads:
            self.store.set(key, json.dumps(value))
            return value
        return self._get(key)

    def _get(self, key: str) -> Any:
        while not self.store.check([key]):
            self._refuse_if_failed(self.store)
            time.sleep(POLL_SECONDS)
        return json.loads(self.store.get(key))

    # -- failing and stopping ----------------------------------------------------------------------------------------

    def failed(self, code: int, text: str) -> None:
        """Tell the others, and who started us, why this rank ends. The first one to say so is the one that is heard."""
        told = {"rank": self.rank, "host": self.host, "code": code, "text": text}
        self._watching.compare_set(FAILED, "", json.dumps(told))

    def watch(self, stop: StopRequest) -> None:
        """Look for what ends this rank from outside; for the main thread to call again and again.

        Raises RankLost when another rank failed, or the store is gone and with it who started us.
        """
        if time.monotonic() - self._watched_at < POLL_SECONDS:
            return
        self._watched_at = time.monotonic()
        try:
            self._refuse_if_failed(self._watching)
            if not stop.requested and self._watching.check([STOP]):
                stop.request()
        except dist.DistError:
            raise RankLost("what started the ranks is gone", where=f"rank {self.rank}") from None

    def _refuse_if_failed(self, store: dist.Store) -> None:
        if not store.check([FAILED]):
            return
        found = json.loads(store.get(FAILED))
        if found["rank"] != self.rank:
            raise RankLost(f"rank {found['rank']} on {found['host']} ended: {found['text']}")

    # -- the group ---------------------------------------------------------------------------------------------------

    def join(self, device: torch.device, *, patience: float = PATIENCE_SECONDS) -> None:
        """Wait until every rank is warm, then make the process group.

        A rank that compiles while others wait for it in a collective is what they time out on, saying nothing of why.
        So they wait here instead, and after `patience` seconds the first warm one says for whom.
        """
        self.state(WARM)
        begin, told = time.monotonic(), 0.0
        while busy := self._busy():
            waited = time.monotonic() - begin
            first = next(rank for rank in range(self.world) if rank not in busy)
            if self.rank == first and waited >= patience and (not told or waited - told >= REMIND_SECONDS):
                told = waited
                who = "; ".join(f"rank {rank} {what}" for rank, what in busy.items())
                self.say(f"train: {who}; the others have waited {waited:.0f} s")
            time.sleep(POLL_SECONDS)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=GROUP_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def _busy(self) -> dict[int, str]:
        """Return what the ranks that are not warm say that they do."""
        self._refuse_if_failed(self.store)
        found = {}
        for rank in range(self.world):
            key = f"state/{rank}"
            what, host = json.loads(self.store.get(key)) if self.store.check([key]) else ("has not started", "")
            if what != WARM:
                found[rank] = f"on {host} still {what}" if host else what
        return found

    @staticmethod
    def leave() -> None:
        """Give the process group back, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def is_secondary(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone."""
    return isinstance(error, GateAborted | RankLost)


def same_error(code: int, text: str) -> PipelineError:
    """Return an error that says what a rank's did, and ends the command with its code."""
    kinds: dict[int, Callable[[str], PipelineError]] = {2: DataError, 4: VerificationFailed, 5: Interrupted}
    if code in kinds:
        return kinds[code](text)
    error = RankLost(text)
    error.exit_code = code
    return error
