"""Runs the Triton kernels on the CPU and prints, as JSON, how far their numbers are from torch's in float64.

Triton is told to interpret before it is imported, hence a process of its own: `run` starts it. Each broken kernel is
the shipped source with one place changed, run on a single case: limits that it kept would notice nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[4]
Errors = dict[str, float]
"""What was compared, and the error of it."""


@dataclass(frozen=True)
class Entropy:
    """Logits of one chunk. `ties` puts each row's largest value at several ids."""

    vocab: int = 9001
    dtype: str = "float32"
    multiplier: float = 1.0
    softcap: float | None = None
    shift: float = 0.0
    ties: bool = False


@dataclass(frozen=True)
class Heads:
    """Projected queries or keys. `gradient` is how the incoming gradient lies in memory."""

    length: int = 45
    width: int = 32
    dtype: str = "float32"
    rope_batch: int = 2
    gradient: str = "transposed"


ENTROPY = {
    "float32": Entropy(),
    "float32, one tile": Entropy(vocab=320),
    "float32, whole tiles": Entropy(vocab=8192),
    "float32, one past a tile": Entropy(vocab=8193),
    "float32, multiplier": Entropy(multiplier=0.5),
    "float32, softcap": Entropy(softcap=5.0),
    "float32, multiplier and softcap": Entropy(multiplier=1.7, softcap=5.0),
    "float32, far from zero": Entropy(vocab=320, shift=-900.0),
    "float32, ties": Entropy(ties=True),
    "bfloat16": Entropy(dtype="bfloat16"),
    "bfloat16, multiplier and softcap": Entropy(dtype="bfloat16", multiplier=0.5, softcap=5.0),
    "bfloat16, ties": Entropy(dtype="bfloat16", ties=True),
}
HEADS = {
    "float32": Heads(),
    "float32, one rope for all": Heads(rope_batch=1),
    "float32, one token": Heads(length=1),
    "float32, whole programs": Heads(length=64, width=64),
    "float32, narrow heads": Heads(width=16),
    "float32, wide heads": Heads(length=33, width=128, rope_batch=1),
    "float32, contiguous gradient": Heads(gradient="contiguous"),
    "float32, expanded gradient": Heads(gradient="expanded"),
    "float32, gradient of every other token": Heads(gradient="sliced"),
    "bfloat16": Heads(dtype="bfloat16"),
    "bfloat16, one rope for all": Heads(dtype="bfloat16", rope_batch=1, width=64),
}


class Broken(NamedTuple):
    """A change of the source that makes `measure` wrong in `case`."""

    old: str
    new: str
    measure: str
    case: Any


BROKEN_ENTROPY = {
    "the softcap has no slope": Broken("1 - (value / cap) * (value / cap)", "1.0", "gradient", Entropy(softcap=5.0)),
    "the multiplier has no slope": Broken(
        "scale = tl.load(weight_ptr + row) * multiplier",
        "scale = tl.load(weight_ptr + row)",
        "gradient",
        Entropy(multiplier=0.5),
    ),
    "the gradient's label is one off": Broken(
        "(at == tl.load(label_ptr + row))", "(at == tl.load(label_ptr + row) - 1)", "gradient", Entropy()
    ),
    "the last tile's padding counts": Broken(
        'value = tl.where(inside, value, float("-inf"))', "value = value + 0.0", "loss", Entropy(shift=-3.0)
    ),
    "old sums keep their scale": Broken("total * tl.exp(top - new_top)", "total * 1.0", "loss", Entropy()),
    "a lane keeps the last of its ties": Broken("value > lane_top", "value >= lane_top", "best", Entropy(ties=True)),
    "the first lane wins a tie": Broken(
        "tl.min(tl.where(lane_top == top, lane_first + tl.arange(0, BLOCK), V), 0)",
        "tl.sum(tl.where(tl.arange(0, BLOCK) == tl.argmax(lane_top, 0), lane_first + tl.arange(0, BLOCK), 0), 0)",
        "best",
        Entropy(ties=True),
    ),
}
BROKEN_HEADS = {
    "rotated the other way": Broken("z1 * cos - z2 * sin", "z1 * cos + z2 * sin", "out", Heads()),
    "the gradient rotated the other way": Broken("g2 * cos - g1 * sin", "g2 * cos + g1 * sin", "x", Heads()),
    "the norm is a constant": Broken("inverse * (z1 - n1 * along)", "inverse * z1", "x", Heads()),
    "the weight comes before its own gradient": Broken(
        "tl.sum(z1 * n1, 0))", "tl.sum(z1 * w1 * n1, 0))", "weight", Heads()
    ),
    "one rope for every row": Broken("rope = b * rope_stride", "rope = 0 * b * rope_stride", "out", Heads()),
    "the gradient is taken for contiguous": Broken(
        "given = b * stride_b + head * stride_h + token[:, None].to(tl.int64) * stride_l",
        "given = ((b * HEADS + head) * L + token[:, None].to(tl.int64)) * (2 * HALF)",
        "x",
        Heads(),
    ),
}


