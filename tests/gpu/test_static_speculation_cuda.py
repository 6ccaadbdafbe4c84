"""Recorded and compiled speculative steps on a GPU, against dflash.decode on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dflash.compile.counters import disk_counts
from dflash.decode import greedy_decode, speculative_decode
from pipeline import static_speculation
from pipeline.static_speculation import StaticSpeculator
from tests.drafters import random_drafter
from tests.tiny import EOS_ID, tiny_model

pytestmark = pytest.mark.gpu

NEW, BUCKET = 20, 32
LENGTHS = (1, 5, BUCKET, BUCKET + 7)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(static_speculation, "KEY_BUCKET", BUCKET)
    yield
    torch.cuda.empty_cache()


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 260, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head", ["plain", "dflash2"])
def test_recorded_steps_give_the_references_answers(head: str, compiled: bool) -> None:
    """float32, where rounding moves no token. The second time every step is a replay."""
    changes: dict[str, Any] = (
        {"conv_kernel_size": 2, "selector_rank": 8, "selector_top_k": 4} if head == "dflash2" else {}
    )
    target: Any = tiny_model().cuda()
    drafter = random_drafter(**changes).cuda()
    static = StaticSpeculator(target, drafter, stops=(EOS_ID,), num_tokens=max(LENGTHS) + NEW, compiled=compiled)
    plain = StaticSpeculator(target, None, stops=(EOS_ID,), num_tokens=max(LENGTHS) + NEW, compiled=compiled)
    wanted = [
        speculative_decode(target, drafter, prompt, max_new_tokens=NEW, eos_ids={EOS_ID}) for prompt in _prompts()
    ]
    assert [static.answer(prompt, NEW) for prompt in _prompts()] == wanted
    assert [plain.answer(prompt, NEW).tokens for prompt in _prompts()] == [answer.tokens for answer in wanted]
    assert wanted[0].tokens == greedy_decode(target, _prompts()[0], max_new_tokens=NEW, eos_ids={EOS_ID})
    before, recorded = disk_counts(), len(static._recordings)
    assert [static.answer(prompt, NEW) for prompt in reversed(_prompts())] == wanted[::-1]
    assert (sum(disk_counts(before).values()), len(static._recordings)) == (0, recorded)


def test_the_host_waits_for_no_step_but_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other wait would be an error here: reading the prompt and recorded steps leave the device at work."""
    target: Any = tiny_model().cuda()
    static = StaticSpeculator(target, random_drafter().cuda(), stops=(), num_tokens=max(LENGTHS) + NEW)
    static.warm_up()
    prompt = _prompts()[-1]
    wanted = static.answer(prompt, NEW)
    static.read(prompt, NEW)
    torch.cuda.synchronize()
    with static._running():
        torch.cuda.set_sync_debug_mode("error")
        try:
            looks = []
            for _ in range(3):
                static._advance(static._step, static.num_slots)
                looks.append(static._look())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    positions = [look()[0] for look in looks]
    counts = [number + 1 for number in wanted.accepted[:3]]
    assert positions == [len(prompt) + sum(counts[: step + 1]) for step in range(3)]
