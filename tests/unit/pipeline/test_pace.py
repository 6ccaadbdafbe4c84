"""Training's own time, and what sessions add up to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline import pace
from pipeline.pace import Pace, TrainingClock, summed


class Seconds:
    """The machine's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    return Seconds(monkeypatch)


def test_the_clock_leaves_out_what_is_before_its_start_and_what_it_is_stopped_for(seconds: Seconds) -> None:
    clock = TrainingClock()
    seconds.now += 50  # warm-up
    assert clock() == 0
    clock.start()
    seconds.now += 3
    assert clock() == 3
    with clock.stopped():
        seconds.now += 20  # an evaluation
        assert clock() == 3
    seconds.now += 1
    assert clock() == 4
    with pytest.raises(KeyError), clock.stopped():
        raise KeyError
    seconds.now += 1
    assert clock() == 5


def _sums(anchors: float, slots: list[float]) -> torch.Tensor:
    """Return loss sums with K = 4: numerator, denominator, accepted, blocks, and four vectors by slot."""
    return torch.tensor([9.0, 9.0, 9.0, anchors, *[9.0] * 4, *slots, *[9.0] * 8])


def test_a_session_counts_tokens_anchors_and_slots_and_its_rate_is_since_the_last_look(seconds: Seconds) -> None:
    found = Pace(4)
    found.clock.start()
    for tokens in (100, 200):
        found.add(tokens, _sums(5.0, [0.0, 5.0, 4.0, 3.0]))
    seconds.now += 2
    assert found.tokens_per_second() == 150
    found.add(80, _sums(1.0, [0.0, 1.0, 1.0, 1.0]))
    seconds.now += 4
    assert found.tokens_per_second() == 20
    assert found.record(3, {"drafter-0": {"others": 1.23456}}) == {
        "steps": 3,
        "seconds": 6.0,
        "tokens": 380,
        "anchors": 11,
        "supervised_slots": 27,
        "waited": {"drafter-0": {"others": 1.2346}},
    }
    assert Pace(4).record(0, {})["supervised_slots"] == 0


def test_many_slots_are_counted_exactly() -> None:
    """float32 stops counting by one at 2**24."""
    found = Pace(4)
    found.add(1, _sums(0.0, [0.0, 2.0**24, 0.0, 0.0]))
    found.add(1, _sums(0.0, [0.0, 1.0, 0.0, 0.0]))
    assert found.record(2, {})["supervised_slots"] == 2**24 + 1


def _session(steps: int, seconds: float, **waited: dict[str, float]) -> dict[str, Any]:
    counts = {"steps": steps, "seconds": seconds, "tokens": 100 * steps, "anchors": 8 * steps}
    return {"training": {**counts, "supervised_slots": 24 * steps, "waited": waited}}


def test_sessions_are_added_up_and_waits_are_shares_of_all_their_seconds() -> None:
    first = _session(6, 2.0, a={"others": 0.5, "features": 0.0}, target={"room": 1.0})
    second = _session(4, 3.0, a={"others": 0.5, "features": 1.0}, target={"room": 0.0})
    assert summed([first, second]) == {
        "steps": 10,
        "seconds": 5.0,
        "tokens": 1000,
        "anchors": 80,
        "supervised_slots": 240,
        "tokens_per_second": 200.0,
        "waited_share": {"a": {"others": 0.2, "features": 0.2}, "target": {"room": 0.2}},
    }


def test_a_session_from_before_it_was_counted_is_in_no_sum() -> None:
    counted = _session(4, 2.0, a={"others": 1.0})
    assert summed([{"from_step": 0}, counted]) == summed([counted])
    assert summed([{"from_step": 0}])["tokens_per_second"] == 0.0
