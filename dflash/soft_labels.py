"""Soft labels: what the target itself predicts at each supervised row, made from its states and never stored.

A row's distribution over the vocabulary is a hundred times wider than the state it comes from, so the states are what
a caller keeps; logits exist for one chunk at a time (`objective.head_loss`).

Legend: R rows, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.errors import DFlashError

_PIECES = 8
"""A chunk's divergence is made in at most this many pieces, so that its temporaries stay small beside the logits."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target's side of soft labels. It gets no gradient.

    state_RD    of hidden's dtype and device: what the target's head reads, that is its last state after the final norm,
                at position a + i - 1 for the row of slot i at anchor a. The logits there predict the token at a + i,
                the row's hard label (anatomy 2.3).
    multiplier, softcap
                how the target makes its logits: softcap * tanh(multiplier * (state @ head.T) / softcap). Both have no
                default, because a teacher without its target's softcap is another distribution and nobody would notice.
    """

    state_RD: Tensor
    multiplier: float
    softcap: float | None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise DFlashError(
                f"softcap {self.softcap} is not positive",
                where="teacher",
                fix="Pass the target's final_logit_softcapping, or None where it has none.",
            )

    def check(self, hidden_RD: Tensor) -> None:
        """Raise DFlashError unless there is one state for each row of `hidden_RD`, of its shape, dtype and device."""
        found, wanted = self.state_RD, hidden_RD
        for what, has, needs in (
            ("shape", tuple(found.shape), tuple(wanted.shape)),
            ("dtype", found.dtype, wanted.dtype),
            ("device", found.device, wanted.device),
        ):
            if has != needs:
                raise DFlashError(
                    f"the teacher's states have {what} {has}, the drafter's {needs}",
                    where="teacher",
                    fix="Gather the target's final states by the same rows, one position before each label.",
                )


def divergence_(teacher_RV: Tensor, drafter_RV: Tensor) -> Tensor:
    """Return KL(teacher || drafter) of each row (R,) from logits; `teacher_RV` becomes probabilities, in place.

    Beside both logits it needs memory for a piece of about an eighth of the rows.
    """
    size = max(1, -(-len(teacher_RV) // _PIECES))
    found = []
    for teacher, drafter in zip(teacher_RV.split(size), drafter_RV.split(size), strict=True):
        teacher.sub_(teacher.logsumexp(-1, keepdim=True))
        gap = (drafter - drafter.logsumexp(-1, keepdim=True)).neg_().add_(teacher)
        found.append(gap.mul_(teacher.exp_()).sum(-1))
        del gap  # before the next piece's
    return torch.cat(found)
