"""Ranks: the sums of threads between processes, an end for all when one fails, and who is waited for by name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dflash.compile import GateAborted
from env.errors import EnvError
from pipeline.errors import ConfigError, Interrupted
from pipeline.interrupts import StopRequest
from pipeline.processes import RankExchange
from pipeline.rank import check_build, check_place
from pipeline.ranks import RankLost, Ranks, is_secondary, same_error
from pipeline.runs import Run
from tests.rank_tools import (
    StandIn,
    environ_of,
    exchanged,
    free_port,
    in_ranks,
    joined,
    lost,
    made_up,
    store_server,
    threads_total,
)
from tests.tiny_run import tiny_config

CPU = torch.device("cpu")


# -- the exchange ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "chunk_bytes"), [(1, 1 << 20), (2, 256), (3, 1 << 20)])
def test_ranks_add_up_gradients_in_the_order_of_threads_whatever_is_sent_at_once(world: int, chunk_bytes: int) -> None:
    results = in_ranks(world, exchanged, chunk_bytes)
    for rank, found in enumerate(results):
        for step in range(2):
            expected = threads_total([made_up(10 * step + other) for other in range(world)])
            for gradient, value in zip(found["gradients"][step], expected, strict=True):
                assert torch.equal(torch.from_numpy(gradient), value)  # bit for bit
            sums = [torch.tensor([1e8, 1.0, float(step)]) * (-1) ** other + other for other in range(world)]
            assert found["totals"][step] == torch.stack(sums).sum(0).tolist()
        assert found["agreed"] == [False, True]  # the last rank was asked in the first step; all stop after the second
        assert found["gathered"] == [{"rank": other} for other in range(world)]
        assert found["equal"] == [True, world == 1]  # then the last rank's weights were changed in one place
        assert found["zero after"]
        assert list(found["waited"]) == [f"drafter-{rank}"]


def test_the_made_up_gradients_tell_one_order_from_another() -> None:
    forward, backward = threads_total([made_up(i) for i in range(3)]), threads_total([made_up(2 - i) for i in range(3)])
    assert not all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))


def test_ranks_that_begin_with_different_weights_are_refused_all_of_them() -> None:
    assert in_ranks(2, joined, True) == ["joined"] * 2
    told = in_ranks(2, joined, False)
    assert [line.split(" weights")[0] for line in told] == [
        f"PipelineError: drafter-{rank}: the ranks begin with different" for rank in range(2)
    ]


@pytest.mark.parametrize("when", ["join", "step", "close"])
def test_a_partner_that_left_ends_a_collective_as_somebody_elses_failure(when: str) -> None:
    told, left = in_ranks(2, lost, when)
    assert left == "left"
    assert told.startswith("GateAborted: another rank is gone")


def test_a_gpus_own_error_that_shows_itself_in_a_collective_is_not_taken_for_a_partners() -> None:
    server = store_server()
    exchange = RankExchange(Ranks(environ_of(0, 1, server.port)), StandIn(0, made_up(0)))  # type: ignore[arg-type]
    for error in (torch.AcceleratorError("CUDA error: device-side assert"), torch.OutOfMemoryError("CUDA out of")):
        with pytest.raises(type(error)) as caught, exchange._together():
            raise error
        assert caught.value is error
    with pytest.raises(GateAborted, match=r"another rank is gone, or the way to it \(NCCL error"), exchange._together():
        raise dist.DistBackendError("NCCL error")


# -- before the group --------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks_of() -> Callable[[int], list[Ranks]]:
    """Return a function that makes the Ranks of several processes here, in one; none of them may join a group."""
    server = store_server()

    def make(world: int) -> list[Ranks]:
        made = [Ranks(environ_of(rank, world, server.port)) for rank in range(world)]
        made[0].__dict__["server"] = server  # as long as they live
        return made

    return make


def test_a_rank_that_still_compiles_is_named_by_the_first_that_waits_for_it(
    ranks_of: Callable[[int], list[Ranks]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = ranks_of(3)
    second.state("compiles")
    third.state("waits to compile")
    ended: list[BaseException] = []

    def join() -> None:
        try:
            first.join(CPU, patience=0.3)
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=join, daemon=True)
    waiting.start()
    time.sleep(1.0)
    assert waiting.is_alive()
    third.failed(2, "data: is gone.")
    waiting.join(timeout=10)
    err = capsys.readouterr().err
    here = first.host
    assert f"train: rank 1 on {here} still compiles; rank 2 on {here} still waits to compile; the others have" in err
    assert err.count("still compiles") == 1  # and not again before half a minute is over
    assert [str(error) for error in ended] == [f"rank 2 on {here} ended: data: is gone."]


def test_values_of_rank_0_and_of_all_are_waited_for_and_a_failure_ends_the_wait(
    ranks_of: Callable[[int], list[Ranks]],
) -> None:
    first, second = ranks_of(2)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(second.shared("checkpoint", "not looked at")), daemon=True)
    waiting.start()
    time.sleep(0.3)
    assert got == []
    assert first.shared("checkpoint", "step-000006") == "step-000006"
    waiting.join(timeout=10)
    assert got == ["step-000006"]
    for rank in (second, first):
        rank.put("place", {"rank": rank.rank})
    assert first.all("place") == [{"rank": 0}, {"rank": 1}]
    first.failed(4, "step 3: the loss is nan.")
    second.failed(1, "what came later is not heard")
    with pytest.raises(RankLost, match=r"rank 0 on .* ended: step 3: the loss is nan"):
        second.all("never put")


def test_a_stop_and_a_failure_reach_the_main_thread(
    ranks_of: Callable[[int], list[Ranks]],
) -> None:
    first, second = ranks_of(2)
    with StopRequest() as stop:
        second.watch(stop)
        assert not stop.requested
        first.store.set("stop", "1")
        time.sleep(0.3)
        second.watch(stop)
        assert stop.requested
        first.failed(3, "the disk is full.")
        time.sleep(0.3)
        with pytest.raises(RankLost, match="the disk is full"):
            second.watch(stop)
        first.watch(stop)  # its own failure is not another's


def test_ranks_whose_store_is_gone_end_since_nobody_is_left_to_end_them() -> None:
    server = store_server()
    ranks = Ranks(environ_of(0, 1, server.port))
    with StopRequest() as stop:
        ranks.watch(stop)
        del server
        time.sleep(0.3)
        with pytest.raises(RankLost, match="rank 0: what started the ranks is gone"):
            ranks.watch(stop)


def test_one_that_was_interrupted_ends_the_others_as_interrupted_and_not_as_lost(
    ranks_of: Callable[[int], list[Ranks]],
) -> None:
    """All stop after the same step; the first to end must not make a failure of it for the later ones."""
    first, second = ranks_of(2)
    second.failed(5, "run: stopped after step 4 of 6, saved. Again.")
    with StopRequest() as stop, pytest.raises(Interrupted) as caught:
        first.watch(stop)
    assert str(caught.value) == "run: stopped after step 4 of 6, saved. Again."
    assert not is_secondary(caught.value)
    with pytest.raises(Interrupted):
        first.all("never put")


def test_a_rank_that_its_torchrun_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is rank 0's then, and does not tell."""
    server = store_server()
    left = Ranks(environ_of(0, 1, server.port) | {"TORCHELASTIC_RUN_ID": "7"})
    other = Ranks(environ_of(0, 1, server.port))
    with StopRequest() as stop:
        left.watch(stop)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        time.sleep(0.3)
        other.watch(stop)
        with pytest.raises(RankLost, match="rank 0: its torchrun is gone"):
            left.watch(stop)


