"""The implementations give the same numbers. Flex on a GPU is in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash.attention import block_attention, build_mask, choose_attention
from dflash.errors import DFlashError
from dflash.masks import MaskLayout


def _inputs(dtype: torch.dtype, layout: MaskLayout, num_anchors: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_queries = num_anchors * layout.block_size
    q = torch.randn(2, 4, num_queries, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, layout.context_len + num_queries, 16, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _one_row_at_a_time(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by its definition; query head j reads key head j // (heads per key head)."""
    out = torch.empty_like(q)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for j in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = torch.ones(k.shape[2], dtype=torch.bool) if mask is None else mask[b, 0, i]
                keys, values = k[b, j // share, seen], v[b, j // share, seen]
                weight = torch.exp(keys @ q[b, j, i] / q.shape[-1] ** 0.5)
                out[b, j, i] = (weight / weight.sum()) @ values
    return out


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("masked", [True, False])
def test_dense_attention_with_shared_heads_follows_the_definition(
    implementation: str, dtype: torch.dtype, tolerance: float, masked: bool
) -> None:
    layout = MaskLayout(context_len=9, block_size=4, window=5, causal=True)
    q, k, v = _inputs(dtype, layout, num_anchors=3)
    mask = build_mask(torch.tensor([[2, 5, 0], [1, 4, 8]]), layout, implementation) if masked else None
    assert mask is None or isinstance(mask, Tensor)
    expected = _one_row_at_a_time(q.double(), k.double(), v.double(), mask)
    out = block_attention(q, k, v, mask, implementation)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_sdpa_and_eager_have_the_same_gradients(dtype: torch.dtype, tolerance: float) -> None:
    layout = MaskLayout(context_len=20, block_size=4)
    anchors = torch.tensor([[3, 9, 12, 0], [0, 1, 17, 18]])
    gradients = {}
    for implementation in ("sdpa", "eager"):
        leaves = q, k, v = _inputs(dtype, layout, num_anchors=4)
        for leaf in leaves:
            leaf.requires_grad_()
        out = block_attention(q, k, v, build_mask(anchors, layout, implementation), implementation)
        gradients[implementation] = torch.autograd.grad(out.square().sum(), leaves)
    for ours, theirs in zip(gradients["sdpa"], gradients["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_places_without_an_anchor_give_finite_numbers() -> None:
    """Padding blocks gave NaN under SDPA elsewhere (Automodel#2826)."""
    layout = MaskLayout(context_len=20, block_size=4)
    q, k, v = _inputs(torch.float32, layout, num_anchors=4)
    anchors = torch.zeros(2, 4, dtype=torch.long)
    for implementation in ("sdpa", "eager"):
        mask = build_mask(anchors, layout, implementation)
        assert isinstance(mask, Tensor)
        assert block_attention(q, k, v, mask, implementation).isfinite().all()
        emptied = mask.clone()
        emptied[:, :, :4] = False
        if implementation == "eager":
            assert block_attention(q, k, v, emptied, implementation).isnan().any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_without_gradients_agrees_with_eager_on_the_cpu() -> None:
    layout = MaskLayout(context_len=140, block_size=10, window=60, causal=True)
    q, k, v = _inputs(torch.float32, layout, num_anchors=14)
    drawn = torch.randperm(139, generator=torch.Generator().manual_seed(0))[:26].view(2, 13).sort().values
    anchors = torch.cat((drawn, torch.zeros(2, 1, dtype=torch.long)), 1)
    out = block_attention(q, k, v, build_mask(anchors, layout, "flex"), "flex")
    expected = block_attention(q, k, v, build_mask(anchors, layout, "eager"), "eager")
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_auto_is_flex_on_cuda_and_sdpa_elsewhere() -> None:
    assert choose_attention("auto", torch.device("cuda", 0)) == "flex"
    assert choose_attention("auto", torch.device("cpu")) == "sdpa"
    assert choose_attention("eager", torch.device("cuda")) == "eager"


def test_flex_on_the_cpu_is_refused_instead_of_replaced() -> None:
    """TorchSpec drops the mask on a CPU without a word (anatomy 2.7)."""
    with pytest.raises(DFlashError) as caught:
        choose_attention("flex", torch.device("cpu"))
    assert str(caught.value) == "attention: flex attention has no backward on cpu. Use sdpa there."
    assert choose_attention("flex", torch.device("cuda")) == "flex"


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(DFlashError, match=r"'flash' is not one of flex, sdpa, eager"):
        choose_attention("flash", torch.device("cpu"))
