"""Head and loss in one pass, against plain dense formulas in float64 and values written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.errors import DFlashError
from dflash.objective import LossSums, Weighting, default_gamma, head_loss, make_rows, send

WEIGHTINGS = [Weighting("decay", gamma=3.0), Weighting("dpace", alpha=0.5), Weighting("dpace", alpha=0.1)]


def _dpace_by_loops(loss: list[list[float]], valid: list[list[bool]], alpha: float) -> list[list[float]]:
    """The docstring's formula, slot by slot."""
    table = []
    for losses, supervised in zip(loss, valid, strict=True):
        reach, product = [], 1.0
        for ce, m in zip(losses, supervised, strict=True):
            product *= (1 - alpha) * math.exp(-ce) + alpha if m else 1.0
            reach.append(product)
        row = []
        for i in range(len(losses)):
            later = sum(reach[t] for t in range(i, len(losses)) if supervised[t])
            row.append(later if supervised[i] else 0.0)
        table.append(row)
    return table


def _problem(num_blocks: int = 6, block_size: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states (M*K, D), head (V, D), labels and validity (M, K) with holes, an empty and a full block."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_blocks * block_size, 8, generator=generator)
    head = torch.randn(23, 8, generator=generator)
    labels = torch.randint(0, 23, (num_blocks, block_size), generator=generator)
    valid = torch.rand(num_blocks, block_size, generator=generator) < 0.6
    valid[:, 0] = False
    valid[1], valid[2, 1:] = False, True
    return states, head, labels, valid


def _plain(
    states: Tensor, head: Tensor, labels: Tensor, valid: Tensor, weighting: Weighting, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return numerator, denominator and gradient of the states, dense over all slots, in float64 by autograd."""
    leaf = states.double().requires_grad_()
    logits = leaf @ head.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels.reshape(-1), reduction="none").view(labels.shape)
    if weighting.kind == "decay":
        slots = torch.arange(labels.shape[1], dtype=torch.float64)
        weights = torch.exp(-(slots - 1) / weighting.gamma).expand(labels.shape) * valid
    else:
        masked = torch.where(valid, loss, 0.0).detach().tolist()
        weights = torch.tensor(_dpace_by_loops(masked, valid.tolist(), weighting.alpha), dtype=torch.float64)
    numerator = (weights * loss).sum()
    (gradient,) = torch.autograd.grad(numerator, leaf)
    return numerator.detach(), weights.sum(), gradient


def _ours(
    states: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    weighting: Weighting,
    chunk_rows: int = 1000,
    softcap: float | None = None,
) -> tuple[LossSums, Tensor]:
    """Return the sums and the gradient of all states through the supervised rows only."""
    leaf = states.clone().requires_grad_()
    rows = make_rows(labels, valid, chunk_rows)
    sums = head_loss(leaf[rows.index_R], head, rows, weighting, softcap=softcap)
    (gradient,) = torch.autograd.grad(sums.numerator, leaf)
    return sums, gradient


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_loss_and_gradient_are_those_of_a_plain_dense_computation(weighting: Weighting, softcap: float | None) -> None:
    """SpecForge#716 (a fused loss against its reference); Automodel#2572 (one denominator, the sum of m * w)."""
    problem = _problem()
    numerator, denominator, gradient = _plain(*problem, weighting, softcap)
    sums, ours = _ours(*problem, weighting, softcap=softcap)
    torch.testing.assert_close(sums.numerator.double(), numerator, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums.denominator.double(), denominator, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.double(), gradient, rtol=0, atol=2e-6)
    assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_gradient_of_the_mean_loss_is_the_gradient_of_the_numerator_divided(weighting: Weighting) -> None:
    states, head, labels, valid = _problem()
    _, denominator, gradient = _plain(states, head, labels, valid, weighting)
    leaf = states.clone().requires_grad_()
    rows = make_rows(labels, valid, 1000)
    sums = head_loss(leaf[rows.index_R], head, rows, weighting)
    (sums.numerator / sums.denominator).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), gradient / denominator, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("chunk_rows", [1, 3, 9])
def test_chunks_change_memory_and_not_results(weighting: Weighting, chunk_rows: int) -> None:
    problem = _problem()
    whole, whole_gradient = _ours(*problem, weighting, chunk_rows=1000)
    cut, cut_gradient = _ours(*problem, weighting, chunk_rows=chunk_rows)
    assert len(make_rows(problem[2], problem[3], 1000).chunks) == 1
    assert len(make_rows(problem[2], problem[3], chunk_rows).chunks) > 1
    torch.testing.assert_close(cut.vector(), whole.vector(), rtol=1e-6, atol=0)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_sums_of_micro_batches_are_the_sums_of_the_batch(weighting: Weighting) -> None:
    """The learning rate must not depend on how a batch is cut over ranks or accumulation steps (anatomy 2.5)."""
    states, head, labels, valid = _problem()
    whole, whole_gradient = _ours(states, head, labels, valid, weighting)
    parts, gradients = [], []
    for first, end in ((0, 1), (1, 4), (4, 6)):
        cut = slice(first, end)
        sums, gradient = _ours(states[first * 5 : end * 5], head, labels[cut], valid[cut], weighting)
        parts.append(sums.vector())
        gradients.append(gradient)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole.vector(), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat(gradients), whole_gradient, rtol=0, atol=1e-6)
    means = torch.stack([part[0] / part[1] for part in parts if part[1] > 0])
    assert not torch.isclose(means.mean(), whole.numerator / whole.denominator, rtol=1e-3)


