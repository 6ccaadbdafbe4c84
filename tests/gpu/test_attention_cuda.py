"""Compiled flex attention, the compiled drafter and the head's loss on a real GPU, against dense references.

Five configurations are compiled, each forward and backward; a cold compile costs tens of seconds.
Run with `python -m pytest tests/gpu -m gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

from dflash.acceptance import layer_masks
from dflash.attention import block_attention, build_mask
from dflash.masks import MaskLayout
from dflash.objective import Weighting, head_loss, make_rows
from dflash.soft_labels import Teacher
from tests.drafters import random_drafter

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    """One shape of the attention; `limit` bounds the error's norm, as a part of the reference's norm."""

    dtype: torch.dtype
    layout: MaskLayout
    num_anchors: int
    num_empty: int
    batch: int
    head_dim: int
    limit: float
    document_len: int | None = None
    """Rows are packed with documents of so many tokens; None: one document a row."""


CASES = {
    "float32, full, Q 208": Case(torch.float32, MaskLayout(300, 16), 13, 2, 2, 64, 1e-5),
    "bf16, sliding and causal, Q 640": Case(torch.bfloat16, MaskLayout(1000, 10, 200, True), 64, 9, 1, 64, 1e-2),
    "bf16, full, Q 1000": Case(torch.bfloat16, MaskLayout(1024, 8), 125, 30, 2, 128, 1e-2),
    "bf16, packed, anchor window, Q 640": Case(
        torch.bfloat16, MaskLayout(1000, 10, 100, True, "anchor"), 64, 9, 2, 64, 1e-2, document_len=230
    ),
}


def _anchors(case: Case, seed: int) -> Tensor:
    """Return ascending anchors followed by empty places, (b, N), on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(case.batch):
        drawn = torch.randperm(case.layout.context_len - 1, generator=generator)[: case.num_anchors - case.num_empty]
        rows.append(torch.cat((drawn.sort().values, torch.zeros(case.num_empty, dtype=torch.long))))
    return torch.stack(rows).cuda()


def _mask(case: Case, anchors: Tensor, implementation: str) -> Any:
    starts = None if case.document_len is None else anchors // case.document_len * case.document_len
    return build_mask(anchors, case.layout, implementation, starts)


