"""The processes of one training (topology.workers: processes): who is where, and what they tell each other before, and
beside, the process group.

All of it goes through torch's key-value store: of `invoke train` (pipeline/launch.py), or of rank 0, which makes a new
one for each attempt. Nothing here waits inside a collective, so a rank that still compiles, or died, is named by the
others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
ENDING_SECONDS = 10.0
"""For rank 0 to book an end before the others go, and for them to read its store before it goes."""
STORE_TIMEOUT = timedelta(minutes=5)
GROUP_TIMEOUT = timedelta(minutes=30)
"""Of one collective. The ranks wait in one for rank 0's evaluations and checkpoints; who died is found out sooner."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
STOP, FAILED, LOST, MANIFEST = "stop", "failed", "lost", "manifest"
WARM = "is warm"
REASONS = (2, 3, 4, 5)
"""Exit codes of ends that somebody meant or has to mend: another attempt would end so again."""


class RankLost(PipelineError):
    """Another process of the training ended; what ended it is that one's to tell."""

    exit_code = 1


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
        outlives = given.get(AGENT_STORE) == "True"  # is there before the ranks, and after them
        self._keeper = "what started the ranks" if outlives else "rank 0, which keeps the store,"
        self._hosting = self.rank == 0 and not outlives
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in given else None  # torchrun, which leaves ranks if killed
        try:
            self.store = dist.TCPStore(address, port, None, self._hosting, STORE_TIMEOUT, wait_for_workers=False)
        except dist.DistError as error:
            what = f"no store at {address}:{port} ({' '.join(str(error).split())[:160]})"
            raise RankLost(what, where=f"rank {self.rank} on {self.host}") from None
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
        with self._asking():
            self.store.set(f"state/{self.rank}", json.dumps([what, self.host]))

    def put(self, key: str, value: Any) -> None:
        """Let the others see a value of this rank's, one that JSON can hold."""
        with self._asking():
            self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def all(self, key: str) -> list[Any]:
        """Return every rank's value of `key`, in their order; waits for those that are not there yet."""
        return [self._get(f"{key}/{rank}") for rank in range(self.world)]

    def shared(self, key: str, value: Any) -> Any:
        """Return rank 0's `value`; the others wait for it, and theirs is not looked at."""
        if self.leads:
            with self._asking():
                self.store.set(key, json.dumps(value))
            return value
        return self._get(key)

    def _get(self, key: str) -> Any:
        with self._asking():
            while not self.store.check([key]):
                self._refuse_if_failed(self.store)
                time.sleep(POLL_SECONDS)
            return json.loads(self.store.get(key))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError:
            raise RankLost(f"{self._keeper} is gone", where=f"rank {self.rank}") from None

    # -- failing and stopping ----------------------------------------------------------------------------------------

    def failed(self, code: int, text: str) -> None:
        """Tell the others, and who started us, why this rank ends. The first one to say so is the one that is heard."""
        self._say_end(FAILED, code, text)

    def lost(self, text: str) -> None:
        """Tell who started us what a collective, or the store, said when another rank seems to be gone: if none tells
        more, that is all there is."""
        self._say_end(LOST, 1, text)

    def _say_end(self, key: str, code: int, text: str) -> None:
        told = {"rank": self.rank, "host": self.host, "code": code, "text": text}
        with suppress(dist.DistError):  # nobody is left to tell
            self._watching.compare_set(key, "", json.dumps(told))

    def reason(self) -> dict[str, Any] | None:
        """Return what the first rank that failed told: "rank", "host", "code" and "text". None if none did."""
        try:
            return said(self._watching, FAILED)
        except dist.DistError:
            return None

    def end(self, well: bool) -> None:
        """Let rank 0 be done before the others end, and let them read its store before it goes.

        torchrun signals a host's other ranks as soon as one ended, in the middle of what rank 0 writes; and a rank that
        finds no store cannot tell a finished training from a lost one. After an end that none could tell, nobody waits.
        """
        waits_for = range(self.world) if self._hosting else (0,)
        with suppress(dist.DistError):
            self._watching.set(f"ended/{self.rank}", "1")
            deadline = time.monotonic() + (ENDING_SECONDS if well or self.reason() else 0.0)
            while not self._watching.check([f"ended/{rank}" for rank in waits_for]) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 4)
            if self._hosting:
                time.sleep(POLL_SECONDS)  # they look once more

    def watch(self, stop: StopRequest) -> None:
        """Look for what ends this rank from outside; for the main thread to call again and again.

        Raises RankLost when another rank failed, or who started us is gone, or the store; Interrupted when another rank
        was.
        """
        if time.monotonic() - self._watched_at < POLL_SECONDS:
            return
        self._watched_at = time.monotonic()
        if self._agent not in (None, os.getppid()):
            raise RankLost("its torchrun is gone", where=f"rank {self.rank}")
        with self._asking():
            self._refuse_if_failed(self._watching)
            if not stop.requested and self._watching.check([STOP]):
                stop.request()

    def _refuse_if_failed(self, store: dist.Store) -> None:
        found = said(store, FAILED)
        if found is None or found["rank"] == self.rank:
            return
        if found["code"] == Interrupted.exit_code:  # all stop together, and one is the first to end
            raise same_error(found["code"], found["text"])
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
        found = {}
        with self._asking():
            self._refuse_if_failed(self.store)
            for rank in range(self.world):
                what, host = said(self.store, f"state/{rank}") or ("has not started", "")
                if what != WARM:
                    found[rank] = f"on {host} still {what}" if host else what
        return found

    @staticmethod
    def leave() -> None:
        """Give the process group back, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def said(store: dist.Store, key: str) -> Any:
    """Return what is under a key, None if nothing is. Raises DistError when the store is gone."""
    return json.loads(store.get(key)) if store.check([key]) else None


def is_secondary(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone."""
    return isinstance(error, GateAborted | RankLost)


def same_error(code: int, text: str) -> PipelineError:
    """Return an error that says what a rank's did, and ends the command with its code."""
    kinds: dict[int, Callable[[str], PipelineError]] = {2: DataError, 4: VerificationFailed, 5: Interrupted}
    if code in kinds:
        return kinds[code](text)
    error = RankLost(text) if code == RankLost.exit_code else PipelineError(text)
    error.exit_code = code
    return error