def test_a_chunk_holds_whole_blocks_and_about_the_asked_number_of_rows() -> None:
    _, _, labels, valid = _problem(num_blocks=40)
    rows = make_rows(labels, valid, chunk_rows=13)
    assert [first for first, _, _ in rows.chunks[1:]] == [end for _, end, _ in rows.chunks[:-1]]
    assert (rows.chunks[0][0], rows.chunks[-1][1]) == (0, int(valid.sum()))
    blocks = rows.index_R // 5
    for first, end, num_blocks in rows.chunks:
        assert 0 < end - first <= 13
        assert int(rows.block_R[first:end].max()) < num_blocks
        if first:
            assert blocks[first] != blocks[first - 1]


def test_rows_are_the_supervised_slots_and_nothing_else() -> None:
    labels = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    valid = torch.tensor([[False, True, False], [False, False, False], [False, True, True]])
    rows = make_rows(labels, valid, 1000)
    assert rows.index_R.tolist() == [1, 7, 8]
    assert rows.slot_R.tolist() == [1, 1, 2]
    assert rows.label_R.tolist() == [2, 8, 9]


def test_decay_weights_of_the_paper() -> None:
    """Anatomy 2.5: B = 16, gamma = 7 sums to 6.63; B = 10 to 4.60; B = 8 to 3.74. Slot 1 weighs 1."""
    for block_size, total in ((16, 6.63), (10, 4.60), (8, 3.74)):
        weighting = Weighting("decay", gamma=default_gamma(block_size))
        valid = torch.ones(1, block_size, dtype=torch.bool)
        valid[:, 0] = False
        weights = weighting.slot_weights(torch.zeros(1, block_size), valid)[0]
        assert weights[:2].tolist() == [0.0, 1.0]
        assert weights.sum().item() == pytest.approx(total, abs=0.005)
    table = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.277, 0.240, 0.208, 0.180, 0.156, 0.135]
    valid = torch.tensor([[False] + [True] * 15])
    weights = Weighting("decay", gamma=7.0).slot_weights(torch.zeros(1, 16), valid)[0, 1:]
    assert weights.tolist() == pytest.approx(table, abs=6e-4)
    assert default_gamma(12) == 6.0


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_those_of_the_formula_in_loops(alpha: float) -> None:
    """Automodel#2572: two paths of one project differed 15-fold."""
    _, _, _, valid = _problem(num_blocks=8, block_size=7)
    loss = torch.rand(8, 7, generator=torch.Generator().manual_seed(1)) * 4 * valid
    weights = Weighting("dpace", alpha=alpha).slot_weights(loss, valid)
    expected = torch.tensor(_dpace_by_loops(loss.tolist(), valid.tolist(), alpha))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_dpace_by_hand() -> None:
    """alpha = 0.5 and CE = ln 2 give s = 0.75; a hole counts as certain and gets no weight."""
    valid = torch.tensor([[False, True, True, True], [False, True, False, True]])
    loss = torch.where(valid, math.log(2.0), 0.0)
    weights = Weighting("dpace", alpha=0.5).slot_weights(loss, valid)
    c1, c2, c3 = 0.75, 0.75**2, 0.75**3
    expected = [[0, c1 + c2 + c3, c2 + c3, c3], [0, c1 + c2, 0, c2]]
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_weights_of_dpace_carry_no_gradient() -> None:
    loss = torch.rand(2, 4, requires_grad=True)
    assert not Weighting("dpace").slot_weights(loss, torch.ones(2, 4, dtype=torch.bool)).requires_grad


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(DFlashError, match="'linear' is neither decay nor dpace"):
        Weighting("linear")


def _hits(right: list[list[int]], valid: list[list[int]]) -> LossSums:
    """Return the sums of blocks whose top token is the label where `right` is 1."""
    flags, mask = torch.tensor(right, dtype=torch.bool), torch.tensor(valid, dtype=torch.bool)
    labels = torch.full(flags.shape, 2)
    states = F.one_hot(torch.where(flags, 2, 0), 4).float().reshape(-1, 4)
    rows = make_rows(labels, mask, 1000)
    return head_loss(states[rows.index_R], torch.eye(4), rows, Weighting())


