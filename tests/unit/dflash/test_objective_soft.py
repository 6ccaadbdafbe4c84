"""Soft labels by hand, what they leave alone, and what the fused loss never does: wait for the device, keep logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.errors import DFlashError
from dflash.objective import LossSums, Rows, Weighting, head_loss, make_rows
from dflash.soft_labels import Teacher, divergence_

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTINGS = [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.3)]
NAMES = ["decay", "dpace"]


def _teacher(state_RD: Tensor, multiplier: float = 1.0, softcap: float | None = None) -> Teacher:
    return Teacher(state_RD=state_RD, multiplier=multiplier, softcap=softcap)


def _problem(
    vocab: int = 23, num_blocks: int = 6, chunk_rows: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Return the drafter's and the target's states of the supervised rows (R, D), the head (V, D), and the rows."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, vocab, (num_blocks, 5), generator=generator)
    valid = torch.rand(num_blocks, 5, generator=generator) < 0.7
    valid[:, 0] = False
    rows = make_rows(labels, valid, chunk_rows)
    states, taught = torch.randn(2, len(rows.index_R), 8, generator=generator).to(dtype)
    return states, taught, torch.randn(vocab, 8, generator=generator).to(dtype), rows


def _row(drafter: list[float], teacher: list[float], label: int, soft_weight: float) -> tuple[LossSums, Tensor]:
    """Return the sums and the gradient of one row of weight 1, whose probabilities are the given ones."""
    rows = make_rows(torch.tensor([[0, label]]), torch.tensor([[False, True]]), 8)
    states = torch.tensor([drafter], dtype=torch.float64).log().requires_grad_()
    taught = _teacher(torch.tensor([teacher], dtype=torch.float64).log())
    head = torch.eye(len(drafter), dtype=torch.float64)
    sums = head_loss(states, head, rows, Weighting(), soft_weight=soft_weight, teacher=taught)
    (gradient,) = torch.autograd.grad(sums.numerator, states)
    return sums, gradient[0]


def test_the_divergence_is_forward_kl_by_hand() -> None:
    """KL(teacher || drafter) of (3/4, 1/4, 0+) and (1/2, 1/4, 1/4) is 3/4 ln 3/2; the gradient is q - p."""
    sums, gradient = _row([0.5, 0.25, 0.25], [0.75, 0.25, 1e-300], label=2, soft_weight=1.0)
    assert sums.numerator.item() == pytest.approx(0.75 * math.log(1.5), rel=1e-12)
    assert gradient.tolist() == pytest.approx([-0.25, 0.0, 0.25], abs=1e-12)


def test_a_mix_is_the_weighted_sum_of_both_losses_by_hand() -> None:
    sums, gradient = _row([0.5, 0.25, 0.25], [0.75, 0.25, 1e-300], label=2, soft_weight=0.25)
    assert sums.numerator.item() == pytest.approx(0.75 * math.log(4) + 0.25 * 0.75 * math.log(1.5), rel=1e-12)
    # q - (3/4 onehot + 1/4 p)
    assert gradient.tolist() == pytest.approx([0.5 - 0.1875, 0.25 - 0.0625, 0.25 - 0.75], abs=1e-12)


def test_a_drafter_that_agrees_with_its_target_has_no_soft_loss() -> None:
    sums, gradient = _row([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], label=1, soft_weight=1.0)
    assert sums.numerator.item() == pytest.approx(0.0, abs=1e-15)
    assert gradient.abs().max() < 1e-15


def test_float32_divergences_over_a_wide_vocabulary_are_right_to_a_few_millionths() -> None:
    """From nearly equal distributions to very different ones, whose logits a naive exp would overflow."""
    generator = torch.Generator().manual_seed(0)
    taught = torch.randn(32, 30000, generator=generator) * torch.linspace(0.1, 8, 32)[:, None] + 200
    drafted = taught + torch.randn(32, 30000, generator=generator) * torch.logspace(-3, 0.5, 32)[:, None] - 400
    p, q = taught.double().log_softmax(-1), drafted.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    probabilities = taught.clone()
    found = divergence_(probabilities, drafted.clone())
    assert exact.min() < 1e-5 and exact.max() > 0.3
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(probabilities.double(), p.exp(), rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_soft_labels_change_the_numerator_and_no_other_sum(weighting: Weighting) -> None:
    """Weights come from the hard label's cross-entropy, hits are about the hard label."""
    states, taught, head, rows = _problem()
    hard = head_loss(states, head, rows, weighting)
    soft = head_loss(states, head, rows, weighting, soft_weight=0.5, teacher=_teacher(taught))
    assert soft.numerator.item() != pytest.approx(hard.numerator.item(), rel=1e-3)
    assert soft.vector()[1:].tolist() == hard.vector()[1:].tolist()


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_a_soft_weight_of_zero_is_the_hard_loss_to_the_last_bit(weighting: Weighting) -> None:
    states, taught, head, rows = _problem()
    leaf, given_leaf = states.clone().requires_grad_(), states.clone().requires_grad_()
    hard = head_loss(leaf, head, rows, weighting)
    given = head_loss(given_leaf, head, rows, weighting, soft_weight=0.0, teacher=_teacher(taught))
    hard.numerator.backward()
    given.numerator.backward()
    assert torch.equal(hard.vector(), given.vector())
    assert leaf.grad is not None and given_leaf.grad is not None and torch.equal(leaf.grad, given_leaf.grad)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_no_supervised_row_gives_zeros_with_a_teacher_too(weighting: Weighting) -> None:
    """A rank without anchors must still take part in the step (Automodel#2468, #2476)."""
    rows = make_rows(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool), 8)
    states = torch.randn(15, 8, dtype=torch.float64, requires_grad=True)
    taught = _teacher(torch.empty(0, 8, dtype=torch.float64))
    head = torch.randn(23, 8, dtype=torch.float64)
    sums = head_loss(states[rows.index_R], head, rows, weighting, soft_weight=0.5, teacher=taught)
    (gradient,) = torch.autograd.grad(sums.numerator, states)
    assert sums.vector().tolist() == [0.0] * (4 + 4 * 5)
    assert gradient.shape == (15, 8) and not gradient.any()


