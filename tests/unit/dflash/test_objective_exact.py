"""The fused loss in float64 against dense autograd to twelve digits, and against itself however the batch is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.objective import LossSums, Weighting, head_loss, make_rows
from dflash.soft_labels import Teacher

pytestmark = pytest.mark.usefixtures("one_thread")

M, K, D, V = 6, 5, 8, 23
DIGITS = 1e-12
WEIGHTINGS = [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.3)]
NAMES = ["decay", "dpace"]


@dataclass(frozen=True)
class Blocks:
    """Blocks before a one-layer drafter `inputs @ weight_DD`, with what the loss needs of each slot."""

    inputs_MKD: Tensor
    teacher_MKD: Tensor
    labels_MK: Tensor
    valid_MK: Tensor

    def cut(self, blocks: slice) -> Blocks:
        return Blocks(*(getattr(self, name)[blocks] for name in vars(self)))

    def float(self) -> Blocks:
        return replace(self, inputs_MKD=self.inputs_MKD.float(), teacher_MKD=self.teacher_MKD.float())


def _problem() -> tuple[Blocks, Tensor, Tensor]:
    """Return float64 blocks with holes, an empty block and a full one, the drafter's weight and the head (V, D)."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, V, (M, K), generator=generator)
    valid = torch.rand(M, K, generator=generator) < 0.6
    valid[:, 0] = False
    valid[1], valid[2, 1:] = False, True
    holes = valid[:, 1:-1] < valid[:, 2:]
    assert holes.any(), "a supervised slot after an unsupervised one"
    return Blocks(drawn(M, K, D), drawn(M, K, D), labels, valid), drawn(D, D) / 3, drawn(V, D)


