"""`invoke generate`: decode one prompt with a run's drafter, and say what speculation saved."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from dflash.block_length import AdaptiveLength, BlockLength, FixedLength
from dflash.checkpoint import load_drafter
from dflash.decode import Decoded, acceptance_histogram, conditional_acceptance, speculative_decode
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from dflash.sampling import GREEDY, Sampling
from env.caches import CacheDirs
from pipeline.cache import ROOT
from pipeline.errors import ConfigError
from pipeline.regenerate import stop_ids
from pipeline.rendering import render_prompt
from pipeline.runs import Run
from pipeline.targets import load_target, load_tokenizer, resolve_target


@dataclass(frozen=True)
class Decoding:
    """How to decode. block_length: a number of slots, "full" (all that the drafter has) or "adaptive"."""

    max_new_tokens: int = 64
    sampling: Sampling = GREEDY
    seed: int = 0
    block_length: str = "full"


def decoding_of(*, temperature: float, top_k: int | None, top_p: float | None, **rest: Any) -> Decoding:
    """Return the decoding that the command line's options mean. Raises ConfigError naming the option."""
    try:
        return Decoding(sampling=Sampling(temperature, top_k, top_p), **rest)
    except DFlashError as error:
        raise _of_an_option(error) from None


def _of_an_option(error: DFlashError) -> ConfigError:
    return ConfigError(error.what, where=f"--{error.where.replace('_', '-')}", fix=error.fix)


def generate(run: Run, prompt: str, decoding: Decoding) -> None:
    """Print the target's answer, decoded speculatively in float32, and what each verifying call brought."""
    caches = CacheDirs.from_environment(ROOT)
    device = run.config.topology.targets[0] if torch.cuda.is_available() else "cpu"
    folder = resolve_target(run.config.target, caches.models, caches.packages)
    tokenizer = load_tokenizer(folder)
    target = load_target(folder, torch.float32, device)
    drafter = load_drafter(run.drafter_dir, dtype=torch.float32, device=device)
    ids = render_prompt(tokenizer, [{"role": "user", "content": prompt}], run.config.data.system_prompt)
    length = choose_length(decoding.block_length, target, drafter, ids)
    start = time.perf_counter()
    try:
        decoded = speculative_decode(
            target,
            drafter,
            ids,
            max_new_tokens=decoding.max_new_tokens,
            eos_ids=set(stop_ids(target, tokenizer)),
            sampling=decoding.sampling,
            block_length=length,
            generator=torch.Generator(device).manual_seed(decoding.seed),
        )
    except DFlashError as error:
        raise _of_an_option(error) from None
    seconds = time.perf_counter() - start
    console = Console(highlight=False)
    console.print(Text(str(tokenizer.decode(decoded.tokens, skip_special_tokens=True))))
    for line in describe(decoded, seconds):
        console.print(Text(line, style="dim"))


def describe(decoded: Decoded, seconds: float) -> list[str]:
    """Return what speculation saved: tokens per call, calls by accepted tokens, acceptance of each slot."""
    calls = len(decoded.accepted)
    per_call = f"{decoded.tau:.2f} tokens per target call" if calls else "no drafted call was needed"
    lines = [f"{len(decoded.tokens)} tokens in {calls} verifying calls: {per_call}; {seconds:.1f} s"]
    if calls:
        histogram = ", ".join(f"{n} of {r}" for r, n in enumerate(acceptance_histogram([decoded])) if n)
        shares = " ".join("-" if math.isnan(c) else f"{c:.2f}" for c in conditional_acceptance([decoded]))
        drafted = statistics.fmean(decoded.drafted)
        lines.append(f"calls by accepted tokens: {histogram}; {drafted:.1f} slots drafted a call")
        lines.append(f"accepted when every earlier slot was, by slot: {shares}")
    return lines


def choose_length(text: str, target: Any, drafter: DFlashDraftModel, prompt_ids: Sequence[int]) -> BlockLength | None:
    """Return the block length that `text` names; "adaptive" measures here what a further slot costs."""
    if text == "full":
        return None
    if text != "adaptive":
        return FixedLength(int(text))
    most = drafter.config.block_size - 1
    if most == 1:
        return None
    one, all_slots = (_seconds_per_call(target, drafter, prompt_ids, FixedLength(k)) for k in (1, most))
    slot = max(0.0, all_slots - one) / (most - 1)
    return AdaptiveLength(slot / max(one - slot, one / 10))


def _seconds_per_call(
    target: Any, drafter: DFlashDraftModel, prompt_ids: Sequence[int], length: BlockLength, repeats: int = 3
) -> float:
    """Return the median of `repeats` timings of a drafted call, its share of the prompt's call taken out."""

    def seconds(max_new_tokens: int) -> tuple[float, int]:
        start = time.perf_counter()
        decoded = speculative_decode(
            target, drafter, prompt_ids, max_new_tokens=max_new_tokens, eos_ids=(), block_length=length
        )
        return time.perf_counter() - start, len(decoded.accepted)

    found = []
    for _ in range(repeats):
        (alone, _), (whole, calls) = seconds(1), seconds(8)
        found.append(max(1e-6, whole - alone) / calls)
    return statistics.median(found)
