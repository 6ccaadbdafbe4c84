"""Cases that let threads collide by chance: small drafters at random lengths, and flex drafters on one GPU."""

from __future__ import annotations

import random
import threading

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.compile.gate import CompileGate
from dflash.compile.lab_cases.common import Drafter, Outcome, compiled_by, run_all, step_of


class FlexDrafter(nn.Module):
    """One attention layer through flex_attention with a block mask, as drafters on CUDA have."""

    def __init__(self, width: int, outcome: Outcome) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.outcome = outcome

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            self.outcome.eager += 1
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return x + out.transpose(1, 2).reshape(batch, length, width)


def random_lengths(gated: bool, device: str, seed: int) -> Outcome:
    """Three drafters step, forward and backward, through lengths that come at random; one repeats a warm length."""
    outcome = Outcome()
    gate = CompileGate(workers=3, backend="aot_eager", on_miss="park") if gated else None
    widths, lengths = (8, 12, 16), [4, 6, 8, 10, 12]
    modules = [Drafter(w, outcome).to(device) for w in widths]
    drafters = [compiled_by(gate, m, f"drafter-{i}") for i, m in enumerate(modules)]
    steady_until = threading.Event()
    left = [2]

    def train(index: int, length: int) -> None:
        x = torch.randn(2, length, widths[index], device=device)
        with step_of(gate):
            out = drafters[index](x)
            out.square().mean().backward()
            expected = modules[index].compute(x)
        outcome.wrong += int(not torch.allclose(out, expected, atol=2e-4))

    def work(index: int) -> None:
        rng = random.Random(seed * 100 + index)

        def loop() -> None:
            if index == 0:
                while not steady_until.is_set():
                    train(0, lengths[0])
                return
            try:
                for _ in range(12):
                    train(index, rng.choice(lengths))
            finally:
                left[0] -= 1
                if left[0] == 0:
                    steady_until.set()

        if gate is None:
            train(index, lengths[0])
            return loop()

        def warm() -> None:
            drafters[index](torch.randn(2, lengths[0], widths[index], device=device)).square().mean().backward()

        with gate.worker(f"drafter-{index}"):
            gate.warm_up(warm)
            loop()

    run_all(outcome, work, 3)
    return outcome


def cold_start_on_one_gpu(gated: bool, device: str, seed: int) -> Outcome:
    """Three flex drafters on one GPU compile forward and backward at once, cold: deadlock. A thread that traces waits
    for the device's one autograd thread, which waits for the lock that the tracing thread holds."""
    outcome = Outcome()
    gate = CompileGate(workers=3, backend="inductor") if gated else None
    lengths = [256, 384, 512]
    modules = [FlexDrafter(64, outcome).to(device) for _ in range(3)]
    drafters = [gate.compile(m, name=f"drafter-{i}") if gate else torch.compile(m) for i, m in enumerate(modules)]

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    masks = {n: create_block_mask(causal, None, None, n, n, device=device) for n in lengths}

    def train(index: int, length: int) -> None:
        x = torch.randn(1, length, 64, device=device)
        drafters[index](x, masks[length]).square().mean().backward()

    def work(index: int) -> None:
        order = lengths[:]
        random.Random(seed * 100 + index).shuffle(order)
        if gate is None:
            for length in order * 3:
                train(index, length)
            return

        def warm() -> None:
            for length in order:
                train(index, length)

        with gate.worker(f"drafter-{index}"):
            gate.warm_up(warm)
            for length in order * 3:
                with gate.step():
                    train(index, length)

    run_all(outcome, work, 3)
    torch.cuda.synchronize()
    return outcome