def test_the_teacher_and_the_head_get_no_gradient() -> None:
    states, taught, head, rows = _problem()
    leaves = [tensor.clone().requires_grad_() for tensor in (states, taught, head)]
    head_loss(
        leaves[0], leaves[2], rows, Weighting(), soft_weight=0.5, teacher=_teacher(leaves[1])
    ).numerator.backward()
    assert leaves[0].grad is not None and leaves[0].grad.any()
    assert leaves[1].grad is None and leaves[2].grad is None


def test_bf16_soft_labels_are_those_of_float64_to_bf16s_digits() -> None:
    states, taught, head, rows = _problem(num_blocks=100, dtype=torch.bfloat16)

    def step(dtype: torch.dtype) -> tuple[LossSums, Tensor]:
        leaf = states.to(dtype).requires_grad_()
        teacher = _teacher(taught.to(dtype), multiplier=1.2, softcap=20.0)
        sums = head_loss(
            leaf, head.to(dtype), rows, WEIGHTINGS[0], soft_weight=0.5, teacher=teacher, softcap=15.0, multiplier=0.8
        )
        (gradient,) = torch.autograd.grad(sums.numerator, leaf)
        return sums, gradient

    (sums, gradient), (exact, expected) = step(torch.bfloat16), step(torch.float64)
    assert sums.vector().dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert sums.numerator.item() == pytest.approx(exact.numerator.item(), rel=2e-3)
    assert (gradient.double() - expected).norm() < 0.01 * expected.norm()


def test_dividing_a_bf16_loss_does_not_round_the_divisor() -> None:
    """1 / 387 rounded to bf16 is off by 0.2 %, in every gradient alike."""
    states, _, head, rows = _problem(num_blocks=100, dtype=torch.bfloat16)
    gradients = []
    for divisor in (1.0, 387.0):
        leaf = states.clone().requires_grad_()
        (head_loss(leaf, head, rows, Weighting()).numerator / divisor).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.double() * divisor)
    whole, divided = gradients
    assert ((whole * divided).sum() / whole.square().sum()).item() == pytest.approx(1.0, abs=5e-4)
    assert abs(387 * torch.tensor(1 / 387).bfloat16().item() - 1) > 1.5e-3


@pytest.mark.parametrize("soft_weight", [-0.1, 1.5, math.nan])
def test_a_soft_weight_outside_zero_to_one_is_refused(soft_weight: float) -> None:
    states, taught, head, rows = _problem()
    with pytest.raises(DFlashError, match=f"{soft_weight} is not from 0 to 1"):
        head_loss(states, head, rows, Weighting(), soft_weight=soft_weight, teacher=_teacher(taught))


