"""precision: fp8 on a real GPU: the kernels' roundings, products of odd sizes, the head, and a whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash.compile import CompileGate
from dflash.fp8 import E4M3, E5M2, Fp8Linear, both_layouts, quantize
from dflash.fp8_head import FACTOR, Fp8Head
from dflash.kernels import entropy
from dflash.objective import Weighting, head_loss, make_rows
from pipeline.batches import Collator, rows_of
from pipeline.cache import CachedData
from pipeline.dense_step import compiled_equals_dense
from pipeline.replica import Borrowed, Replica
from pipeline.target_forward import target_features
from pipeline.targets import TargetFolder
from tests.drafters import drafter_config, random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
FORWARD, BACKWARD = (2 * 2.0**-8 / 3) ** 0.5, ((2.0**-8 + 2.0**-6) / 3) ** 0.5
"""Bounds on the relative error of e4m3 times e4m3 and e5m2 times e4m3; tests/unit/dflash/test_fp8.py derives them."""


def _error(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found.detach().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(37, 48), (128, 64), (513, 4096)])
def test_both_layouts_are_torchs_cast(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    x[0, :3] = torch.tensor([0.0, 1e-4, -1e-6])
    inverse = torch.finfo(dtype).max / x.float().abs().max()
    expected = (x.float() * inverse).to(dtype)
    rows8, columns8 = both_layouts(x.cuda(), inverse.cuda(), dtype)
    assert torch.equal(rows8.cpu().float(), expected.float())
    assert torch.equal(columns8.cpu().float()[:, : len(x)], expected.float().T)
    assert (columns8.float()[:, len(x) :] == 0).all()


@pytest.mark.parametrize("num_rows", [37, 513])
def test_a_compiled_layer_is_float64s_within_the_rounding_of_fp8(num_rows: int) -> None:
    """Row counts that 16 does not divide, as of the first layer's distinct rows."""
    torch.manual_seed(0)
    layer = Fp8Linear(nn.Linear(256, 384, bias=True).bfloat16().cuda(), "tested")
    layer(torch.zeros(1, 256, dtype=torch.bfloat16, device=CUDA))  # makes the fp8 weights
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(num_rows, 256, device=CUDA).bfloat16().requires_grad_()
    upstream = torch.randn(num_rows, 384, device=CUDA).bfloat16()
    y = compiled(x)
    y.backward(upstream)
    W, G, X = (t.detach().double() for t in (layer.weight, upstream, x))
    assert _error(y - layer.bias, X @ W.T) < FORWARD
    assert _error(x.grad, G @ W) < BACKWARD
    assert _error(layer.weight.grad, G.T @ X) < BACKWARD


def test_what_is_not_finite_shows() -> None:
    layer = Fp8Linear(nn.Linear(64, 32, bias=False).bfloat16().cuda(), "tested")
    for bad in (float("inf"), float("nan")):
        x = torch.randn(5, 64, device=CUDA).bfloat16()
        x[3, 7] = bad
        x.requires_grad_()
        y = layer(x)
        assert not y[3].isfinite().any()
        layer.weight.grad = None
        y.backward(torch.ones_like(y))
        assert layer.weight.grad is not None and not layer.weight.grad.isfinite().any()


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (1.7, 20.0)])
def test_the_heads_loss_and_gradient_are_those_of_bf16_within_the_rounding_of_fp8(
    multiplier: float, softcap: float | None
) -> None:
    torch.manual_seed(0)
    head_VD = torch.randn(49_152, 576, device=CUDA).mul_(0.05).bfloat16()
    labels_MK = torch.randint(0, len(head_VD), (8, 6))
    valid_MK = torch.ones(8, 6, dtype=torch.bool)
    valid_MK[:, 0] = False
    rows = make_rows(labels_MK, valid_MK, 15).to(CUDA)
    hidden = torch.randn(40, 576, device=CUDA).bfloat16()
    hidden[:9] += 8 * head_VD[rows.label_R[:9]]  # some rows are sure
    found = []
    for fp8_head in (None, Fp8Head(head_VD)):
        leaf = hidden.clone().requires_grad_()
        shape: dict[str, Any] = {"multiplier": multiplier, "softcap": softcap}
        sums = head_loss(leaf, head_VD, rows, Weighting(), **shape, fp8_head=fp8_head)
        sums.numerator.backward()
        assert leaf.grad is not None
        found.append((float(sums.numerator), leaf.grad))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.01)
    assert _error(found[1][1], found[0][1]) < FORWARD + BACKWARD  # the logits' rounding, then the gradient's


