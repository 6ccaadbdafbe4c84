"""precision: fp8 in a run: where it is refused, and what proves its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from benchmarks.flops import BY_NAME, CUDA_CASES, REFERENCE, chosen_cases
from dflash import fp8
from dflash.compile import CompileGate
from dflash.fp8 import Fp8Linear
from pipeline import replica
from pipeline.cache import CachedData
from pipeline.config import RunConfig
from pipeline.dense_step import compiled_equals_dense
from pipeline.errors import ConfigError
from pipeline.replica import Borrowed, Replica, check_precision
from pipeline.rounded import rounded, rounded_product
from pipeline.targets import TargetFolder
from tests.drafters import drafter_config, leaky_masks, random_drafter
from tests.tiny import tiny_model
from tests.tiny_run import made_up_samples, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model()


def _fp8_config() -> RunConfig:
    """Return what no user gets on a CPU: fp8 layers, and soft labels, whose head stays in bf16."""
    train = {"batch_size": 2, "micro_batch": 2, "num_anchors": 4, "soft_weight": 0.3, "precision": "bf16"}
    config = tiny_config(train=train, data={"buckets": [64], "features": "online"})
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp8"})})


def _proof(target: Any) -> Any:
    data = CachedData(
        target=TargetFolder(path=Path("unused"), identity="", name=""),
        drafter=drafter_config(num_hidden_layers=1),
        samples=made_up_samples(8),
        features=None,
        answers_key="",
        prompts={},
    )
    drafter = random_drafter(dtype=torch.bfloat16, num_hidden_layers=1)
    return compiled_equals_dense(_fp8_config(), data, target, drafter, CPU)


def _wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8.quantize

    def wrong(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        rows8, columns8, scale = right(x_RC, dtype)
        return rows8, columns8, scale * 2

    monkeypatch.setattr(fp8, "quantize", wrong)


def _leaky_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "layer_masks", leaky_masks)


@pytest.mark.parametrize("mistake", [None, _wrong_scale, _leaky_mask])
def test_the_compiled_step_is_the_dense_one_rounded_to_fp8_unless_there_is_a_mistake(
    mistake: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is measured by shares no code with it."""
    monkeypatch.setattr(replica, "check_precision", lambda precision, device: None)
    if mistake:
        mistake(monkeypatch)
    gate = _proof(target)
    assert gate.limit == "<= 2 x what dense fp8 costs"
    assert gate.holds == (mistake is None), gate


def test_a_replicas_fp8_weights_are_its_weights_after_a_step(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code reads the fp8 weights alone: one that nobody renews would train on with the first ones."""
    monkeypatch.setattr(replica, "check_precision", lambda precision, device: None)
    config, drafter = _fp8_config(), random_drafter()
    gate = CompileGate(workers=1, backend="aot_eager")
    borrowed = Borrowed.of(target, CPU, torch.bfloat16)
    made = Replica("one", config, drafter.config, drafter, borrowed, CPU, gate)
    gate.close()
    assert made.fp8_head is None  # soft labels
    assert sum(isinstance(module, Fp8Linear) for module in made.model.modules()) == 14
    assert all(p.dtype == torch.bfloat16 for p in made.model.parameters())
    linear = made.fp8_linears[0]

    def renewed() -> bool:
        rows8, columns8, scale = fp8.quantize(linear.weight.detach(), fp8.E4M3)
        wanted = ((linear.weight8_NK, rows8), (linear.weight8_KN, columns8), (linear.weight_scale, scale))
        return all(torch.equal(mine.float(), theirs.float()) for mine, theirs in wanted)

    assert renewed()
    for gradient in made.optimizer.gradients:
        gradient.fill_(1.0)
    made.optimizer.step(0.1, torch.tensor(1.0))
    assert not renewed()
    monkeypatch.setattr(made, "_run", lambda batch, features: torch.zeros(()))
    unread: Any = None
    made.forward_backward(unread, unread)
    assert renewed()


def test_fp8_without_a_gpu_is_refused_by_the_configuration_and_by_the_device() -> None:
    with pytest.raises(ValidationError, match=r"precision fp8 needs GPUs, and topology.drafters are cpu; use bf16"):
        tiny_config(train={"precision": "fp8"})
    assert tiny_config(train={"precision": "fp8"}, topology={"drafters": ["cuda:0"]}).train.precision == "fp8"
    with pytest.raises(ConfigError, match="fp8 on cpu, no GPU"):
        check_precision("fp8", CPU)
    check_precision("bf16", CPU)


def test_a_gpu_that_is_too_old_is_refused_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError) as caught:
        check_precision("fp8", gpu)
    assert str(caught.value).startswith("train.precision: fp8 on cuda:0, capability 8.6. Use bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_precision("fp8", gpu)


def test_a_rounded_product_is_that_of_rounded_operands() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    y = rounded_product(x, weight)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    x_r, w_r = (rounded(t.detach(), torch.float8_e4m3fn) for t in (x, weight))
    g_r = rounded(upstream, torch.float8_e5m2)
    assert not torch.equal(x_r, x)
    assert (x_r - x).abs().max() <= 2**-4 * x.abs().max()
    assert torch.allclose(y, x_r @ w_r.T, atol=1e-5)
    assert x.grad is not None and weight.grad is not None
    assert torch.allclose(x.grad, g_r @ w_r, atol=1e-5)
    assert torch.allclose(weight.grad, g_r.flatten(0, 1).T @ x_r.flatten(0, 1), atol=1e-5)
    assert torch.equal(rounded(torch.zeros(3), torch.float8_e5m2), torch.zeros(3))


def test_the_reference_case_runs_in_fp8_only_when_it_is_asked_for_by_name() -> None:
    cuda = torch.device("cuda:0")
    assert chosen_cases(cuda, "", ["reference", "reference fp8"]) == [REFERENCE, *BY_NAME]
    assert BY_NAME[0].precision == "fp8"
    assert chosen_cases(cuda, "all", []) == list(CUDA_CASES)
