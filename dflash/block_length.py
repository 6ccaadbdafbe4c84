"""How many slots to draft in the next block: always the same number, or as many as pay at the acceptance seen so far.

A drafter of B slots may be given a block of k + 1, the anchor and k slots, as vLLM and SGLang do with a smaller number
of speculative tokens. Users saw k = 5 beat k = 15 on agent loads (z-lab/dflash#52). Any k is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dflash.errors import DFlashError


class BlockLength(Protocol):
    """Chooses the number of drafted slots of each call, one number for the whole batch."""

    def choose(self, most: int) -> int:
        """Return how many slots to draft, from 1 to `most`."""

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Take note of one call: `drafted` slots in every row, of which each row accepted so many."""


class FixedLength:
    """The same number of slots in every call."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise DFlashError(f"{slots} is not 1 or more", where="block_length", fix="Draft at least one token.")
        self.slots = slots

    def choose(self, most: int) -> int:
        """Return the number. Raises DFlashError if the drafter has fewer slots: it never saw such a block."""
        if self.slots > most:
            raise DFlashError(
                f"{self.slots} slots are more than the {most} that the drafter was trained for",
                where="block_length",
                fix="Draft fewer.",
            )
        return self.slots

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Nothing is learned."""


class AdaptiveLength:
    """The number of slots with the most expected tokens per cost, from running acceptance; kept over calls and prompts.

        E(k) = 1 + sum over j <= k of c_1 * ... * c_j      tokens of a call that drafts k slots
        cost(k) = 1 + marginal_cost * k                    in units of a call that drafts none

    c_i is the probability that slot i is accepted when all slots before it were: a running mean over calls, pooled over
    rows. A slot that nobody reached moves back to the prior, so that a block that was cut short is tried longer again.

    marginal_cost   what one more slot costs in every row, drafted and verified, over a call without any. Near 0 for one
                    row on an idle GPU, larger the more rows share it: measure it on the machine.
    prior           c_i of a slot that was never reached; near 1, or no longer block would ever be tried
    rate            weight of one row's newest observation
    recovery        weight of the prior, each call in which no row reached the slot
    Raises DFlashError for a value outside its range.
    """

    def __init__(self, marginal_cost: float, *, prior: float = 0.9, rate: float = 0.05, recovery: float = 0.01) -> None:
        if not 0 <= marginal_cost < float("inf"):
            raise DFlashError(f"{marginal_cost} is not 0 or more", where="marginal_cost", fix="Measure it.")
        for name, value in (("prior", prior), ("rate", rate), ("recovery", recovery)):
            if not 0 < value <= 1:
                raise DFlashError(f"{value} is not in (0, 1]", where=name, fix="It is a probability or a weight.")
        self.marginal_cost, self.prior, self.rate, self.recovery = marginal_cost, prior, rate, recovery
        self._conditional: list[float] = []

    def conditional(self, slots: int) -> list[float]:
        """Return c_1 to c_slots as they stand."""
        missing = slots - len(self._conditional)
        self._conditional += [self.prior] * missing
        return self._conditional[:slots]

    def expected_tokens(self, slots: int) -> float:
        """Return E(slots)."""
        expected, reached = 1.0, 1.0
        for probability in self.conditional(slots):
            reached *= probability
            expected += reached
        return expected

    def choose(self, most: int) -> int:
        """Return the k from 1 to `most` with the largest E(k) / cost(k), the smallest of equals."""
        return max(range(1, most + 1), key=lambda k: self.expected_tokens(k) / (1 + self.marginal_cost * k))

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Move c_i of each slot that some row reached towards the share that accepted it, the others to the prior."""
        known = max(drafted, len(self._conditional))
        self.conditional(known)
        for slot in range(known):
            reached = sum(slot <= count for count in accepted) if slot < drafted else 0
            if reached:
                share = sum(slot < count for count in accepted) / reached
                weight = 1 - (1 - self.rate) ** reached
                self._conditional[slot] += weight * (share - self._conditional[slot])
            else:
                self._conditional[slot] += self.recovery * (self.prior - self._conditional[slot])