# -- a store that rank 0 keeps -----------------------------------------------------------------------------------------


def _kept_by_rank_0() -> tuple[Ranks, Ranks]:
    port = free_port()
    first, second = (Ranks(environ_of(rank, 2, port, hosted=False)) for rank in range(2))
    return first, second


def test_rank_0_keeps_its_store_until_the_others_have_read_it_and_they_end_after_it() -> None:
    first, second = _kept_by_rank_0()
    for rank in (second, first):
        rank.put("place", rank.rank)
    order: list[str] = []

    def end(rank: Ranks, delay: float) -> None:
        time.sleep(delay)
        rank.end(well=True)
        order.append(f"{rank.rank} ended")

    ending = threading.Thread(target=end, args=(first, 0.0))
    ending.start()
    time.sleep(0.5)
    assert ending.is_alive() and order == []
    assert second.all("place") == [0, 1]
    end(second, 0.0)
    ending.join(timeout=5)
    assert sorted(order) == ["0 ended", "1 ended"]

    first, second = _kept_by_rank_0()
    second.failed(4, "step 3: the loss is nan.")
    ending = threading.Thread(target=end, args=(second, 0.0))
    ending.start()
    time.sleep(0.5)
    assert ending.is_alive()  # torchrun would now signal rank 0, which has not written it down
    end(first, 0.0)
    ending.join(timeout=5)
    assert len(order) == 4