def test_soft_labels_without_a_fitting_teacher_are_refused() -> None:
    """Rows of another batch would train on some other text's predictions."""
    states, taught, head, rows = _problem()

    def soft(teacher: Teacher | None) -> None:
        head_loss(states, head, rows, Weighting(), soft_weight=0.5, teacher=teacher)

    soft(_teacher(taught))
    with pytest.raises(DFlashError, match=r"0\.5 asks for soft labels, and there is no teacher"):
        soft(None)
    with pytest.raises(DFlashError, match=rf"shape \({len(taught) - 1}, 8\), the drafter's \({len(taught)}, 8\)"):
        soft(_teacher(taught[1:]))
    with pytest.raises(DFlashError, match=r"dtype torch\.bfloat16, the drafter's torch\.float32"):
        soft(_teacher(taught.bfloat16()))
    with pytest.raises(DFlashError, match=r"softcap 0\.0 is not positive"):
        _teacher(taught, softcap=0.0)


def test_states_that_were_not_gathered_by_the_rows_are_refused() -> None:
    """Their surplus rows would get a gradient that nobody wrote."""
    states, _, head, rows = _problem()
    with pytest.raises(DFlashError, match=f"{len(states) + 1} states for {len(states)} supervised rows"):
        head_loss(torch.cat([states, states[:1]]), head, rows, Weighting())


class _NoHostSync(TorchDispatchMode):
    """Raises where a GPU would have to answer before the host goes on, also on a machine that has none."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        if name.startswith(self.forbidden) or any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("soft_weight", [0.0, 0.5], ids=["hard", "mix"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=NAMES)
def test_the_loss_asks_for_no_value_on_the_host(
    weighting: Weighting, softcap: float | None, soft_weight: float
) -> None:
    """Anatomy 6.14, SpecForge#715 (`.item()` on the hot path); tests/gpu asks the driver itself."""
    states, taught, head, rows = _problem()
    with _NoHostSync():
        leaf = states.requires_grad_()
        teacher = _teacher(taught, softcap=softcap)
        sums = head_loss(
            leaf, head, rows, weighting, soft_weight=soft_weight, teacher=teacher, softcap=softcap, multiplier=0.5
        )
        (sums.numerator / sums.denominator).backward()
        vector = sums.vector()
    assert len(rows.chunks) > 1 and vector.isfinite().all()


@pytest.mark.parametrize(
    "syncs", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool(x.any())]
)
def test_the_guard_against_host_syncs_sees_them(syncs: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"), _NoHostSync():
        syncs(torch.ones(3))


class _Watch(TorchDispatchMode):
    """Counts operations, and the most bytes that tensors made inside hold at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.calls[func._schema.name] += 1
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for made in out if isinstance(out, tuple) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in given:
                storage = made.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.parametrize(
    ("dtype", "soft_weight", "softcap", "most"),
    [
        (torch.float32, 0.0, None, 1.0),
        (torch.float32, 0.0, 5.0, 2.0),
        (torch.float32, 0.5, None, 2.0 + 4 / 26),
        (torch.float32, 0.5, 5.0, 3.0 + 4 / 26),
        (torch.bfloat16, 0.0, None, 1.5),
        (torch.bfloat16, 0.5, None, 2.5),
    ],
)
def test_memory_is_the_logits_of_one_chunk_and_of_its_teacher(
    dtype: torch.dtype, soft_weight: float, softcap: float | None, most: float
) -> None:
    """Anatomy 6.15, SpecForge#716 (7.58 against 3.67 GiB): in float32 chunks of the largest size,
    26 rows, whose divergence is made 4 at a time."""
    states, taught, head, rows = _problem(vocab=5000, num_blocks=24, chunk_rows=32, dtype=dtype)
    largest = max(end - first for first, end, _ in rows.chunks)
    with _Watch() as seen:
        head_loss(states, head, rows, Weighting(), soft_weight=soft_weight, teacher=_teacher(taught), softcap=softcap)
    assert (len(rows.chunks), largest) == (3, 26)
    assert most - 0.02 < seen.peak / (largest * 5000 * 4) < most + 0.02


def test_only_soft_labels_pay_for_the_teachers_logits() -> None:
    """The hard loss multiplies by the head twice a chunk, forward and back; the teacher adds one."""
    states, taught, head, rows = _problem()
    found = []
    for soft_weight in (0.0, 0.5):
        with _Watch() as seen:
            head_loss(states, head, rows, Weighting(), soft_weight=soft_weight, teacher=_teacher(taught))
        found.append(seen.calls["aten::mm"])
    assert found == [2 * len(rows.chunks), 3 * len(rows.chunks)]