def run() -> dict[str, dict[str, Errors]]:
    """Return the errors of every case and broken kernel, by "entropy", "heads" and "broken" and then by name."""
    command = [sys.executable, "-m", "tests.unit.dflash.kernels.interpreted"]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Errors]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _dtype(case: Entropy | Heads) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _entropy_errors(entropy: Any, case: Entropy) -> Errors:
    """Compare statistics and gradient with cross_entropy of the stored logits."""
    generator = torch.Generator().manual_seed(0)
    num_rows, vocab = 6, case.vocab
    logits_RV = torch.randn(num_rows, vocab, generator=generator) * 3 + case.shift
    logits_RV[0, -1] += 20.0  # the largest comes in the last tile, and what was summed before shrinks
    label_R = torch.randint(0, vocab, (num_rows,), generator=generator)
    label_R[:2] = torch.tensor([0, vocab - 1])
    weight_R = torch.rand(num_rows, generator=generator)
    weight_R[2] = 0.0
    first_R = None
    if case.ties:
        # One lane in two rounds; two lanes, the higher in the earlier round; neighbors; the ends.
        places = [(70, 8262), (5000, 8200), (30, 8300, 8500), (8190, 8192), (0, vocab - 1), (640, 641, 642)]
        for row, ids in enumerate(places):
            logits_RV[row, list(ids)] = 40.0
        first_R = torch.tensor([min(ids) for ids in places])
    logits_RV = logits_RV.to(_dtype(case))

    leaf = logits_RV.double().requires_grad_()
    scaled = leaf * case.multiplier
    if case.softcap is not None:
        scaled = case.softcap * torch.tanh(scaled / case.softcap)
    loss_R = F.cross_entropy(scaled, label_R, reduction="none")
    (expected,) = torch.autograd.grad((weight_R.double() * loss_R).sum(), leaf)

    given = logits_RV.clone()
    found = entropy.row_statistics(given, label_R, case.multiplier, case.softcap)
    untouched = torch.equal(given, logits_RV)
    returned = entropy.gradient_(given, label_R, found, weight_R, case.multiplier, case.softcap)
    best_R = scaled.argmax(1) if first_R is None else first_R
    return {
        "loss": float((found.total_R.log() - found.gold_R - loss_R).detach().abs().max()),
        "top": float((found.top_R - scaled.amax(1)).detach().abs().max()),
        "best": float((found.best_R != best_R).sum()),
        "gradient": _relative(given, expected),
        "weight 0": float(given[2].abs().max()),
        "not in place": float(not untouched or returned is not given),
    }


