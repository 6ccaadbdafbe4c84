"""The Triton kernels as a GPU runs them, against torch in float64; tests/unit has them interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional as F

from benchmarks.step import jitted_kernels
from dflash.acceptance import layer_masks
from dflash.kernels import entropy, norm_rope
from dflash.model import DFlashDraftModel, RMSNorm, rotate, rotation
from dflash.objective import Weighting, head_loss, make_rows
from tests.drafters import random_drafter

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def _chunk(num_rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (R, V), labels and weights on the GPU; in two rows the largest logit stands twice."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[0, [70, vocab - 1]] = 40.0
    logits[1, [30, 31]] = 40.0
    labels = torch.randint(0, vocab, (num_rows,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    return logits.to(dtype).cuda(), labels.cuda(), torch.rand(num_rows, generator=generator).cuda()


@DTYPES
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.5, None), (1.0, 5.0), (1.7, 30.0)])
@pytest.mark.parametrize("vocab", [151_936, 49_153, 320])
def test_loss_and_gradient_are_those_of_cross_entropy(
    vocab: int, multiplier: float, softcap: float | None, dtype: torch.dtype
) -> None:
    logits, labels, weights = _chunk(37, vocab, dtype)
    leaf = logits.double().requires_grad_()
    scaled = leaf * multiplier
    if softcap is not None:
        scaled = softcap * torch.tanh(scaled / softcap)
    loss = F.cross_entropy(scaled, labels, reduction="none")
    (expected,) = torch.autograd.grad((weights.double() * loss).sum(), leaf)

    found = entropy.row_statistics(logits, labels, multiplier, softcap)
    assert (found.total_R.log() - found.gold_R - loss.detach()).abs().max() < 1e-4
    assert torch.equal(found.best_R, scaled.argmax(1))
    assert found.best_R[:2].tolist() == [70, 30]
    assert entropy.gradient_(logits, labels, found, weights, multiplier, softcap) is logits
    limit = 4e-3 if dtype == torch.bfloat16 else 5e-5
    assert _error(logits, expected) < limit
    if softcap is not None:  # one without the softcap's slope would be noticed
        assert _error(expected / (1 - (scaled / softcap).square()), expected) > 5 * limit


def _loss_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bf16 states (M*K, D) and head (V, D) on the GPU, labels and validity (M, K) on the host."""
    generator = torch.Generator().manual_seed(4)
    states, head = torch.randn(90 * 16, 64, generator=generator), torch.randn(4099, 64, generator=generator) / 4
    labels = torch.randint(0, 4099, (90, 16), generator=generator)
    valid = torch.rand(90, 16, generator=generator) < 0.7
    valid[:, 0] = False
    return states.bfloat16().cuda(), head.bfloat16().cuda(), labels, valid


@pytest.fixture
def chunks() -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what runs the loss of one chunk, and what runs that of many, whose labels begin at odd offsets too."""
    states, head, labels, valid = _loss_problem()
    one = valid.clone()
    one[20:] = False  # 300 rows are 20 blocks

    def run(valid: Tensor) -> int:
        rows = make_rows(labels, valid, 300).to("cuda")
        leaf = states.clone().requires_grad_()
        head_loss(leaf[rows.index_R], head, rows, Weighting("dpace")).numerator.backward()
        return sum(first % 2 for first, _, _ in rows.chunks)

    def run_one() -> None:
        assert run(one) == 0

    def run_many() -> None:
        assert run(valid) > 0

    return run_one, run_many


def test_labels_at_odd_offsets_compile_nothing(chunks: tuple[Callable[[], None], Callable[[], None]]) -> None:
    """The gate does not see Triton compile: no step after the warm-up may, wherever its chunks begin."""
    chunks[0]()
    with jitted_kernels() as names:
        chunks[1]()
    assert names == []


@pytest.mark.parametrize("name", ["_statistics", "_gradient"])
def test_a_kernel_that_is_specialized_on_its_labels_address_would_compile_again(
    name: str, chunks: tuple[Callable[[], None], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entropy, name, triton.jit(getattr(entropy, name).fn))
    chunks[0]()
    with jitted_kernels() as names:
        chunks[1]()
    assert len(names) == 1 and names[0].endswith(name)


def _heads(width: int, rope_batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return projections (b, L, X), a weight, a rotation and a gradient that lies as attention leaves it."""
    generator = torch.Generator().manual_seed(1)
    b, heads, length = 2, 8, 1003
    x = torch.randn(b, length, heads * width, generator=generator).to(dtype).cuda()
    weight = (torch.rand(width, generator=generator) + 0.5).to(dtype).cuda()
    rope = rotation(torch.randint(0, 30_000, (rope_batch, length), generator=generator).cuda(), width, 1e6, dtype)
    upstream = torch.randn(b, length, heads, width, generator=generator).to(dtype).cuda().transpose(1, 2)
    return x, weight, rope, upstream


