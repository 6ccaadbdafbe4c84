"""DSpark's low-rank Markov bias: a slot's logits depend on the token before it.

    logits_t(b) = U_t(b) + <W1[a], W2[b]>      a the token before slot t

U are the drafter's own logits, multiplier and softcap applied. Drafting walks left to right: one product (E x V) a
slot, and no further pass of the drafter. W2 starts at zero: then nothing is added, and the walk takes each slot's
argmax as a plain drafter does.
DSpark's convention that slot 0 predicts too is not taken over: slot i predicts the token at a + i, as in DFlash.

Legend: b batch, k drafted slots, R supervised rows, D width, E rank, V vocabulary.
Source: arXiv 2607.05147; tensor names of the published drafters (anatomy 1.8, 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.head import head_logits
from dflash.objective import Rows, Weighting
from dflash.sampling import Drafts, Sampling, choose


class MarkovHead(nn.Module):
    """The bias. markov_w1.weight and markov_w2.weight, both (V, E). Raises DFlashError for a rank below 1."""

    def __init__(self, vocab_size: int, *, rank: int = 256) -> None:
        super().__init__()
        if rank < 1:
            raise DFlashError(f"{rank} is not at least 1", where="markov_rank", fix="Published drafters have 256.")
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self.initialise(seed=0, std=0.02)

    @torch.no_grad()
    def initialise(self, seed: int, std: float) -> None:
        """Draw W1 from N(0, std) by a generator of its own, on the CPU; set W2 to zero, so that the bias is zero."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(self.markov_w1.weight.shape).normal_(0.0, std, generator=generator)
        self.markov_w1.weight.copy_(drawn)
        self.markov_w2.weight.zero_()

    def correct(self, logits: Tensor, before: Tensor) -> Tensor:
        """Return logits (..., V) plus the bias after tokens `before` (...), in the dtype of `logits`."""
        bias: Tensor = self.markov_w2(self.markov_w1(before))
        return logits + bias.to(logits.dtype)

    def pick(
        self,
        states_bkD: Tensor,
        logits_bkV: Tensor,
        anchor_b: Tensor,
        sampling: Sampling,
        uniforms_bk: Tensor | None,
    ) -> Drafts:
        """Return the drafts of slots 1 to k, each chosen after the one before it; slot 1 follows the anchor's token.

        The states are not looked at; the selector's `pick` has the same arguments.
        """
        tokens, distributions, before_b = list[Tensor](), list[Tensor](), anchor_b
        for slot in range(logits_bkV.shape[1]):
            corrected_bV = self.correct(logits_bkV[:, slot], before_b)
            before_b, chances_bV = choose(corrected_bV, sampling, None if uniforms_bk is None else uniforms_bk[:, slot])
            tokens.append(before_b)
            if chances_bV is not None:
                distributions.append(chances_bV)
        return Drafts(torch.stack(tokens, 1), torch.stack(distributions, 1) if distributions else None)


@dataclass
class MarkovSums:
    """Sums over supervised rows. numerator: weighted cross-entropy of the corrected logits, with a gradient for the
    head; divide it by `denominator`, the sum of m * w. correct: rows whose largest corrected logit is the true token's.
    """

    numerator: Tensor
    denominator: Tensor
    correct: Tensor


class _MarkovLoss(torch.autograd.Function):
    """Loss in one pass: the gradients of W1's rows and of W2 are made while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        first_RE: Tensor,
        second_VE: Tensor,
        hidden_RD: Tensor,
        head_VD: Tensor,
        rows: Rows,
        weighting: Weighting,
        config: DrafterConfig,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(first_RE.dtype, torch.float32)
        sums = torch.zeros(3, device=first_RE.device, dtype=wide)
        gradient_RE = torch.empty_like(first_RE)
        gradient_VE = torch.zeros_like(second_VE, dtype=wide)
        for chunk in rows.chunks:
            first, end, _ = chunk
            label_R, rows_RE = rows.label_R[first:end], first_RE[first:end]
            logits_RV = head_logits(hidden_RD[first:end], head_VD, config)
            logits_RV = logits_RV + (rows_RE @ second_VE.T).to(logits_RV.dtype)
            best_R = logits_RV.argmax(-1)
            logits_RV = logits_RV.log_softmax(-1)
            entropy_R = -logits_RV.gather(1, label_R[:, None])[:, 0]
            weight_R = rows.weights(entropy_R, chunk, weighting)[0]
            error_RV = logits_RV.exp_().mul_(weight_R[:, None])
            error_RV[torch.arange(end - first, device=error_RV.device), label_R] -= weight_R
            error_RV = error_RV.to(first_RE.dtype)
            gradient_RE[first:end] = error_RV @ second_VE
            gradient_VE += error_RV.T @ rows_RE
            correct_R = (best_R == label_R) & rows.valid_R[first:end]
            sums += torch.stack([(weight_R * entropy_R).sum(), weight_R.sum(), correct_R.sum()])
        ctx.save_for_backward(gradient_RE, gradient_VE.to(second_VE.dtype))
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient_RE, gradient_VE = ctx.saved_tensors
        assert grads[0] is not None
        return gradient_RE * grads[0], gradient_VE * grads[0], None, None, None, None, None


def markov_loss(
    markov: MarkovHead,
    hidden_RD: Tensor,
    head_VD: Tensor,
    before_R: Tensor,
    rows: Rows,
    weighting: Weighting,
    config: DrafterConfig,
) -> MarkovSums:
    """Return the sums of the corrected logits of states `hidden_RD` after the true tokens `before_R`.

    The states and the target's head get no gradient. D-PACE weighs by the corrected logits' cross-entropy. Memory is
    two chunks of float32 logits and one gradient of W2.
    """
    numerator, sums = _MarkovLoss.apply(
        markov.markov_w1(before_R),
        markov.markov_w2.weight,
        hidden_RD.detach(),
        head_VD.detach(),
        rows,
        weighting,
        config,
    )
    sums = sums.detach()
    return MarkovSums(numerator, sums[1], sums[2])
