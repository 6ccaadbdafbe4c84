"""Ranks for tests: processes that know each other by a store in this one, forked from a server that has imported torch.

What runs in them is in this module: a child finds it by name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.aot_autograd
import torch._inductor.compile_fx  # the compile's own imports, once for all children
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import train
from pipeline.batches import Collator, MicroBatch
from pipeline.errors import Interrupted
from pipeline.metrics import Progress
from pipeline.optim import MasterAdamW
from pipeline.processes import RankExchange
from pipeline.ranks import AGENT_STORE, WARM, Ranks
from pipeline.sharded import Shard, ShardedExchange
from tests.tiny_run import TinyRun, tiny_config

DEADLINE_SECONDS = 200


def environ_of(
    rank: int, world: int, port: int, *, per_host: int | None = None, hosted: bool = True, attempt: int = 0
) -> dict[str, str]:
    """Return torchrun's variables of a rank, of which `per_host` are on a host; rank 0 keeps the store if it is not
    hosted."""
    per_host = per_host or world
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_host),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        AGENT_STORE: str(hosted),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def store_server() -> dist.TCPStore:
    """Return a store for the ranks of a test; it is gone with the object."""
    return dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)


def in_ranks(world: int, function: Callable[..., Any], *arguments: Any, per_host: int | None = None) -> list[Any]:
    """Return what `function(ranks, *arguments)` returned on each rank, or the text of what it raised. None may hang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_tools"])
    server = store_server()
    ends = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        how = (environ_of(rank, world, server.port, per_host=per_host), theirs, function, arguments)
        child = context.Process(target=_child, args=how, daemon=True)
        child.start()
        theirs.close()
        ends.append((child, ours))
    results = []
    try:
        for _, ours in ends:
            assert ours.poll(DEADLINE_SECONDS), "a rank hangs"
            with contextlib.suppress(EOFError):
                results.append(ours.recv())
    finally:
        for child, _ in ends:
            child.kill()
            child.join()
    assert len(results) == world, "a rank died"
    return results


def _child(environ: Mapping[str, str], end: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        end.send(function(Ranks(environ), *arguments))
    except BaseException as error:
        traceback.print_exc()
        end.send(f"{type(error).__name__}: {error}")
    os._exit(0)


# -- what runs in them -------------------------------------------------------------------------------------------------


class StandIn:
    """What an exchange uses of a replica: name, device, and the optimizer's weights and gradients."""

    def __init__(self, number: int, weights: list[Tensor]) -> None:
        self.name, self.device, self.optimizer = f"drafter-{number}", torch.device("cpu"), self
        self.masters = self.working = [nn.Parameter(weight.clone()) for weight in weights]
        self.gradients: list[Tensor] = []

    def use_gradients(self, gradients: list[Tensor]) -> None:
        self.gradients = gradients


def made_up(number: int) -> list[Tensor]:
    """Return a worker's numbers, of such different size that adding them in another order gives another float."""
    generator = torch.Generator().manual_seed(number)
    shapes = [(7, 5), (3,), (64, 9), (1,), (33, 2)]
    return [
        torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator)
        for shape in shapes
    ]


def exchanged(ranks: Ranks, chunk_bytes: int) -> dict[str, Any]:
    """Return what a rank sees of every collective of RankExchange, in two steps."""
    from pipeline import processes

    processes.CHUNK_BYTES = chunk_bytes
    replica: Any = StandIn(ranks.rank, made_up(99))
    exchange = RankExchange(ranks, replica)
    exchange.join()
    found: dict[str, Any] = {"gradients": [], "totals": [], "agreed": []}
    for step in range(2):
        for gradient, given in zip(replica.gradients, made_up(10 * step + ranks.rank), strict=True):
            gradient.copy_(given)
        sums = torch.tensor([1e8, 1.0, float(step)]) * (-1) ** ranks.rank + ranks.rank
        found["totals"].append(exchange.total(0, sums).tolist())
        found["gradients"].append([gradient.clone().numpy() for gradient in replica.gradients])
        found["agreed"].append(exchange.agreed(step == 0 and ranks.rank == ranks.world - 1))
    found["gathered"] = exchange.gathered({"rank": ranks.rank})
    found["equal"] = [exchange.equal()]
    found["zero after"] = not any(gradient.any() for gradient in replica.gradients)
    if ranks.rank == ranks.world - 1:
        replica.masters[2].data[5, 5] += 1e-3
    found["equal"].append(exchange.equal())
    found["waited"] = exchange.seconds_waited()
    exchange.settle()
    exchange.close()
    return found


