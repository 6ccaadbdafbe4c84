from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.compile import CompileGate
from dflash.model import DFlashDraftModel
from pipeline.checkpoints import load_checkpoint, save_checkpoint
from pipeline.config import TrainConfig
from pipeline.optim import MasterAdamW, learning_rate
from pipeline.replica import Borrowed, Replica
from tests.tiny_run import tiny_config, tiny_drafter


def _config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 10, "learning_rate": 1e-2, **changes})


class Small(nn.Module):
    """A matrix and two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def _small(dtype: torch.dtype = torch.float32) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small().to(dtype)


def _batches(count: int, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)) for _ in range(count)
    ]


def _accumulate(model: nn.Module, optimizer: MasterAdamW, x: Tensor, y: Tensor, pieces: int = 3) -> Tensor:
    """Add the gradient of the summed error of a batch, cut into `pieces`, and return the number of rows."""
    dtype = next(model.parameters()).dtype
    for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        (model(a.to(dtype)) - b.to(dtype)).square().sum().backward()
        optimizer.collect()
    return torch.tensor(float(len(x)))


def test_steps_are_those_of_torch_adamw_with_the_averaged_and_clipped_gradient() -> None:
    config = _config(weight_decay=0.1, clip_norm=0.5)
    mine, theirs = _small(), _small()
    optimizer = MasterAdamW(mine, config)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.linear.weight], "weight_decay": 0.1},
            {"params": [theirs.linear.bias, theirs.norm.weight], "weight_decay": 0.0},
        ],
        betas=config.betas,
    )
    for step, (x, y) in enumerate(_batches(6)):
        rate = learning_rate(config, step)
        norm = optimizer.step(rate, _accumulate(mine, optimizer, x, y))
        reference.zero_grad()
        ((theirs(x) - y).square().sum() / len(x)).backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.clip_norm)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        assert expected > config.clip_norm  # so that clipping was tried
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(mine.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_zero_again_after_a_step() -> None:
    model = _small()
    optimizer = MasterAdamW(model, _config())
    rows = _accumulate(model, optimizer, *_batches(1)[0])
    assert any(g.abs().max() > 0 for g in optimizer.gradients)
    optimizer.step(1e-2, rows)
    assert all((g == 0).all() for g in optimizer.gradients)


def test_float32_masters_move_where_bfloat16_weights_would_stand_still() -> None:
    def push(parameter: Tensor) -> None:
        parameter.grad = torch.full_like(parameter, 0.5)

    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    plain = copy.deepcopy(model)
    optimizer = MasterAdamW(model, _config())
    for step in range(50):
        push(model.weight)
        optimizer.collect()
        optimizer.step(1e-4, torch.tensor(1.0))
        if step == 0:
            assert torch.allclose(optimizer.masters[0], torch.tensor(1 - 1e-4), rtol=0, atol=1e-6)
            assert (model.weight == 1).all()  # the nearest bfloat16
    assert torch.allclose(optimizer.masters[0], torch.tensor(1 - 50e-4), rtol=0, atol=1e-5)
    assert torch.equal(model.weight, optimizer.masters[0].to(torch.bfloat16))
    assert (model.weight < 1).all()

    # Without masters nothing would ever be learned: a step is less than half of what bfloat16 resolves at 1.
    without = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(50):
        push(plain.weight)
        without.step()
    assert (plain.weight == 1).all()


def test_gradients_of_a_bfloat16_model_are_added_up_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(model, _config())
    for _ in range(300):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.collect()
        assert model.weight.grad is None
    assert optimizer.gradients[0].dtype == torch.float32
    assert optimizer.gradients[0].item() == 300  # bfloat16 stops at 256


def _collect(model: Small, optimizer: MasterAdamW, value: float, *, without: str = "") -> None:
    """Let the optimizer collect a micro-batch whose gradient is `value` everywhere; `without` names a parameter that
    has none."""
    for name, parameter in model.named_parameters():
        if name == without:
            continue
        gradient = torch.full_like(parameter, value)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient  # as autograd does
    optimizer.collect()


def _held(optimizer: MasterAdamW) -> list[set[float]]:
    return [set(gradient.flatten().tolist()) for gradient in optimizer.gradients]


def _after_a_step(dtype: torch.dtype) -> tuple[Small, MasterAdamW]:
    """Return a model and its optimizer after a step of two micro-batches; 8 is what the first one's gradient was."""
    model = _small(dtype)
    optimizer = MasterAdamW(model, _config())
    for _ in range(2):
        _collect(model, optimizer, 8.0)
    optimizer.step(1e-3, torch.tensor(1.0))
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_begins_at_its_first_micro_batch_and_its_second_is_added(dtype: torch.dtype) -> None:
    model, optimizer = _after_a_step(dtype)
    _collect(model, optimizer, 0.5)
    assert _held(optimizer) == [{0.5}] * 3
    _collect(model, optimizer, 0.25)
    assert _held(optimizer) == [{0.75}] * 3
    optimizer.forget()
    _collect(model, optimizer, 0.125)
    assert _held(optimizer) == [{0.125}] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_forgetting_the_last_steps_gradient_would_stay_in_the_sum(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MasterAdamW, "forget", lambda self: None)
    model, optimizer = _after_a_step(dtype)
    _collect(model, optimizer, 0.5)
    assert all(0.5 not in held for held in _held(optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_a_gradient_in_the_first_micro_batch_keeps_nothing_of_the_last_step(
    dtype: torch.dtype,
) -> None:
    model, optimizer = _after_a_step(dtype)
    _collect(model, optimizer, 0.5, without="linear.bias")
    assert optimizer.names[1] == "linear.bias"
    assert _held(optimizer) == [{0.5}, {0.0}, {0.5}]
    _collect(model, optimizer, 0.25)
    assert _held(optimizer) == [{0.75}, {0.25}, {0.75}]


class _Foreach(TorchDispatchMode):
    """Keeps the names of the operations over lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_" in str(func):
            self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_the_first_micro_batch_is_written_over_the_last_step_with_no_zeroing_between() -> None:
    """One pass over the float32 sums where zeroing and adding are three (a 1 B drafter's are 4 GB)."""
    model, optimizer = _after_a_step(torch.bfloat16)
    with _Foreach() as seen:
        _collect(model, optimizer, 0.5)
    assert seen.names == ["_foreach_copy_"]
    with _Foreach() as seen:
        _collect(model, optimizer, 0.5)
    assert seen.names == ["_foreach_add_"]
    optimizer.step(1e-3, torch.tensor(1.0))
    with _Foreach() as seen:
        assert _held(optimizer) == [{0.0}] * 3
    assert seen.names == ["_foreach_zero_"]


def _warm_replica(precision: str) -> Replica:
    """Return a tiny replica after its warm-up."""
    config, drafter = tiny_config(train={"precision": precision}), tiny_drafter()
    start = DFlashDraftModel(drafter)
    table = torch.randn(drafter.vocab_size, drafter.hidden_size, generator=torch.Generator().manual_seed(3))
    start.initialise(0, table)
    table = table.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    gate = CompileGate(workers=1, backend="aot_eager")
    replica = Replica("one", config, drafter, start, Borrowed(table, table), torch.device("cpu"), gate)
    with gate.worker("one"):
        gate.warm_up(replica.warm_up)
    gate.close()
    return replica


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_warm_ups_gradients_are_forgotten(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all((gradient == 0).all() for gradient in _warm_replica(precision).optimizer.gradients)
    monkeypatch.setattr(MasterAdamW, "forget", lambda self: None)
    assert any((gradient != 0).any() for gradient in _warm_replica(precision).optimizer.gradients)


def test_masters_begin_at_the_weights_that_the_model_was_rounded_from() -> None:
    exact = _small().state_dict()
    optimizer = MasterAdamW(_small(torch.bfloat16), _config(), exact)
    for name, master in zip(optimizer.names, optimizer.masters, strict=True):
        assert torch.equal(master, exact[name])
    kept = exact["linear.weight"].clone()
    optimizer.gradients[0].fill_(1.0)
    optimizer.step(1e-2, torch.tensor(1.0))
    assert torch.equal(exact["linear.weight"], kept)  # copied, not shared among replicas

    rounded = MasterAdamW(_small(torch.bfloat16), _config())
    assert not torch.equal(rounded.masters[0], kept)


def test_clipping_scales_the_gradient_to_the_limit_and_returns_the_norm_before() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = MasterAdamW(model, _config(clip_norm=1.0))
    optimizer.gradients[0].copy_(torch.tensor([[6.0, 8.0]]))
    assert optimizer.step(1e-2, torch.tensor(2.0)).item() == pytest.approx(5.0)
    moments = optimizer.tensors()["optimizer"]["weight.exp_avg"]
    torch.testing.assert_close(moments, torch.tensor([[0.06, 0.08]]))  # (1 - 0.9) * [0.6, 0.8]

    free = MasterAdamW(nn.Linear(2, 1, bias=False), _config(clip_norm=100.0))
    free.gradients[0].copy_(torch.tensor([[6.0, 8.0]]))
    free.step(1e-2, torch.tensor(2.0))
    torch.testing.assert_close(free.tensors()["optimizer"]["weight.exp_avg"], torch.tensor([[0.3, 0.4]]))


def test_weight_decay_acts_on_matrices_only() -> None:
    model = _small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    MasterAdamW(model, _config(weight_decay=0.5)).step(0.1, torch.tensor(1.0))  # all gradients are zero
    torch.testing.assert_close(model.linear.weight, before["linear.weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.linear.bias, before["linear.bias"])
    assert torch.equal(model.norm.weight, before["norm.weight"])


def test_a_step_without_any_supervised_slot_does_not_divide_by_zero() -> None:
    model = _small()
    norm = MasterAdamW(model, _config()).step(1e-2, torch.tensor(0.0))
    assert norm == 0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_goes_on_with_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    config = _config(weight_decay=0.1)
    batches = _batches(6)

    def advance(model: nn.Module, optimizer: MasterAdamW, first: int, end: int) -> None:
        for step in range(first, end):
            optimizer.step(learning_rate(config, step), _accumulate(model, optimizer, *batches[step]))

    whole = _small(dtype)
    uninterrupted = MasterAdamW(whole, config)
    advance(whole, uninterrupted, 0, 6)

    first = _small(dtype)
    optimizer = MasterAdamW(first, config)
    advance(first, optimizer, 0, 3)
    path = save_checkpoint(tmp_path, 3, optimizer.tensors(), {})

    second = Small().to(dtype)  # other random weights
    resumed = MasterAdamW(second, config)
    resumed.load(load_checkpoint(path).tensors)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    advance(second, resumed, 3, 6)
    for stem, named in uninterrupted.tensors().items():
        for name, tensor in named.items():
            assert torch.equal(resumed.tensors()[stem][name], tensor), name
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    # The moments matter: with the weights alone the rest would be another training.
    forgetful = _small(dtype)
    fresh = MasterAdamW(forgetful, config)
    for name, master in zip(fresh.names, fresh.masters, strict=True):
        master.data.copy_(load_checkpoint(path).tensors["weights"][name])
    advance(forgetful, fresh, 3, 6)
    assert not torch.equal(fresh.masters[0], uninterrupted.masters[0])


def test_what_is_loaded_is_a_copy() -> None:
    model = _small()
    optimizer = MasterAdamW(model, _config())
    optimizer.step(1e-2, _accumulate(model, optimizer, *_batches(1)[0]))
    saved = {stem: {n: t.clone() for n, t in named.items()} for stem, named in optimizer.tensors().items()}
    kept = copy.deepcopy(saved)
    resumed_model = _small()
    resumed = MasterAdamW(resumed_model, _config())
    resumed.load(saved)
    resumed.step(1e-2, _accumulate(resumed_model, resumed, *_batches(1)[0]))
    assert all(torch.equal(kept[s][n], t) for s, named in saved.items() for n, t in named.items())


def test_a_missing_name_is_an_error() -> None:
    optimizer = MasterAdamW(_small(), _config())
    optimizer.step(1e-2, torch.tensor(1.0))
    tensors = {stem: dict(named) for stem, named in optimizer.tensors().items()}
    del tensors["optimizer"]["norm.weight.exp_avg_sq"]
    with pytest.raises(KeyError, match=r"norm\.weight\.exp_avg_sq"):
        MasterAdamW(_small(), _config()).load(tensors)


def test_the_schedule_rises_in_a_line_and_falls_along_a_cosine() -> None:
    config = _config(steps=10, learning_rate=1.0, warmup_ratio=0.2, min_lr_ratio=0.1)
    expected = {
        0: 0.5,  # warm-up: 2 steps
        1: 1.0,
        2: 1.0,  # the cosine begins at the peak
        4: 0.1 + 0.9 * (1 + 2**-0.5) / 2,  # a quarter of the way
        6: 0.55,  # half way
        8: 0.1 + 0.9 * (1 - 2**-0.5) / 2,
        10: 0.1,  # where it would end
    }
    for step, rate in expected.items():
        assert learning_rate(config, step) == pytest.approx(rate), step
    rates = [learning_rate(config, step) for step in range(1, 11)]
    assert rates == sorted(rates, reverse=True)


def test_the_schedule_of_a_single_step_is_its_peak() -> None:
    assert learning_rate(_config(steps=1, learning_rate=0.3), 0) == 0.3
