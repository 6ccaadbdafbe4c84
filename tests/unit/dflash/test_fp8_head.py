"""The head in fp8 against cross-entropy in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash import fp8_head
from dflash.errors import DFlashError
from dflash.fp8_head import FACTOR, Fp8Head
from dflash.objective import Weighting, head_loss, make_rows

pytestmark = pytest.mark.usefixtures("one_thread")

R, D, V = 37, 32, 4096
ROUNDING = ((2.0**-4) ** 2 / 3 + (2.0**-3) ** 2 / 3) ** 0.5
"""A bound on the rms of e4m3 times e5m2, as in test_fp8.py."""


def _head() -> tuple[Tensor, Tensor]:
    """Return a head and the labels, in bf16 and int64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(V, D, generator=generator).bfloat16(), torch.randint(0, V, (R,), generator=generator)


def _logits_and_gradient(
    hidden_RD: Tensor, multiplier: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fp8 gradient of a weighted loss, float64's from the same logits, and the rows' label chance."""
    head_VD, label_R = _head()
    weight_R = torch.rand(R, generator=torch.Generator().manual_seed(1))
    logits_RV = (hidden_RD.float() @ head_VD.float().T).bfloat16()
    leaf = logits_RV.double().requires_grad_()
    shaped_RV = leaf * multiplier
    if softcap is not None:
        shaped_RV = softcap * torch.tanh(shaped_RV / softcap)
    loss_R = F.cross_entropy(shaped_RV, label_R, reduction="none")
    (grad_RV,) = torch.autograd.grad((weight_R.double() * loss_R).sum(), leaf)
    shaped_RV = shaped_RV.detach()
    top_R = shaped_RV.amax(1)
    found: Any = SimpleNamespace(
        top_R=top_R.float(),
        total_R=torch.exp(shaped_RV - top_R[:, None]).sum(1).float(),
        gold_R=(shaped_RV.gather(1, label_R[:, None])[:, 0] - top_R).float(),
    )
    mine = Fp8Head(head_VD).gradient(logits_RV, label_R, found, weight_R, multiplier, softcap)
    assert mine.dtype == torch.float32
    return mine, grad_RV @ head_VD.double(), torch.exp(-loss_R.detach())


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_logits_are_those_of_float64_within_the_rounding_of_e4m3() -> None:
    head_VD, _ = _head()
    hidden_RD = torch.randn(R, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    out_RV = torch.full((R, V), float("nan"), dtype=torch.bfloat16)
    found = Fp8Head(head_VD).logits(hidden_RD, out_RV)
    assert found.data_ptr() == out_RV.data_ptr()
    assert _error(out_RV, hidden_RD.double() @ head_VD.double().T) < (2 * (2.0**-4) ** 2 / 3) ** 0.5


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.5, None), (1.7, 5.0)])
@pytest.mark.parametrize("size", [0.01, 0.3, 1.0])
def test_the_gradient_is_cross_entropys(size: float, multiplier: float, softcap: float | None) -> None:
    """From chances that are all alike, 2^-12 each, to a few that have it all."""
    hidden_RD = torch.randn(R, D, generator=torch.Generator().manual_seed(2)).mul_(size).bfloat16()
    mine, expected, _ = _logits_and_gradient(hidden_RD, multiplier, softcap)
    assert _error(mine, expected) < ROUNDING


def test_a_confident_rows_gradient_keeps_its_size() -> None:
    """p - 1 of a label is its chance's last bits: in the product, e5m2 would leave 0 of it or an eighth."""
    head_VD, label_R = _head()
    hidden_RD = (head_VD[label_R].float() * 0.42).bfloat16()
    mine, expected, chance_R = _logits_and_gradient(hidden_RD)
    sure_R = (chance_R > 0.9) & (chance_R < 0.999)
    assert sure_R.sum() > 5
    for row in sure_R.nonzero()[:, 0].tolist():
        assert _error(mine[row], expected[row]) < ROUNDING


def test_even_chances_survive_because_they_are_e5m2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a head have a mean, and a fresh drafter's gradient is it: small chances, all of one sign."""
    found = []
    for dtype, factor in ((fp8_head.E5M2, FACTOR), (fp8_head.E4M3, 256.0)):  # 256: e4m3's largest power of two
        monkeypatch.setattr(fp8_head, "E5M2", dtype)
        monkeypatch.setattr(fp8_head, "FACTOR", factor)
        head_VD = torch.ones(151_936, 16, dtype=torch.bfloat16)
        even: Any = SimpleNamespace(
            top_R=torch.zeros(1), total_R=torch.full((1,), 151_936.0), gold_R=torch.full((1,), -30.0)
        )
        logits_RV = torch.zeros(1, 151_936, dtype=torch.bfloat16)
        label_R = torch.zeros(1, dtype=torch.long)
        gradient = Fp8Head(head_VD).gradient(logits_RV, label_R, even, torch.ones(1), 1.0, None)
        found.append(float(gradient.mean()) + 1)  # what the product gave: the label's part is -1
    assert found[0] == pytest.approx(1, abs=2.0**-3)
    assert abs(found[1] - 1) > 2.0**-3


def test_a_head_that_fp8_cannot_take_is_refused() -> None:
    with pytest.raises(DFlashError, match="the head has 321 tokens and width 64, not multiples of 16"):
        Fp8Head(torch.zeros(321, 64))


def test_the_loss_refuses_an_fp8_head_that_it_would_not_use() -> None:
    head_VD, label_R = _head()
    valid_MK = torch.tensor([[False, True, True, True]])
    rows = make_rows(label_R[:4][None], valid_MK, 8)
    hidden_RD = torch.zeros(3, D, dtype=torch.bfloat16)
    assert float(head_loss(hidden_RD, head_VD, rows, Weighting()).denominator) > 0
    with pytest.raises(DFlashError, match=r"fp8_head: states are torch.bfloat16 on cpu, soft_weight 0.0"):
        head_loss(hidden_RD, head_VD, rows, Weighting(), fp8_head=Fp8Head(head_VD))
