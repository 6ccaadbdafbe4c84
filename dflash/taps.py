"""Target features: the outputs of chosen decoder layers, caught by hooks.

A tap `id` is the output of decoder layer `id`, before the next layer's norm and before the final one, which is
transformers' hidden_states[id + 1] (off-by-one reports: TorchSpec#87, #89). Only the tapped layers are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import DFlashError


class FeatureTaps:
    """Context manager that records the tapped layers of `target` (a causal LM with `model.layers`) on each forward.

    One thread may use a target at a time. `features()` returns the last forward's taps and forgets them.
    """

    def __init__(self, target: nn.Module, layer_ids: Sequence[int]) -> None:
        self.layers = decoder_layers(target)
        self.layer_ids = tuple(layer_ids)
        wrong = [i for i in self.layer_ids if not 0 <= i < len(self.layers)]
        if wrong:
            raise DFlashError(
                f"{wrong} are not among the target's {len(self.layers)} layers",
                where="target_layer_ids",
                fix="Layers count from 0.",
            )
        self._caught: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureTaps:
        for layer_id in self.layer_ids:
            self._handles.append(self.layers[layer_id].register_forward_hook(self._hook(layer_id)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._caught.clear()

    def _hook(self, layer_id: int) -> Any:
        def catch(module: nn.Module, args: Any, output: Any) -> None:
            self._caught[layer_id] = output[0] if isinstance(output, tuple) else output

        return catch

    def features(self) -> Tensor:
        """Return the taps of the last forward as (b, T, K * D), concatenated in the order of layer_ids."""
        missing = [i for i in self.layer_ids if i not in self._caught]
        if missing:
            raise RuntimeError(f"layers {missing} did not run since the last call")
        caught, self._caught = self._caught, {}
        return torch.cat([caught[i] for i in self.layer_ids], dim=-1)


def decoder_layers(target: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a transformers causal LM."""
    layers = getattr(getattr(target, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise DFlashError(
            f"{type(target).__name__} has no model.layers", where="target", fix="Use a Llama, Qwen2 or Qwen3 causal LM."
        )
    return layers


@torch.no_grad()
def extract_features(
    target: nn.Module,
    input_ids_bT: Tensor,
    layer_ids: Sequence[int],
    positions_bT: Tensor | None = None,
    *,
    final_state: bool = False,
) -> Tensor:
    """Return the features (b, T, K * D) of right-padded sequences; the head is not run.

    Right padding needs no mask: causal attention never looks at it, and features of padding are not used.
    positions_bT   of packed rows: where a position does not follow the one before it, transformers lets a new document
                   begin that sees nothing of the earlier ones
    final_state    append the final norm's output, (b, T, K * D + D): what the head reads, for soft labels
    """
    with FeatureTaps(target, layer_ids) as taps:
        out = target.model(input_ids=input_ids_bT, position_ids=positions_bT, use_cache=False)  # type: ignore[operator]
        features = taps.features()
        return torch.cat((features, out.last_hidden_state), dim=-1) if final_state else features
