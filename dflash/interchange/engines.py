"""The command that serves a drafter in vLLM or SGLang, and where the engine would compute something else.

Rules of both engines: anatomy 1.6, 3.2 and section 4. A difference in every block is refused, one at the edge of the
window or of probabilities only is a warning. SGLang keeps W - 1 keys to the left of a slot, which is the window W.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from dflash.config import FULL, SLIDING, DrafterConfig
from dflash.errors import DFlashError

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Serving:
    """command: shell-quoted, ready to run. warnings: one line each."""

    command: str
    warnings: tuple[str, ...]


def serving(
    engine: str, drafter: str, target: str, config: DrafterConfig, *, revision: str = "", layout: str = "zlab"
) -> Serving:
    """Return how to serve the drafter in the folder `drafter` with the target, a folder or hub id.

    revision   of a hub id; layout: of the drafter's folder, zlab or speculators
    Raises DFlashError if the engine would compute another drafter than was trained.
    """
    if engine not in ENGINES:
        raise DFlashError(f"{engine!r} is no engine", where="--engine", fix=f"One of {', '.join(ENGINES)}.")
    warnings = [*_shared(config), *(_vllm(config) if engine == "vllm" else _sglang(config, layout))]
    command = _vllm_command if engine == "vllm" else _sglang_command
    at = f" --revision {shlex.quote(revision)}" if revision else ""
    return Serving(command(drafter, target, config) + at, tuple(warnings))


def _vllm_command(drafter: str, target: str, config: DrafterConfig) -> str:
    settings = {"method": "dflash", "model": drafter, "num_speculative_tokens": config.block_size - 1}
    words = ["vllm", "serve", target, "--speculative-config", json.dumps(settings)]
    if not all(config.layer_causal(i) for i in range(config.num_hidden_layers)):
        words += ["--attention-backend", "flash_attn"]  # not every backend can run a block both ways
    prefix = "VLLM_USE_V2_MODEL_RUNNER=1 " if len(set(config.layer_types)) > 1 else ""
    return prefix + shlex.join(words)


def _sglang_command(drafter: str, target: str, config: DrafterConfig) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
    words += ["--speculative-num-draft-tokens", str(config.block_size)]
    return shlex.join(words)


def _shared(config: DrafterConfig) -> list[str]:
    if config.input_embedding_scale != 1.0:
        raise DFlashError(
            f"is {config.input_embedding_scale}, and neither engine scales a plain drafter's input",
            where="input_embedding_scale",
            fix="Decode with invoke generate.",
        )
    warnings = []
    if config.selector_rank:
        warnings.append("DFlash 2 needs an engine release that knows DFlash2DraftModel; an older one refuses the file")
    if config.markov_rank:
        what = "no engine that we know runs this Markov bias (DSpark's own speaks for slot 0 too)"
        warnings.append(f"{what}: the file is served as the plain drafter beside it, which accepts less")
    last = config.num_target_layers - 1
    if last in config.target_layer_ids:
        what = f"tap {last} is the target's last layer, and engines catch a layer's output where the next one begins"
        warnings.append(f"{what}: see that they take it before the final norm")
    if SLIDING in config.layer_types and config.window_reading == "anchor":
        edge = f"the window of {config.sliding_window} hangs on the anchor, and the engine hangs it on each slot"
        warnings.append(f"{edge}: slot i loses the i + 1 oldest context keys it was trained with")
    return warnings


def _vllm(config: DrafterConfig) -> list[str]:
    warnings = []
    if config.output_multiplier != 1.0 or config.final_logit_softcapping is not None:
        what = "vLLM applies neither output_multiplier nor final_logit_softcapping to a plain drafter"
        warnings.append(f"{what}: greedy drafts stay the same, sampled ones get other probabilities")
    if len(set(config.layer_types)) > 1:
        what = "full and sliding layers together need vLLM's V2 runner, which the command switches on"
        warnings.append(f"{what}; see that the acceptance is not 0, as vllm#49559 saw under it")
    return warnings


def _sglang(config: DrafterConfig, layout: str) -> list[str]:
    if layout != "zlab":
        raise DFlashError(
            f"cannot read {layout}' format",
            where="--engine sglang",
            fix="Export the drafter --to zlab first.",
        )
    for layer, kind in enumerate(config.layer_types):
        causal = config.layer_causal(layer)
        if kind == FULL and causal:
            what = f"layer {layer} is full and causal; SGLang runs full layers both ways and ignores is_causal"
        elif kind == SLIDING and not causal:
            what = f"layer {layer} slides and is bidirectional; SGLang runs sliding layers causally, ignoring is_causal"
        else:
            continue
        raise DFlashError(what, where="--engine sglang", fix="Serve it with --engine vllm.")
    return []
