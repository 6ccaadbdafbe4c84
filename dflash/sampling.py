"""How a token is chosen from logits, and how drafted tokens are accepted so that the target's distribution is kept.

Sampled: true rejection sampling, one slot after another. A drafted token x is kept with probability
min(1, p(x) / q(x)); at the first one that is not, the token comes from the residual (p - q)+; after a run kept whole,
from p.
p and q are the target's and the drafter's distributions, both processed by the same temperature, top-k and top-p.
Greedy is the case of p and q with one token each; it is computed by argmax alone, without a softmax.
Legend: b batch, k drafted slots, V vocabulary. Source: arXiv 2211.17192 (Leviathan), 2302.01318 (Chen), algorithm 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.errors import DFlashError


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. temperature 0 is greedy; then top_k and top_p change nothing.

    top_k   keep the k largest logits, and those equal to the k-th
    top_p   of what top_k left, keep the fewest tokens, likeliest first, that reach the probability p together
    Raises DFlashError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise DFlashError(f"{self.temperature} is not 0 or more", where="temperature", fix="0 is greedy.")
        if self.top_k is not None and self.top_k < 1:
            raise DFlashError(f"{self.top_k} is not 1 or more", where="top_k", fix="None keeps every token.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise DFlashError(f"{self.top_p} is not in (0, 1]", where="top_p", fix="None keeps every token.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that no random number is needed."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution (..., V) that tokens are drawn from, float32 at least. Not for greedy."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k is not None and self.top_k < wide.shape[-1]:
            smallest_kept = wide.topk(self.top_k, dim=-1).values[..., -1:]
            wide = wide.masked_fill(wide < smallest_kept, float("-inf"))
        found = wide.softmax(-1)
        if self.top_p is None or self.top_p == 1:  # by the sum below, rounding would cut a tail that 1 keeps
            return found
        ordered, order = found.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered  # the probability of all tokens before this one
        kept = torch.zeros_like(found).scatter(-1, order, ordered.masked_fill(likelier >= self.top_p, 0.0))
        return kept / kept.sum(-1, keepdim=True)


GREEDY = Sampling()


@dataclass(frozen=True)
class Drafts:
    """tokens_bk: what the drafter proposes for slots 1 to k. probabilities_bkV: the distribution that each was drawn
    from, None when greedy. Lossless sampling needs the very distribution of the draw."""

    tokens_bk: Tensor
    probabilities_bkV: Tensor | None


def row_generators(seed: int, num_rows: int) -> list[torch.Generator]:
    """Return one CPU generator per row; row i gets the same one whatever the number of rows.

    Seeds are hashed into 32 bits: torch's CPU generator ignores all bits above.
    """
    digests = [hashlib.sha256(f"{seed} {row}".encode()).digest() for row in range(num_rows)]
    return [torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")) for digest in digests]


def draw_uniforms(generators: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """Return uniform numbers (b, count) in [0, 1), float64, each row from its own generator.

    So a row's tokens depend on its generator alone, not on which rows decode beside it.
    """
    rows = [torch.rand(count, generator=g, device=g.device, dtype=torch.float64) for g in generators]
    return torch.stack([row.to(device) for row in rows])


def pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens (...,) that uniform numbers (...,) fall on, for non-negative weights (..., V) of any sum.

    Inversion of the cumulative sum, in float64: one random number a token, and a weight of 0 is never picked.
    """
    cumulative = weights.double().cumsum(-1)
    threshold = uniforms[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[..., 0]


def choose(logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return tokens (...,) chosen from logits (..., V), and the distributions (..., V) they were drawn from.

    uniforms   (...,), one number per token; not looked at when greedy, and then there is no distribution
    """
    if sampling.greedy:
        return logits.argmax(-1), None
    assert uniforms is not None, "sampling needs random numbers"
    probabilities = sampling.probabilities(logits)
    return pick(probabilities, uniforms), probabilities


def accept(drafts: Drafts, logits_bQV: Tensor, sampling: Sampling, uniforms_bQ: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return how many drafted tokens of each row are kept (b,), and the token that follows them (b,).

    logits_bQV    the target's for the anchor and the k drafted tokens, Q = k + 1: entry i judges drafted token i, the
                  last one gives the token after a run kept whole
    uniforms_bQ   k numbers for keeping, one for the token that follows; not looked at when greedy
    """
    drafted_bk = drafts.tokens_bk
    if sampling.greedy:
        chosen_bQ = logits_bQV.argmax(-1)
        accepted_b = (drafted_bk == chosen_bQ[:, :-1]).long().cumprod(1).sum(1)
        return accepted_b, chosen_bQ.gather(1, accepted_b[:, None])[:, 0]
    assert uniforms_bQ is not None and drafts.probabilities_bkV is not None, "drafts were not sampled"
    p_bQV = sampling.probabilities(logits_bQV)
    # After the last slot nothing was drafted: with q = 0 there, the residual is p itself.
    q_bQV = F.pad(drafts.probabilities_bkV.to(p_bQV.dtype), (0, 0, 0, 1))
    index_bk1 = drafted_bk[..., None]
    p_bk, q_bk = p_bQV[:, :-1].gather(2, index_bk1)[..., 0], q_bQV[:, :-1].gather(2, index_bk1)[..., 0]
    kept_bk = uniforms_bQ[:, :-1] * q_bk < p_bk  # as u < p / q, without a division by zero
    accepted_b = kept_bk.long().cumprod(1).sum(1)
    row_b = torch.arange(len(accepted_b), device=accepted_b.device)
    p_bV, q_bV = p_bQV[row_b, accepted_b], q_bQV[row_b, accepted_b]
    residual_bV = (p_bV - q_bV).clamp(min=0)
    # Where p equals q nothing is rejected, except by rounding: then the residual is empty, and p is the limit.
    residual_bV = torch.where(residual_bV.sum(-1, keepdim=True) > 0, residual_bV, p_bV)
    return accepted_b, pick(residual_bV, uniforms_bQ[:, -1])
