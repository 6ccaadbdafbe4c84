"""Which target makes a micro-batch's features, which drafter trains on it, and how many may wait in between."""

from __future__ import annotations

import math
from dataclasses import dataclass

AHEAD = 2
"""Micro-batches that wait for a drafter; where it meets more targets than that, one of each."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The order in which `targets` and `drafters` take turns at a session's micro-batches.

    These have one running number m over all steps: target m mod T makes the features and drafter m mod W trains on
    them, so what a drafter gets, and when, does not depend on T. Between the two is a queue of `depth` places.

    Nobody waits for ever, whatever T, W and the micro-batches in a step are, if each queue has one place. Take the
    smallest m that its drafter does not have yet; all smaller ones were taken. Its target makes its numbers in
    ascending order, so before m it has made only smaller ones: all of its queues are empty, and m finds room. Its
    drafter comes for it: apart from features it waits only at the end of a step, for drafters whose numbers of that
    step are smaller than m, and those were taken.
    """

    targets: int
    drafters: int

    def target_of(self, number: int) -> int:
        """Return who makes the features of a micro-batch."""
        return number % self.targets

    def drafter_of(self, number: int) -> int:
        """Return who trains on a micro-batch."""
        return number % self.drafters

    def number(self, drafter: int, count: int) -> int:
        """Return the number of a drafter's next micro-batch when it has had `count`."""
        return drafter + count * self.drafters

    @property
    def fed(self) -> int:
        """How many drafters one target makes features for."""
        return self.drafters // math.gcd(self.targets, self.drafters)

    @property
    def met(self) -> int:
        """How many targets make features for one drafter."""
        return self.targets // math.gcd(self.targets, self.drafters)

    @property
    def depth(self) -> int:
        """The places of the queue between one target and one drafter that it feeds."""
        return max(1, AHEAD // self.met)

    def places(self, depth: int | None = None) -> int:
        """Return how many micro-batches' features one target's device holds at most: for each drafter that it feeds
        those that wait and one lent to it, and the one that is being made."""
        return self.fed * ((depth or self.depth) + 1) + 1