def _normed_and_rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = norm_rope.norm_rope(x, weight, cos, sin, 1e-6)
    return out


@DTYPES
@pytest.mark.parametrize("rope_batch", [1, 2])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_output_and_gradients_are_those_of_the_norm_and_the_rotation(
    compiled: bool, width: int, rope_batch: int, dtype: torch.dtype
) -> None:
    x, weight, rope, upstream = _heads(width, rope_batch, dtype)
    norm = RMSNorm(width, 1e-6).double().cuda()
    norm.weight.data.copy_(weight)
    leaf = x.double().requires_grad_()
    wide = rotate(norm(leaf.unflatten(-1, (-1, width)).transpose(1, 2)), (rope[0].double(), rope[1].double()))
    expected = (wide.detach(), *torch.autograd.grad(wide, (leaf, norm.weight), upstream.double()))

    torch.compiler.reset()  # else the eight cases are one function's recompiles, of which torch allows eight
    run: Any = torch.compile(_normed_and_rotated, dynamic=False, fullgraph=True) if compiled else _normed_and_rotated
    leaves = (x.requires_grad_(), weight.requires_grad_())
    limit = 5e-3 if dtype == torch.bfloat16 else 1e-5
    bits = []
    for _ in range(2):
        out = run(*leaves, *rope)
        found = (out.detach(), *torch.autograd.grad(out, leaves, upstream))
        for part, ours, reference in zip(("out", "x", "weight"), found, expected, strict=True):
            assert ours.dtype == dtype and _error(ours, reference) < limit, part
        bits.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True)), "a sum depends on which program is first"
    # Another token's rotation would be noticed.
    assert _error(run(*leaves, *(r.roll(1, dims=2) for r in rope)), expected[0]) > 10 * limit


def _run(drafter: DFlashDraftModel, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the states of training's blocks and every parameter's gradient, float64 on the CPU."""
    generator, config = torch.Generator().manual_seed(3), drafter.config
    features = torch.randn(2, 90, config.feature_size, generator=generator)
    embeddings, mask = torch.randn(2, 9, 64, generator=generator), torch.randn(64, generator=generator)
    anchors = torch.stack([torch.randperm(89, generator=generator)[:9].sort().values for _ in range(2)]).to(device)
    positions = (anchors[:, :, None] + torch.arange(config.block_size, device=device)).flatten(1)
    states = drafter.forward_blocks(
        features.to(device, dtype),
        embeddings.to(device, dtype),
        mask.to(device, dtype),
        positions,
        layer_masks(drafter, anchors, 90, "sdpa", apart=drafter.drafts_slots_apart),
        "sdpa",
        torch.arange(90, device=device)[None],
    )
    weight = torch.randn(states.shape, generator=generator).to(device, dtype)
    named = {name: p for name, p in drafter.named_parameters() if not name.startswith("candidate_selector.")}
    gradients = torch.autograd.grad((states * weight).sum(), list(named.values()))
    return states.detach().double().cpu(), {
        name: gradient.double().cpu() for name, gradient in zip(named, gradients, strict=True)
    }


@pytest.mark.parametrize("settings", [{"head_dim": 64}, {"head_dim": 128}, {"conv_kernel_size": 2, "selector_rank": 8}])
def test_the_drafter_on_the_gpu_is_the_float64_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, the block's keys and the context's of both layers go through the kernel there, and nowhere else."""
    calls = []
    kernel = norm_rope.norm_rope

    def counted(*given: Any) -> Any:
        calls.append(given[0].device.type)
        return kernel(*given)

    monkeypatch.setattr(norm_rope, "norm_rope", counted)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # eager code keeps off it (dflash/model.py)
    expected, expected_gradients = _run(random_drafter(dtype=torch.float64, **settings), "cpu", torch.float64)
    assert calls == []
    found, gradients = _run(random_drafter(**settings).cuda(), "cuda", torch.float32)
    assert calls == ["cuda"] * 6
    assert _error(found, expected) < 1e-5
    for name, reference in expected_gradients.items():
        assert _error(gradients[name], reference) < 1e-4, name