class Weights(nn.Module):
    """Parameters of the shapes of `made_up`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weights = nn.ParameterList([nn.Parameter(weight.to(dtype)) for weight in made_up(99)])


def _sendable(tensor: Tensor) -> Any:
    """A tensor itself would be sent as a file of this process, which ends."""
    return tensor.float().numpy().copy()


def sharded(ranks: Ranks, dtype: torch.dtype, steps: int, chunk_bytes: int) -> dict[str, Any]:
    """Return what a rank sees of ShardedExchange in some steps of MasterAdamW, with made-up gradients."""
    from pipeline import processes

    processes.CHUNK_BYTES = chunk_bytes
    model, shard = Weights(dtype), Shard(ranks.rank, ranks.world)
    optimizer = MasterAdamW(model, tiny_config().train, None, shard.keeps([p.numel() for p in model.parameters()]))
    replica: Any = SimpleNamespace(name=f"drafter-{ranks.rank}", device=torch.device("cpu"), optimizer=optimizer)
    exchange = ShardedExchange(ranks, replica, shard)
    exchange.join()
    found: dict[str, Any] = {"names": optimizer.names, "norms": [], "kept": list(optimizer.tensors()["weights"])}
    versions = [p._version for p in optimizer.working]
    for step in range(steps):
        for gradient, given in zip(optimizer.gradients, made_up(10 * step + ranks.rank), strict=True):
            gradient.copy_(given)
        total = exchange.total(0, torch.tensor([1.0, 3.0 / ranks.world]))
        found["summed"] = [_sendable(gradient) for gradient in optimizer.gradients]
        found["norms"].append(float(optimizer.step(1e-2, total[1].round())))
    found["seen as changed"] = all(p._version > old for p, old in zip(optimizer.working, versions, strict=True))
    found["working"] = [_sendable(p.detach()) for p in model.parameters()]
    found["saved"] = {stem: {n: _sendable(t) for n, t in named.items()} for stem, named in exchange.tensors().items()}
    found["equal"] = [exchange.equal()]
    if ranks.rank == ranks.world - 1:
        model.weights[2].data[5, 5] = -1 - model.weights[2].data[5, 5]
    found["equal"].append(exchange.equal())
    exchange.settle()
    exchange.close()
    return found


def joined(ranks: Ranks, alike: bool) -> str:
    """Return what a rank is told when it joins the others, whose weights are its own or not."""
    exchange = RankExchange(ranks, StandIn(ranks.rank, made_up(99 if alike else ranks.rank)))  # type: ignore[arg-type]
    exchange.join()
    exchange.settle()
    exchange.close()
    return "joined"


def lost(ranks: Ranks, when: str) -> str:
    """Return what rank 0 is told when its partner leaves without a word: before it joins, in a step, or at the end."""
    from pipeline import ranks as ranks_module

    ranks_module.GROUP_TIMEOUT = timedelta(seconds=3)
    exchange = RankExchange(ranks, StandIn(ranks.rank, made_up(0)))  # type: ignore[arg-type]
    if ranks.rank == 1 and when == "join":
        ranks.state(WARM)
        return "left"
    try:
        exchange.join()
        exchange.settle()
        if ranks.rank == 1:
            return "left"
        if when == "close":
            exchange.agreed(False)
            exchange.close()
        while True:
            exchange.total(0, torch.zeros(3))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def trained(ranks: Ranks, bench: TinyRun, overrides: tuple[str, ...], stop_after: int | None) -> dict[str, Any]:
    """Return the manifest of a training as this rank, and the samples of each step; it may be asked to stop."""
    for name, value in bench.environment.items():
        os.environ[name] = value
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(bench.folder / "inductor")  # else one in /tmp, and the lock beside it
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Noting(Collator):
        def collate(self, epoch: int, bucket: int, indices: tuple[int, ...]) -> MicroBatch:
            seen.append((epoch, indices))
            return super().collate(epoch, bucket, indices)

    train.Collator = Noting  # type: ignore[misc]
    original = train.Trainer._after_step

    def asked(self: train.Trainer, step: int, *rest: Any) -> None:
        self._stop.requested = step == stop_after and ranks.rank == ranks.world - 1
        original(self, step, *rest)

    bars: list[bool] = []

    class Counted(Progress):
        def __enter__(self) -> Progress:
            bars.append(True)
            return super().__enter__()

    train.Trainer._after_step = asked  # type: ignore[method-assign, assignment]
    train.Progress = Counted  # type: ignore[misc]
    try:
        manifest = train.train_as(bench.run(*overrides), ranks)
    except Interrupted as error:
        return {"interrupted": str(error), "seen": seen}
    return {"manifest": manifest, "seen": seen, "bars": len(bars)}


def threads_total(gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the workers' gradients added up in the threads' order (test_topology.py holds them to it)."""
    added = [gradient.clone() for gradient in gradients[0]]
    for other in gradients[1:]:
        for sum_, gradient in zip(added, other, strict=True):
            sum_ += gradient
    return added
