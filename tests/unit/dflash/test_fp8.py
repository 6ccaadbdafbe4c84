"""Linear layers in fp8 against float64, and how they follow their weights; torch's fp8 products run on the CPU too."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from dflash import fp8
from dflash.errors import DFlashError
from dflash.fp8 import E4M3, E5M2, Fp8Linear, quantize, refresh, use_fp8
from dflash.model import DraftLayer
from tests.drafters import random_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative rounding of a normal number; it is spread evenly below that: its rms is under this / sqrt(3)."""


def limit(*dtypes: torch.dtype) -> float:
    """Return a bound on the relative error (norms) of a product whose operands' roundings are independent."""
    return float(sum(STEP[dtype] ** 2 / 3 for dtype in dtypes) ** 0.5)


def error(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found.detach().double() - expected).norm() / expected.norm())


def linear(K: int = 48, N: int = 32, *, bias: bool = False) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(nn.Linear(K, N, bias=bias).bfloat16(), "tested")


@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_product_and_gradients_are_those_of_float64_within_the_rounding_of_fp8(num_rows: int) -> None:
    layer = linear(bias=True)
    x = torch.randn(1, num_rows, 48).bfloat16().requires_grad_()
    y = layer(x)
    upstream = torch.randn(y.shape).bfloat16()
    y.backward(upstream)
    W, G, X = (t.detach().double() for t in (layer.weight, upstream[0], x[0]))
    assert y.dtype == x.dtype and y.shape == (1, num_rows, 32)
    assert error(y[0] - layer.bias, X @ W.T) < limit(E4M3, E4M3)
    assert x.grad is not None
    assert error(x.grad[0], G @ W) < limit(E5M2, E4M3)
    assert error(layer.weight.grad, G.T @ X) < limit(E5M2, E4M3)
    assert error(layer.bias.grad, G.sum(0)) < 2**-8 * num_rows**0.5


def test_the_limits_notice_a_dtype_of_one_bit_less(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(), torch.randn(64, 48).bfloat16()
    expected = x.double() @ layer.weight.detach().double().T
    assert error(layer(x), expected) < limit(E4M3, E4M3)
    monkeypatch.setattr(fp8, "E4M3", E5M2)
    assert error(layer(x), expected) > limit(E4M3, E4M3)


def test_zeros_give_zeros() -> None:
    layer = linear()
    x = torch.zeros(5, 48, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.zeros_like(y))
    assert x.grad is not None and layer.weight.grad is not None
    for found in (y, x.grad, layer.weight.grad):
        assert (found == 0).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_shows_in_everything(bad: float) -> None:
    """A saturating cast would hide it as the largest number of fp8."""
    layer = linear()
    x = torch.randn(5, 48).bfloat16()
    x[3, 7] = bad
    x.requires_grad_()
    y = layer(x)
    assert not y[3].isfinite().any()
    y.backward(torch.ones_like(y))
    assert layer.weight.grad is not None and not layer.weight.grad.isfinite().any()


def test_a_row_whose_gradient_is_a_millionth_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot weights and confidence set rows far apart, and one scale serves all; e4m3 would round such a row to zero."""

    def weak_row() -> tuple[Tensor, Tensor]:
        layer = linear()
        x = torch.randn(16, 48).bfloat16().requires_grad_()
        upstream = torch.randn(16, 32).bfloat16()
        upstream[3] *= 1e-6
        layer(x).backward(upstream)
        assert x.grad is not None
        return x.grad[3], upstream[3].double() @ layer.weight.detach().double()

    assert error(*weak_row()) < limit(E5M2, E4M3)
    monkeypatch.setattr(fp8, "E5M2", E4M3)
    assert error(*weak_row()) > 0.5


def test_the_transposed_layout_is_padded_with_zeros() -> None:
    x = torch.randn(37, 16).bfloat16()
    rows, columns, scale = quantize(x, E4M3)
    assert columns.shape == (16, 48)
    assert torch.equal(columns[:, :37].float(), rows.float().T)
    assert (columns[:, 37:].float() == 0).all()
    assert ((rows.float() * scale - x.float()).abs() <= STEP[E4M3] * x.float().abs() + scale * 2**-10).all()


def test_parameters_names_and_state_dict_stay() -> None:
    drafter, expected = random_drafter(), random_drafter()
    linears = use_fp8(drafter)
    assert len(linears) == 2 * 7
    assert [name for name, _ in drafter.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert list(drafter.state_dict()) == list(expected.state_dict())
    assert type(drafter.fc) is nn.Linear


def test_a_width_that_fp8_cannot_take_is_refused_and_the_drafter_stays_as_it_was() -> None:
    drafter = random_drafter(intermediate_size=88)
    with pytest.raises(DFlashError, match=r"layers.0.gate_proj has 88 outputs and 64 inputs, not multiples of 16"):
        use_fp8(drafter)
    assert not any(isinstance(module, Fp8Linear) for module in drafter.modules())


def test_fp8_weights_follow_the_weights_in_place_and_only_when_those_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, because CUDA graphs and compiled code read them where they are."""
    layer, made = linear(), Counter[int]()
    refresh([layer])
    write = fp8.write_both
    monkeypatch.setattr(fp8, "write_both", lambda *given: (made.update([0]), write(*given)))
    before, place = layer.weight8_NK.float() * layer.weight_scale, layer.weight8_NK.data_ptr()
    refresh([layer])
    assert not made
    torch._foreach_copy_([layer.weight.detach()], [layer.weight.detach() * -2])  # as the optimizer publishes
    refresh([layer])
    assert made[0] == 1
    assert layer.weight8_NK.data_ptr() == place
    assert torch.equal(layer.weight8_NK.float() * layer.weight_scale, -2 * before)
    assert torch.equal(layer.weight8_KN.float(), layer.weight8_NK.float().T)


def test_an_uncompiled_call_needs_no_refresh() -> None:
    layer, x = linear(), torch.randn(3, 48).bfloat16()
    y = layer(x)
    with torch.no_grad():
        layer.weight *= 2
    assert torch.equal(layer(x), 2 * y)


def _quantizations(graph: Any) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def test_a_whole_layer_compiles_as_one_graph_and_each_tensor_is_rounded_once() -> None:
    """Seven products read four tensors, and their gradients are six: that of o_proj's and of down_proj's sum is one."""
    drafter = random_drafter(dtype=torch.bfloat16)
    use_fp8(drafter)
    layer, graphs = cast(DraftLayer, drafter.layers[0]), []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def run(x: Tensor) -> Tensor:
        projected = layer.self_attn.project(layer.input_layernorm(x))
        return layer.feed_forward(x) + layer.self_attn.o_proj(torch.cat(projected, -1)[..., :64])

    # As Inductor divides forward from backward.
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled, found = torch.compile(run, backend=backend, fullgraph=True), []
    for function in (run, compiled):
        x = torch.randn(1, 37, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        y = function(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    forward, backward = map(_quantizations, graphs)
    assert (forward["aten._scaled_mm.default"], forward["dflash.both_layouts.default"]) == (7, 4)
    assert (backward["aten._scaled_mm.default"], backward["dflash.both_layouts.default"]) == (14, 6)