def _upstream(case: Heads, b: int, heads: int, generator: torch.Generator) -> Tensor:
    """Return a gradient (b, heads, L, h) that lies in memory as `case` says."""
    L, h, dtype = case.length, case.width, _dtype(case)
    if case.gradient == "contiguous":
        return torch.randn(b, heads, L, h, generator=generator).to(dtype)
    if case.gradient == "expanded":
        return torch.randn(heads, L, 1, generator=generator).to(dtype).expand(b, heads, L, h)
    step = 2 if case.gradient == "sliced" else 1
    return torch.randn(b, L * step, heads, h, generator=generator).to(dtype).transpose(1, 2)[:, :, ::step]


def _head_errors(kernels: Any, case: Heads) -> Errors:
    """Compare output and gradients with the model's RMSNorm and rotation."""
    from dflash.model import RMSNorm, rotate, rotation

    generator = torch.Generator().manual_seed(1)
    b, heads, L, h, dtype, eps = 2, 3, case.length, case.width, _dtype(case), 1e-6
    x = torch.randn(b, L, heads * h, generator=generator).to(dtype).requires_grad_()
    weight = (torch.rand(h, generator=generator) + 0.5).to(dtype).requires_grad_()
    positions = torch.randint(0, 3000, (case.rope_batch, L), generator=generator)
    cos, sin = rotation(positions, h, 1e4, dtype)
    upstream = _upstream(case, b, heads, generator)

    norm = RMSNorm(h, eps).double()
    norm.weight.data.copy_(weight.detach())
    leaf = x.detach().double().requires_grad_()
    expected = rotate(norm(leaf.unflatten(-1, (heads, h)).transpose(1, 2)), (cos.double(), sin.double()))
    expected.backward(upstream.double())

    found = kernels.norm_rope(x, weight, cos, sin, eps)
    found.backward(upstream)
    assert x.grad is not None and weight.grad is not None and leaf.grad is not None and norm.weight.grad is not None
    as_given = all(t.dtype == dtype for t in (found, x.grad, weight.grad)) and found.shape == (b, heads, L, h)
    return {
        "out": _relative(found.detach(), expected.detach()),
        "x": _relative(x.grad, leaf.grad),
        "weight": _relative(weight.grad, norm.weight.grad),
        "other shape": float(not as_given),
    }


def _compiled_differences(module: Any) -> Errors:
    """Return what a whole graph that calls the operator differs by from calling it plainly."""
    generator = torch.Generator().manual_seed(5)
    leaves = [torch.randn(2, 40, 64, generator=generator), torch.rand(32, generator=generator)]
    cos, sin = torch.rand(2, 1, 1, 40, 32, generator=generator)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = module.norm_rope(x * 2, weight, cos, sin, 1e-6)
        return normed.transpose(1, 2).flatten(2).square().sum()

    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        mine = [leaf.clone().requires_grad_() for leaf in leaves]
        value = run(*mine)
        found.append([value.detach(), *torch.autograd.grad(value, mine)])
    names = ("out", "x", "weight")
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, *found, strict=True)}


def _broken(module: Any, change: Broken, folder: Path, number: int) -> Any:
    """Return the module made from changed source, under a name of its own and with operators of its own."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert change.old in source, change.old
    name = f"broken_{number}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(change.old, change.new).replace("dflash::", f"{name}::"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def _main() -> None:
    from dflash.kernels import entropy, norm_rope

    torch.set_num_threads(1)

    found: dict[str, dict[str, Errors]] = {
        "entropy": {name: _entropy_errors(entropy, case) for name, case in ENTROPY.items()},
        "heads": {name: _head_errors(norm_rope, case) for name, case in HEADS.items()},
        "compiled": {"norm_rope": _compiled_differences(norm_rope)},
        "broken": {},
    }
    with tempfile.TemporaryDirectory(prefix="dflash-kernels-") as folder:
        changes = [(entropy, name, change) for name, change in BROKEN_ENTROPY.items()]
        changes += [(norm_rope, name, change) for name, change in BROKEN_HEADS.items()]
        for number, (module, name, change) in enumerate(changes):
            errors = _entropy_errors if module is entropy else _head_errors
            made = _broken(module, change, Path(folder), number)
            found["broken"][name] = errors(made, change.case)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