@dataclass(frozen=True)
class Loss:
    """One kind of loss; the teacher's logits are made by other rules than the drafter's."""

    weighting: Weighting
    soft_weight: float = 0.0
    softcap: float | None = None
    multiplier: float = 1.0

    teacher_softcap = 3.0
    teacher_multiplier = 1.3

    def fused(self, blocks: Blocks, weight_DD: Tensor, head_VD: Tensor, chunk_rows: int = 1000) -> LossSums:
        rows = make_rows(blocks.labels_MK, blocks.valid_MK, chunk_rows)
        teacher = None
        if self.soft_weight:
            teacher = Teacher(
                state_RD=blocks.teacher_MKD.flatten(0, 1)[rows.index_R],
                softcap=self.teacher_softcap,
                multiplier=self.teacher_multiplier,
            )
        return head_loss(
            (blocks.inputs_MKD @ weight_DD).flatten(0, 1)[rows.index_R],
            head_VD,
            rows,
            self.weighting,
            soft_weight=self.soft_weight,
            teacher=teacher,
            softcap=self.softcap,
            multiplier=self.multiplier,
        )

    def dense(self, blocks: Blocks, weight_DD: Tensor, head_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator over all slots at once, for autograd."""
        logits = _logits(blocks.inputs_MKD @ weight_DD @ head_VD.T, self.multiplier, self.softcap)
        predicted = logits.log_softmax(-1)
        entropy = F.nll_loss(predicted.flatten(0, 1), blocks.labels_MK.flatten(), reduction="none").view(-1, K)
        given = _logits(blocks.teacher_MKD @ head_VD.T, self.teacher_multiplier, self.teacher_softcap).log_softmax(-1)
        divergence = F.kl_div(predicted, given, reduction="none", log_target=True).sum(-1)
        loss = (1 - self.soft_weight) * entropy + self.soft_weight * divergence
        weights = torch.tensor(
            [
                _weights(self.weighting, *block)
                for block in zip(entropy.tolist(), blocks.valid_MK.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )
        return (weights * loss).sum(), weights.sum()


def _logits(product: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    logits = multiplier * product
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _weights(weighting: Weighting, entropy: list[float], valid: list[bool]) -> list[float]:
    """The formulas of anatomy 2.5 for one block, slot by slot."""
    if weighting.kind == "decay":
        return [math.exp(-(i - 1) / weighting.gamma) if valid[i] else 0.0 for i in range(K)]
    factors = [
        (1 - weighting.alpha) * math.exp(-ce) + weighting.alpha if m else 1.0
        for ce, m in zip(entropy, valid, strict=True)
    ]
    reach = [math.prod(factors[: i + 1]) for i in range(K)]
    return [sum(reach[t] for t in range(i, K) if valid[t]) if valid[i] else 0.0 for i in range(K)]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return max |found - expected| / max |expected|; infinity when anything is not finite."""
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


@pytest.mark.parametrize("chunk_rows", [1, 1000], ids=["a block a chunk", "one chunk"])
@pytest.mark.parametrize("multiplier", [1.0, 0.7], ids=["", "multiplier"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("soft_weight", [0.0, 0.3, 1.0], ids=["hard", "mix", "soft"])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_float64_loss_and_gradient_are_those_of_dense_autograd_to_twelve_digits(
    weighting: Weighting, soft_weight: float, softcap: float | None, multiplier: float, chunk_rows: int
) -> None:
    """SpecForge#716 (a fused loss against its reference), anatomy 6.15: holes, an empty block, every kind of label."""
    blocks, weight, head = _problem()
    loss = Loss(weighting, soft_weight, softcap, multiplier)
    leaf, plain_leaf = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    sums = loss.fused(blocks, leaf, head, chunk_rows)
    numerator, denominator = loss.dense(blocks, plain_leaf, head)
    (gradient,) = torch.autograd.grad(sums.numerator, leaf)
    (expected,) = torch.autograd.grad(numerator, plain_leaf)
    assert sums.vector().dtype == gradient.dtype == torch.float64
    assert len(make_rows(blocks.labels_MK, blocks.valid_MK, chunk_rows).chunks) == (5 if chunk_rows == 1 else 1)
    assert sums.numerator.item() == pytest.approx(numerator.item(), rel=DIGITS)
    assert sums.denominator.item() == pytest.approx(denominator.item(), rel=DIGITS)
    assert _error(gradient, expected) < DIGITS


def test_twelve_digits_are_beyond_float32() -> None:
    """The test above would see one rounding to float32 anywhere."""
    blocks, weight, head = _problem()
    leaf, plain_leaf = weight.float().requires_grad_(), weight.clone().requires_grad_()
    loss = Loss(WEIGHTINGS[1], 0.3, 2.0, 0.7)
    (gradient,) = torch.autograd.grad(loss.fused(blocks.float(), leaf, head.float()).numerator, leaf)
    (expected,) = torch.autograd.grad(loss.dense(blocks, plain_leaf, head)[0], plain_leaf)
    assert 1000 * DIGITS < _error(gradient.double(), expected) < 1e-5


LAYOUTS: dict[str, list[list[slice]]] = {
    "micro-batches of 1": [[slice(i, i + 1) for i in range(6)]],
    "micro-batches of 2": [[slice(i, i + 2) for i in range(0, 6, 2)]],
    "micro-batches of 3": [[slice(0, 3), slice(3, 6)]],
    "two workers": [[slice(0, 2), slice(2, 3)], [slice(3, 6)]],
    "two workers, one with nothing supervised": [[slice(0, 1), slice(2, 6)], [slice(1, 2)]],
    "two workers, interleaved": [[slice(0, 6, 2)], [slice(1, 6, 2)]],
}
"""For each worker the blocks of its micro-batches."""


def _step(layout: Sequence[Sequence[slice]], loss: Loss, *, divide_each: bool = False) -> tuple[Tensor, Tensor]:
    """Return a step's gradient of the drafter's weight and its mean loss.

    Every worker adds up the gradients of its own copy; then the workers' gradients, numerators and denominators are
    added and divided once. divide_each is the usual mistake: each micro-batch's own mean, averaged.
    """
    blocks, weight, head = _problem()
    gradient, totals, parts = torch.zeros_like(weight), torch.zeros(2, dtype=torch.float64), 0
    for worker in layout:
        copy = weight.clone().requires_grad_()
        for cut in worker:
            sums = loss.fused(blocks.cut(cut), copy, head)
            divisor = sums.denominator.clamp(min=1e-9) if divide_each else 1.0
            (sums.numerator / divisor).backward()
            totals += sums.vector()[:2]
            parts += 1
        assert copy.grad is not None
        gradient += copy.grad
    return (gradient / parts if divide_each else gradient / totals[1]), totals[0] / totals[1]


def _check_layout(layout: Sequence[Sequence[slice]], loss: Loss, *, divide_each: bool = False) -> None:
    expected, mean = _step([[slice(0, 6)]], loss)
    gradient, found = _step(layout, loss, divide_each=divide_each)
    assert found.item() == pytest.approx(mean.item(), rel=DIGITS)
    assert _error(gradient, expected) < DIGITS, "the gradient depends on the layout"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("soft_weight", [0.0, 0.4], ids=["hard", "mix"])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_changing_the_batch_layout_does_not_change_the_gradient(
    weighting: Weighting, soft_weight: float, name: str
) -> None:
    """Anatomy 8, item 5: the same learning rate whatever the batch layout. Dividing per micro-batch fails the check."""
    loss = Loss(weighting, soft_weight)
    _check_layout(LAYOUTS[name], loss)
    with pytest.raises(AssertionError, match="the gradient depends on the layout"):
        _check_layout(LAYOUTS[name], loss, divide_each=True)


@pytest.mark.parametrize("soft_weight", [0.0, 0.4], ids=["hard", "mix"])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_every_weighting_has_one_denominator_on_every_path(weighting: Weighting, soft_weight: float) -> None:
    """Anatomy 6.25, Automodel#2572: two paths of D-PACE differed by 15, the slots of a block.

    Where all rows lose the same, their weighted mean is that loss: true only of sum(m * w). The denominators that
    others use, rows and blocks, give something else here.
    """
    blocks, weight, head = _problem()
    loss = Loss(weighting, soft_weight)
    even = replace(blocks, teacher_MKD=torch.zeros_like(blocks.teacher_MKD))
    one = loss.fused(even, torch.zeros_like(weight), head)
    expected = (1 - soft_weight) * math.log(V)
    assert (one.numerator / one.denominator).item() == pytest.approx(expected, rel=DIGITS)
    for other in (one.slot_count.sum(), one.blocks):
        assert (one.numerator / other).item() != pytest.approx(expected, rel=0.05)

    whole = loss.fused(blocks, weight, head)
    assert whole.denominator.item() == pytest.approx(loss.dense(blocks, weight, head)[1].item(), rel=DIGITS)
    for chunk_rows in (1, 9):
        cut = loss.fused(blocks, weight, head, chunk_rows)
        assert cut.denominator.item() == pytest.approx(whole.denominator.item(), rel=DIGITS)
    parts = [loss.fused(blocks.cut(slice(i, i + 1)), weight, head).denominator for i in range(M)]
    assert torch.stack(parts).sum().item() == pytest.approx(whole.denominator.item(), rel=DIGITS)
