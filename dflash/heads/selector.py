"""DFlash 2's path selector: neighboring slots are chosen together, among the few best tokens of each.

    S_t(a, b) = U_t(b) + <A[a] * (P h_t), B[b]>      a the token before slot t, b one of the slot's top-k candidates

U is the drafter's own logit, multiplier and softcap applied, h its state, A and B codebooks over the vocabulary.
Drafting walks left to right and needs no further pass of the drafter or the head. Training knows the true predecessor
of each slot, so it scores all slots at once. B starts at zero: then S = U, and the walk takes each slot's argmax as a
plain drafter does.

Legend: b batch, k drafted slots, c candidates, R supervised rows, D width, E rank, V vocabulary.
Source: z-lab's DFlash 2 drafters, whose tensor names these are (anatomy 1.8, 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.head import head_logits
from dflash.objective import Rows, Weighting
from dflash.sampling import Drafts, Sampling, choose


class CandidateSelector(nn.Module):
    """Scores the candidates of a slot given the token before it.

    predecessor_codebook A and successor_codebook B (V, E), hidden_projection.weight P (E, D).
    Raises DFlashError for a rank below 1, or more candidates than tokens.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, rank: int = 256, top_k: int = 16) -> None:
        super().__init__()
        if rank < 1:
            raise DFlashError(f"{rank} is not at least 1", where="selector_rank", fix="Published drafters have 256.")
        if not 1 <= top_k <= vocab_size:
            raise DFlashError(
                f"{top_k} is not from 1 to the {vocab_size} tokens",
                where="selector_top_k",
                fix="Published drafters have 16.",
            )
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.initialise(seed=0, std=0.02)

    @torch.no_grad()
    def initialise(self, seed: int, std: float) -> None:
        """Draw A and P from N(0, std) by a generator of their own, on the CPU; set B to zero, so that S = U."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in (self.predecessor_codebook, self.hidden_projection.weight):
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        self.successor_codebook.zero_()

    def scores(self, states: Tensor, before: Tensor, unary: Tensor, candidates: Tensor) -> Tensor:
        """Return S (..., c) of candidate ids (..., c) with logits `unary` (..., c), for states (..., D) after tokens
        `before` (...). S has the dtype of `unary`."""
        gate = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(states)
        pairs = F.embedding(candidates, self.successor_codebook) @ gate[..., None]
        return unary + pairs[..., 0].to(unary.dtype)

    def pick(
        self,
        states_bkD: Tensor,
        logits_bkV: Tensor,
        anchor_b: Tensor,
        sampling: Sampling,
        uniforms_bk: Tensor | None,
    ) -> Drafts:
        """Return the drafts of slots 1 to k, each chosen after the one before it; slot 1 follows the anchor's token.

        A sampled slot's distribution is that of its candidates, zero elsewhere: the very one of the draw, which is what
        rejection sampling needs to stay lossless.
        """
        unary_bkc, candidates_bkc = logits_bkV.topk(self.top_k, dim=-1)
        tokens, distributions, before_b = list[Tensor](), list[Tensor](), anchor_b
        for slot in range(states_bkD.shape[1]):
            candidates_bc = candidates_bkc[:, slot]
            scores_bc = self.scores(states_bkD[:, slot], before_b, unary_bkc[:, slot], candidates_bc)
            index_b, chances_bc = choose(scores_bc, sampling, None if uniforms_bk is None else uniforms_bk[:, slot])
            before_b = candidates_bc.gather(1, index_b[:, None])[:, 0]
            tokens.append(before_b)
            if chances_bc is not None:
                empty_bV = chances_bc.new_zeros(logits_bkV[:, slot].shape)
                distributions.append(empty_bV.scatter(1, candidates_bc, chances_bc))
        return Drafts(torch.stack(tokens, 1), torch.stack(distributions, 1) if distributions else None)


@dataclass(frozen=True)
class Candidates:
    """The best tokens of each supervised row, and how the row counts in the drafter's own loss.

    unary_Rc    float32 at least, the drafter's logits, largest first
    token_Rc    int64
    weight_R    as the objective's, m * w
    """

    unary_Rc: Tensor
    token_Rc: Tensor
    weight_R: Tensor


@torch.no_grad()
def find_candidates(
    hidden_RD: Tensor, head_VD: Tensor, rows: Rows, weighting: Weighting, config: DrafterConfig, top_k: int
) -> Candidates:
    """Return the top-k tokens of states `hidden_RD` by the frozen head, one chunk of logits at a time."""
    unary, tokens, weights = [], [], []
    for chunk in rows.chunks:
        first, end, _ = chunk
        logits_RV = head_logits(hidden_RD[first:end], head_VD, config)
        top = logits_RV.topk(top_k, dim=-1)
        unary.append(top.values)
        tokens.append(top.indices)
        entropy_R = F.cross_entropy(logits_RV, rows.label_R[first:end], reduction="none")
        weights.append(rows.weights(entropy_R, chunk, weighting)[0])
    if not unary:
        empty = hidden_RD.new_zeros(0, top_k, dtype=torch.float32)
        return Candidates(empty, empty.long(), empty[:, 0])
    return Candidates(torch.cat(unary), torch.cat(tokens), torch.cat(weights))


@dataclass
class SelectorSums:
    """Sums over supervised rows; divide the numerator by the sum of m * w, as the drafter's own loss.

    numerator   weighted cross-entropy among the candidates, with a gradient for the selector
    recalled    rows whose true token is a candidate: only there can the selector be right
    correct     rows where it chooses the true token
    """

    numerator: Tensor
    recalled: Tensor
    correct: Tensor


def selector_loss(
    selector: CandidateSelector, hidden_RD: Tensor, before_R: Tensor, rows: Rows, candidates: Candidates
) -> SelectorSums:
    """Return the sums of choosing each row's true token among its candidates, after the true token before it.

    A row whose true token is no candidate has nothing to choose and no loss (as in Automodel; SpecForge#772 puts it
    in, which trains on candidates that decoding would not see). The states get no gradient.
    """
    scores_Rc = selector.scores(hidden_RD.detach(), before_R, candidates.unary_Rc, candidates.token_Rc)
    is_label_Rc = candidates.token_Rc == rows.label_R[:, None]
    recalled_R = is_label_Rc.any(1) & rows.valid_R
    target_R = is_label_Rc.long().argmax(1)
    loss_R = F.cross_entropy(scores_Rc, target_R, reduction="none") * recalled_R
    correct = ((scores_Rc.argmax(1) == target_R) & recalled_R).sum()
    return SelectorSums((candidates.weight_R * loss_R).sum(), recalled_R.sum(), correct)