def test_nobody_waits_at_an_end_that_none_could_tell() -> None:
    first, second = _kept_by_rank_0()
    begin = time.monotonic()
    second.end(well=False)
    first.end(well=False)
    assert time.monotonic() - begin < 2


def test_a_rank_whose_store_went_with_rank_0_says_so_whatever_it_asks() -> None:
    first, second = _kept_by_rank_0()
    del first
    line = "rank 1: rank 0, which keeps the store, is gone"
    asked: list[Callable[[], Any]] = [
        lambda: second.all("place"),
        lambda: second.put("place", 1),
        lambda: second.state("compiles"),
        lambda: second.shared("checkpoint", None),
        lambda: second.join(CPU),
    ]
    for ask in asked:
        with pytest.raises(RankLost, match=line):
            ask()
    second.failed(1, "nobody is left to tell")
    assert second.reason() is None
    second.end(well=False)


def test_a_rank_that_finds_no_store_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.ranks.STORE_TIMEOUT", timedelta(seconds=1))
    port = free_port()
    with pytest.raises(RankLost, match=rf"rank 1 on .*: no store at localhost:{port} \("):
        Ranks(environ_of(1, 2, port, hosted=False))


def test_a_rank_without_torchruns_variables_says_which_one_is_missing() -> None:
    with pytest.raises(ConfigError, match="'RANK' is not set to what torchrun sets it to"):
        Ranks({})
    with pytest.raises(ConfigError, match="'many'"):
        Ranks(environ_of(0, 1, 1) | {"WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("drafters", "workers", "world", "local_world", "line"),
    [
        (2, "threads", 2, 2, "topology.workers: is threads"),
        (2, "processes", 3, 3, "rank 0: 3 ranks on this host, topology.drafters names 2 devices"),
        (2, "processes", 6, 2, "4 micro-batches do not divide among 6 ranks"),
    ],
)
def test_ranks_that_the_configuration_does_not_speak_of_are_refused(
    drafters: int, workers: str, world: int, local_world: int, line: str
) -> None:
    run = Run(Path("run"), tiny_config(topology={"drafters": ["cpu"] * drafters, "workers": workers}))
    server = store_server()
    ranks = Ranks(environ_of(0, world, server.port) | {"LOCAL_WORLD_SIZE": str(local_world)})
    with pytest.raises(ConfigError) as caught:
        check_place(run, ranks)
    assert line in str(caught.value)


def test_as_many_ranks_as_the_micro_batches_allow_are_taken_whatever_the_number_of_hosts() -> None:
    run = Run(Path("run"), tiny_config(topology={"drafters": ["cpu"] * 2, "workers": "processes"}))
    server = store_server()
    for world in (2, 4):
        check_place(run, Ranks(environ_of(0, world, server.port) | {"LOCAL_WORLD_SIZE": "2"}))


def test_ranks_of_another_source_or_torch_than_rank_0_are_refused_with_all_that_differs(
    ranks_of: Callable[[int], list[Ranks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = ranks_of(3)
    check_build(first, "a" * 64)
    check_build(second, "a" * 64)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    with pytest.raises(EnvError) as caught:
        check_build(third, "b" * 64)
    start = f"rank 2 on {third.host}: has source {'b' * 12} and not {'a' * 12}, torch 2.99.0 and not "
    assert str(caught.value).startswith(start)
    assert ", cuda 14.0 and not " in str(caught.value)


def test_a_ranks_error_ends_the_command_with_its_code_and_one_of_a_partner_with_1() -> None:
    for code in (1, 2, 3, 4, 5):
        error = same_error(code, "run: stopped, saved. Again.")
        assert (error.exit_code, str(error)) == (code, "run: stopped, saved. Again.")
        assert is_secondary(error) == (code == 1)
    assert isinstance(same_error(5, ""), Interrupted)
    assert is_secondary(RankLost("")) and not is_secondary(same_error(4, ""))
    assert RankLost.exit_code == 1  # of the class: another error's code must not stay