def test_hits_are_counted_by_slot_and_the_leading_run_by_block() -> None:
    sums = _hits(
        right=[[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]],
        valid=[[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]],
    )
    assert sums.slot_count.tolist() == [0, 5, 4, 4]
    assert sums.slot_correct.tolist() == [0, 4, 3, 3]
    # reached: every earlier slot of the block was a hit; accepted: this one too
    assert sums.slot_reached.tolist() == [0, 5, 3, 1]
    assert sums.slot_accepted.tolist() == [0, 4, 2, 0]
    # 2, 1, 0, then 2 to the end of the text, then 1 up to the hole; the last block has no supervised slot
    assert sums.accepted.item() == 2 + 1 + 0 + 2 + 1
    assert sums.blocks.item() == 5


def test_the_vector_holds_all_sums_in_a_fixed_order() -> None:
    sums = _hits(right=[[0, 1, 1, 0]], valid=[[0, 1, 1, 1]])
    scalars = [sums.numerator.item(), sums.denominator.item(), 2, 1]
    correct, count, accepted, reached = [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]
    expected = [*scalars, *correct, *count, *accepted, *reached]
    assert sums.vector().tolist() == pytest.approx(expected)
    assert not sums.vector().requires_grad


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_batch_with_nothing_supervised_has_zero_loss_and_zero_gradient(weighting: Weighting) -> None:
    """A rank without anchors must still take part in the step (Automodel#2468, #2476)."""
    states, head, labels, valid = _problem()
    sums, gradient = _ours(states, head, labels, torch.zeros_like(valid), weighting)
    assert sums.vector().tolist() == [0.0] * (4 + 4 * 5)
    assert gradient.shape == states.shape and not gradient.any()


def test_the_frozen_head_gets_no_gradient() -> None:
    states, head, labels, valid = _problem()
    head.requires_grad_()
    rows = make_rows(labels, valid, 1000)
    leaf = states.requires_grad_()
    head_loss(leaf[rows.index_R], head, rows, Weighting()).numerator.backward()
    assert head.grad is None
    assert leaf.grad is not None and leaf.grad.any()


def test_unsupervised_rows_of_the_states_get_no_gradient() -> None:
    problem = _problem()
    _, gradient = _ours(*problem, Weighting())
    supervised = problem[3].reshape(-1)
    assert gradient[supervised].any(-1).all()
    assert not gradient[~supervised].any()


def test_bf16_states_are_reduced_in_float32() -> None:
    """A bf16 sum of this many losses of about 3 would stop growing at 1024."""
    states, head, labels, valid = _problem(num_blocks=400)
    states, head = states.bfloat16(), head.bfloat16()
    sums, gradient = _ours(states, head, labels, valid, Weighting("decay", gamma=1e9))
    numerator, denominator, expected = _plain(states, head, labels, valid, Weighting("decay", gamma=1e9))
    assert numerator > 2048
    assert sums.numerator.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert sums.denominator.item() == pytest.approx(denominator.item(), rel=1e-6)
    assert sums.numerator.item() == pytest.approx(numerator.item(), rel=2e-3)
    assert (gradient.double() - expected).norm() < 0.01 * expected.norm()


def test_memory_follows_the_chunk_and_not_the_batch() -> None:
    """A logits tensor of all rows is the largest of a step (SpecForge#716: 7.58 against 3.67 GiB)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    _, _, labels, valid = _problem(num_blocks=60)
    vocab, states, head = 500, torch.randn(300, 8), torch.randn(500, 8)

    def largest(chunk_rows: int) -> int:
        rows = make_rows(labels, valid, chunk_rows)
        with Largest() as seen:
            head_loss(states[rows.index_R], head, rows, Weighting())
        return seen.elements

    assert largest(1000) == int(valid.sum()) * vocab
    assert largest(20) <= 20 * vocab


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"gamma": 0.0}, "gamma: 0.0 is not above 0"),
        ({"gamma": -1.0}, "gamma: -1.0 is not above 0"),
        ({"alpha": 2.0}, "dpace_alpha: 2.0 is not in [0, 1]"),
        ({"kind": "cosine"}, "loss: 'cosine' is neither"),
    ],
)
def test_a_weighting_that_would_grow_or_divide_by_zero_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(DFlashError) as caught:
        Weighting(**values)
    assert str(caught.value).startswith(line)


def test_a_head_of_another_dtype_and_a_supervised_anchor_are_refused() -> None:
    states, head, labels, valid = _problem()
    rows = make_rows(labels, valid, 10)
    with pytest.raises(DFlashError, match=r"states are torch.float32 and the head is torch.float64"):
        head_loss(states[rows.index_R], head.double(), rows, WEIGHTINGS[0])
    anchor = valid.clone()
    anchor[2, 0] = True
    with pytest.raises(DFlashError, match="slot 0 of a block is supervised"):
        make_rows(labels, anchor, 10)


def test_what_is_sent_to_the_host_is_there() -> None:
    """A copy that does not wait would be read before it has ended; only the way to a GPU needs no waiting."""
    sent: list[bool] = []

    class Watched(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            sent.append(kwargs["non_blocking"])
            return self

    send(torch.ones(2).as_subclass(Watched), "cpu")
    assert sent == [False]
