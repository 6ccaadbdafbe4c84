"""`invoke generate`: decode one prompt with a run's drafter, and say what speculation saved."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.text import Text

from dflash.checkpoint import load_drafter
from dflash.decode import speculative_decode
from env.caches import CacheDirs
from pipeline.cache import ROOT
from pipeline.regenerate import stop_ids
from pipeline.rendering import render_prompt
from pipeline.runs import Run
from pipeline.targets import load_target, load_tokenizer, resolve_target


def generate(run: Run, prompt: str, max_new_tokens: int) -> None:
    """Print the target's greedy answer, decoded speculatively in float32, and the tokens per target call."""
    caches = CacheDirs.from_environment(ROOT)
    device = run.config.topology.targets[0] if torch.cuda.is_available() else "cpu"
    folder = resolve_target(run.config.target, caches.models, caches.packages)
    tokenizer = load_tokenizer(folder)
    target = load_target(folder, torch.float32, device)
    drafter = load_drafter(run.drafter_dir, dtype=torch.float32, device=device)
    ids = render_prompt(tokenizer, [{"role": "user", "content": prompt}], run.config.data.system_prompt)
    start = time.perf_counter()
    decoded = speculative_decode(
        target, drafter, ids, max_new_tokens=max_new_tokens, eos_ids=set(stop_ids(target, tokenizer))
    )
    seconds = time.perf_counter() - start
    console = Console(highlight=False)
    console.print(Text(str(tokenizer.decode(decoded.tokens, skip_special_tokens=True))))
    calls = len(decoded.accepted)
    per_call = f"{decoded.tau:.2f} tokens per target call" if calls else "no drafted call was needed"
    console.print(
        Text(f"{len(decoded.tokens)} tokens in {calls} verifying calls: {per_call}; {seconds:.1f} s", style="dim")
    )
