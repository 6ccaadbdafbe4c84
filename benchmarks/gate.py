"""What the compile gate costs: per step in steady state, and at warm-up cold, from disk, and for each further replica.

    python -m benchmarks.gate [--device cuda] [--json FILE]

Steady state: the same compiled call with and without the gate, in turn, in one process; the difference is the cost.
Warm-up: one fresh process for a cold cache and one for the warm one, three drafters each, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dflash.anchors import build_blocks, draw_anchors, sample_seed
from dflash.compile import CompileGate
from dflash.config import DrafterConfig
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss, make_rows

ROUNDS, CALLS = 100, 300


def steady_state() -> dict[str, float]:
    """Return microseconds a step: compiled call alone, the same behind the gate, and the median difference."""
    torch.set_num_threads(1)
    gate = CompileGate(workers=1, backend="aot_eager")
    x = torch.ones(4)
    body = gate.compile(lambda t: t + 1, name="body")
    plain = torch.compile(lambda t: t + 1, backend="aot_eager")
    plain(x)
    alone, gated = [], []

    def time_alone() -> None:
        begin = time.perf_counter()
        for _ in range(CALLS):
            plain(x)
        alone.append((time.perf_counter() - begin) / CALLS * 1e6)

    def time_gated() -> None:
        begin = time.perf_counter()
        for _ in range(CALLS):
            with gate.step():
                body(x)
        gated.append((time.perf_counter() - begin) / CALLS * 1e6)

    with gate.worker("w"):
        gate.warm_up(lambda: [body(x)].clear())
        for number in range(ROUNDS):  # in turn, and each first as often: a clock that drifts favours neither
            for measure in (time_alone, time_gated) if number % 2 else (time_gated, time_alone):
                measure()
    gate.close()
    cost = statistics.median(b - a for a, b in zip(alone, gated, strict=True))
    return {
        "call_us": round(statistics.median(alone), 2),
        "gated_us": round(statistics.median(gated), 2),
        "cost_us": round(cost, 2),
    }


def warm_up_child(device: str) -> None:
    """Warm three drafters of the quickstart's geometry, one after another; print the seconds of each."""
    from dflash.acceptance import layer_masks
    from dflash.attention import choose_attention

    place = torch.device(device)
    attention = choose_attention("auto", place)
    config = DrafterConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=49152, block_size=4, mask_token_id=16, target_layer_ids=(1, 8, 14, 20, 27),
        num_target_layers=30, rope_theta=1e5,
    )  # fmt: skip
    head = torch.randn(config.vocab_size, config.hidden_size, device=place) * 0.1
    gate = CompileGate(workers=1)
    ids = torch.arange(128).numpy()
    mask = ids >= 64
    anchors = draw_anchors(mask, 16, sample_seed(0, 0, "x"))
    blocks = build_blocks(ids, mask, anchors, num_anchors=16, block_size=4, mask_token_id=16)
    rows = make_rows(torch.from_numpy(blocks.labels_NK), torch.from_numpy(blocks.valid_NK), 512).to(place)
    anchors_1N = torch.from_numpy(blocks.anchors_N)[None].to(place)
    noise = torch.from_numpy(blocks.noise_NK).view(1, -1).to(place)
    positions = (anchors_1N[:, :, None] + torch.arange(4, device=place)).view(1, -1)
    features = torch.randn(1, 128, config.feature_size, device=place)
    seconds = []

    def warm(index: int) -> None:
        model = DFlashDraftModel(config)
        model.initialise(index, head)
        model.to(place)
        masks = layer_masks(model, anchors_1N, 128, attention)

        def function(f: Any, e: Any, p: Any, m: Any) -> Any:
            return model(f, e, p, m, attention)

        body = gate.compile(function, name=f"drafter-{index}")
        begin = time.perf_counter()
        states = body(features, head[noise], positions, masks)
        head_loss(states[0][rows.index_R], head, rows, Weighting(gamma=2.0)).numerator.backward()
        if place.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begin, 2))

    with gate.worker("w"):
        gate.warm_up(lambda: [warm(i) for i in range(3)].clear())  # type: ignore[func-returns-value]
    gate.close()
    print(json.dumps(seconds))


def warm_up(device: str) -> dict[str, list[float]]:
    """Return seconds of three drafters in a cold process and in a second one on the same cache."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/i", "TRITON_CACHE_DIR": f"{folder}/t"}
        for name in ("cold", "from disk"):
            command = [sys.executable, "-m", "benchmarks.gate", "--child", "--device", device]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return warm_up_child(options.device)
    result = {
        "device": options.device,
        "torch": str(torch.__version__),
        **steady_state(),
        "warm_up": warm_up(options.device),
    }
    print(f"gate: {result['cost_us']} us a step (call alone {result['call_us']}, gated {result['gated_us']})")
    for name, seconds in result["warm_up"].items():
        share = ", ".join(f"{s / seconds[0]:.0%}" for s in seconds[1:])
        print(f"warm-up {name}: first drafter {seconds[0]} s, further ones {seconds[1:]} s ({share} of the first)")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