def test_chances_are_those_of_the_plain_form() -> None:
    logits = (torch.randn(9, 49_168, generator=torch.Generator().manual_seed(0)) * 4).bfloat16().cuda()
    labels = torch.randint(0, 49_168, (9,), generator=torch.Generator().manual_seed(1)).cuda()
    statistics = entropy.row_statistics(logits, labels, 0.5, 20.0)
    found = []
    for device in ("cuda:0", "cpu"):
        out8 = torch.empty(logits.shape, dtype=E5M2, device=device)
        here = entropy.RowStatistics(*(t.to(device) for t in statistics))
        Fp8Head._write_chances(logits.to(device), labels.to(device), here, 0.5, 20.0, out8)
        found.append(out8.float().cpu())
    assert found[0].max() <= FACTOR
    assert ((found[0] - found[1]).abs() <= 2.0**-2 * found[1] + 2.0**-16).all()  # one step, where float32 rounds apart
    assert (found[0] != found[1]).float().mean() < 0.01


@pytest.mark.parametrize(("soft", "recorded"), [(0.0, True), (0.0, False), (0.3, True)])
def test_a_step_is_the_dense_one_rounded_asks_for_nothing_and_renews_its_weights(soft: float, recorded: bool) -> None:
    target: Any = tiny_model().cuda()
    samples, drafter = made_up_samples(40), random_drafter()
    train = {"micro_batch": 4, "batch_size": 4, "num_anchors": 6, "soft_weight": soft, "precision": "fp8"}
    config = tiny_config(
        data={"samples_per_row": 3, "buckets": [64], "features": "online"},
        train=train,
        drafter={"attention": "flex"},
        compile={"backend": "inductor", "cuda_graphs": recorded},
        topology={"targets": ["cuda:0"], "drafters": ["cuda:0"]},
    )
    folder = TargetFolder(path=Path("unused"), identity="", name="")
    data = CachedData(folder, drafter_config(), samples, features=None, answers_key="", prompts={})
    gate = compiled_equals_dense(config, data, target, random_drafter().to(torch.bfloat16), CUDA)
    assert gate.holds, gate

    compile_gate = CompileGate(workers=1)
    borrowed = Borrowed.of(target, CUDA, torch.bfloat16)
    replica = Replica("one", config, drafter.config, drafter, borrowed, CUDA, compile_gate)
    collator, count = Collator(config, drafter.config, samples), len(rows_of(config, samples))
    batch = collator.collate(0, 64, tuple(i % count for i in range(4))).to(CUDA)
    features = target_features(target, batch, drafter.config.target_layer_ids, bool(soft)).bfloat16()
    losses, held = [], []
    with compile_gate.worker("one"):
        compile_gate.warm_up(replica.warm_up)
        for number in range(30):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # libraries set themselves up at first
            try:
                with compile_gate.step():
                    sums = replica.forward_backward(batch, features)
                replica.optimizer.step(3e-3, sums[1])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            losses.append(float(sums[0] / sums[1]))
            held.append(torch.cuda.memory_reserved())
        replica.optimizer.forget()
        with compile_gate.step():
            replica.forward_backward(batch, features)  # of the last step's weights
    report = compile_gate.report()
    compile_gate.close()
    assert report["compiles_after_warmup"] == 0
    assert len(set(held[1:])) == 1, held
    assert losses[-1] < 0.5 * losses[0], losses
    for linear in replica.fp8_linears:
        rows8, columns8, scale = quantize(linear.weight.detach(), E4M3)
        for mine, wanted in ((linear.weight8_NK, rows8), (linear.weight8_KN, columns8), (linear.weight_scale, scale)):
            assert torch.equal(mine.float(), wanted.float())