def _leaves(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return q with 6 heads, and k and v with 2, in the case's precision."""
    generator = torch.Generator().manual_seed(1)
    num_queries = case.num_anchors * case.layout.block_size
    q = torch.randn(case.batch, 6, num_queries, case.head_dim, generator=generator)
    k, v = torch.randn(2, case.batch, 2, case.layout.context_len + num_queries, case.head_dim, generator=generator)
    return q.cuda().to(case.dtype), k.cuda().to(case.dtype), v.cuda().to(case.dtype)


def _run(attention: Any, case: Case, anchors: Tensor, implementation: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of q, k and v as float64."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in _leaves(case)]
    out = attention(*leaves, _mask(case, anchors, implementation), implementation)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).cuda().to(dtype)
    return [tensor.detach().double() for tensor in (out, *torch.autograd.grad(out, leaves, upstream))]


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_compiled_flex_has_the_numbers_of_eager_forward_and_backward(name: str) -> None:
    case = CASES[name]
    compiled = torch.compile(block_attention, dynamic=False, fullgraph=True)
    anchors = _anchors(case, seed=0)
    found = _run(compiled, case, anchors, "flex", case.dtype)
    expected = _run(block_attention, case, anchors, "eager", torch.float64)
    for part, ours, reference in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert ours.isfinite().all(), part
        assert _error(ours, reference) < case.limit, part

    # Other anchors are other numbers in the same kernel: nothing is compiled again.
    graphs = counters["stats"]["unique_graphs"]
    moved = _anchors(case, seed=5)
    found = _run(compiled, case, moved, "flex", case.dtype)
    assert counters["stats"]["unique_graphs"] == graphs
    assert _error(found[0], expected[0]) > 10 * case.limit, "the comparison would not notice a wrong mask"
    for ours, reference in zip(found, _run(block_attention, case, moved, "eager", torch.float64), strict=True):
        assert _error(ours, reference) < case.limit


def test_the_compiled_drafter_has_the_states_and_gradients_of_eager() -> None:
    """Mixed layers, so two masks in one graph; N * B = 210 is no multiple of 128 (SpecForge#501)."""
    drafter = random_drafter(
        block_size=10,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=40,
        is_causal=True,
    ).cuda()
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(2, 190, drafter.config.feature_size, generator=generator).cuda()
    embeddings = torch.randn(2, 210, 64, generator=generator).cuda()
    anchors = torch.stack([torch.randperm(189, generator=generator)[:21].sort().values for _ in range(2)]).cuda()
    positions = (anchors[:, :, None] + torch.arange(10, device="cuda")).flatten(1)

    def run(model: Any, implementation: str) -> tuple[Tensor, list[Tensor]]:
        masks = layer_masks(drafter, anchors, 190, implementation)
        states = model(features, embeddings, positions, masks, implementation)
        return states.detach(), list(torch.autograd.grad(states.square().mean(), list(drafter.parameters())))

    found, gradients = run(torch.compile(drafter, dynamic=False), "flex")
    expected, expected_gradients = run(drafter, "eager")
    assert _error(found, expected) < 1e-5
    for (name, _), ours, reference in zip(drafter.named_parameters(), gradients, expected_gradients, strict=True):
        assert _error(ours, reference) < 1e-4, name


def _loss_problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states (M*K, D) and head (V, D) on the GPU, labels and validity (M, K) on the host."""
    generator = torch.Generator().manual_seed(4)
    num_blocks, block_size, width, vocab = 90, 16, 256, 4099
    states = torch.randn(num_blocks * block_size, width, generator=generator)
    head = torch.randn(vocab, width, generator=generator) / 8
    labels = torch.randint(0, vocab, (num_blocks, block_size), generator=generator)
    valid = torch.rand(num_blocks, block_size, generator=generator) < 0.7
    valid[:, 0] = False
    return states.cuda().to(dtype), head.cuda().to(dtype), labels, valid


def test_the_loss_of_bf16_states_is_that_of_a_dense_float64_computation() -> None:
    states, head, labels, valid = _loss_problem(torch.bfloat16)
    leaf = states.double().requires_grad_()
    loss = F.cross_entropy(leaf @ head.double().T, labels.reshape(-1).cuda(), reduction="none")
    slot = torch.arange(16, device="cuda").repeat(len(labels))
    weights = torch.exp(-(slot - 1).double() / 7.0) * valid.reshape(-1).cuda()
    (weights * loss).sum().backward()

    ours = states.clone().requires_grad_()
    rows = make_rows(labels, valid, 300).to("cuda")
    sums = head_loss(ours[rows.index_R], head, rows, Weighting("decay", gamma=7.0))
    sums.numerator.backward()
    assert ours.grad is not None and leaf.grad is not None
    assert len(rows.chunks) > 3
    assert sums.denominator.item() == pytest.approx(weights.sum().item(), rel=1e-5)
    assert sums.numerator.item() == pytest.approx((weights * loss).sum().item(), rel=2e-3)
    assert _error(ours.grad.double(), leaf.grad) < 1e-2


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_the_loss_on_the_gpu_is_the_loss_on_the_cpu(kind: str) -> None:
    states, head, labels, valid = _loss_problem(torch.float32)
    rows = make_rows(labels, valid, 300)
    vectors = []
    for device in ("cuda", "cpu"):
        placed = rows.to(device)
        vectors.append(head_loss(states.to(device)[placed.index_R], head.to(device), placed, Weighting(kind)).vector())
    torch.testing.assert_close(vectors[0].cpu(), vectors[1], rtol=1e-4, atol=0)


@contextmanager
def _no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("weighting", [Weighting("decay"), Weighting("dpace")], ids=["decay", "dpace"])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("soft_weight", [0.0, 0.5])
def test_the_loss_waits_for_no_result_on_the_host(
    weighting: Weighting, softcap: float | None, soft_weight: float
) -> None:
    """`.item()` on the hot path was measured to cost (SpecForge#715)."""
    states, head, labels, valid = _loss_problem(torch.bfloat16)
    rows = make_rows(labels, valid, 300).to("cuda")
    ours = states.requires_grad_()

    def step() -> Tensor:
        teacher = Teacher(state_RD=ours.detach()[rows.index_R], multiplier=1.0, softcap=softcap)
        sums = head_loss(
            ours[rows.index_R], head, rows, weighting, softcap=softcap, soft_weight=soft_weight, teacher=teacher
        )
        (sums.numerator / sums.denominator).backward()
        return sums.vector()

    step()  # libraries set themselves up on first use
    with _no_host_sync():
        sums = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            sums[0].item()
    assert sums.isfinite().all()


@pytest.mark.parametrize("name", ["bf16, full, Q 1000", "bf16, packed, anchor window, Q 640"])
def test_building_the_flex_mask_waits_for_no_result_on_the_host(name: str) -> None:
    """Most trainers rebuild the mask each step with host syncs (anatomy 8)."""
    case = replace(CASES[name], batch=1)
    anchors = _anchors(case, seed=0)
    _mask(case, anchors, "flex")
    with _no_host_sync():
        _mask(case, anchors, "flex")
