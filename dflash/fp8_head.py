"""The target's frozen head in fp8: logits, and the gradient of the states that a hard label's cross-entropy gives.

The gradient of row r is w_r (sum_v p_v h_v - h_label). Rounded as it stands it would be poor twice over. The p of a row
span ten orders of magnitude, and at e4m3's range (2^18) most of a fresh drafter's vocabulary would become 0; so they
are e5m2 (2^32), scaled by a constant since none exceeds 1. And for a confident row p_label - 1 is the small difference
of two numbers; so the label is left out of the product, and (p_label - 1) h_label is added in float32.

Legend: R rows, D width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.errors import DFlashError
from dflash.fp8 import E4M3, E5M2, MULTIPLE, product, quantize

if TYPE_CHECKING:
    from dflash.kernels.entropy import RowStatistics

FACTOR = 2.0**15
"""What a chance is multiplied by: the largest power of two in e5m2. Below 2^-29 bits are lost, below 2^-32 all."""


class Fp8Head:
    """Both layouts of a head (V, D) in e4m3 under one scale, beside the head itself."""

    def __init__(self, head_VD: Tensor) -> None:
        """Raises DFlashError when the head's shape is not one for fp8."""
        V, D = head_VD.shape
        if V % MULTIPLE or D % MULTIPLE:
            what = f"the head has {V} tokens and width {D}, not multiples of {MULTIPLE}"
            raise DFlashError(what, where="precision fp8", fix="Use bf16.")
        self.head_VD = head_VD.detach()
        self.head8_VD, self.head8_DV, self.scale = quantize(self.head_VD, E4M3)
        self._chance_scale = torch.tensor(1 / FACTOR, device=head_VD.device)

    def logits(self, hidden_RD: Tensor, out_RV: Tensor) -> Tensor:
        """Write hidden @ head.T into out_RV and return it."""
        hidden8_RD, _, scale = quantize(hidden_RD, E4M3)
        return product(hidden8_RD, self.head8_VD, (scale, self.scale), out_RV.dtype, fast=True, out=out_RV)

    def gradient(
        self,
        logits_RV: Tensor,
        label_R: Tensor,
        found: RowStatistics,
        weight_R: Tensor,
        multiplier: float,
        softcap: float | None,
    ) -> Tensor:
        """Return the gradient (R, D), float32, of sum(weight * cross-entropy) with respect to the states whose stored
        logits these are; `found` is `kernels.entropy.row_statistics` of them."""
        label_gap_R = -torch.expm1(found.gold_R - found.total_R.log())  # 1 - p_label
        if softcap is not None:
            label_gap_R = label_gap_R * (1 - ((found.gold_R + found.top_R) / softcap).square())
        chances8_RV = torch.empty(logits_RV.shape, dtype=E5M2, device=logits_RV.device)
        self._write_chances(logits_RV, label_R, found, multiplier, softcap, chances8_RV)
        scales = (self._chance_scale, self.scale)
        # V terms, nearly all of one sign in p: in short registers what comes last would be lost.
        others_RD = product(chances8_RV, self.head8_DV, scales, torch.float32, fast=False)
        others_RD -= label_gap_R[:, None] * self.head_VD[label_R]
        return others_RD.mul_((weight_R * multiplier)[:, None])

    @staticmethod
    def _write_chances(
        logits_RV: Tensor,
        label_R: Tensor,
        found: RowStatistics,
        multiplier: float,
        softcap: float | None,
        out8_RV: Tensor,
    ) -> None:
        if logits_RV.is_cuda:
            from dflash.kernels import chances  # needs Triton, which a machine without a GPU may lack

            chances.write_chances(logits_RV, label_R, found, multiplier, softcap, FACTOR, out8_RV)
            return
        shaped_RV = logits_RV.float() * multiplier
        if softcap is not None:
            shaped_RV = softcap * torch.tanh(shaped_RV / softcap)
        chance_RV = torch.exp(shaped_RV - found.top_R[:, None]) / found.total_R[:, None]
        if softcap is not None:
            chance_RV = chance_RV * (1 - (shaped_RV / softcap).square())
        out8_RV.copy_(chance_RV.scatter(1, label_R[:, None], 0.0) * FACTOR)
