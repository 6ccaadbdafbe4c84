"""What target and drafter keep of the verified tokens while decoding a batch whose rows accept different counts.

Legend: b batch, T columns, Q block tokens (anchor and drafted ones), C = taps x width, V vocabulary.

TargetContext  right-aligned: all rows end in the last column, so that columns are as far apart as the positions they
               hold, which the sliding layers of a target rely on. Shorter rows have padding in front, masked.
DraftContext   left-aligned: the column is the position, so that the training mask's own predicate (masks.py) hides what
               lies behind a row's end. Nothing is ever cropped: a block's keys and values exist for one call, and what
               stands behind a row's end is written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel, KeyValues
from dflash.taps import FeatureTaps

CROPPABLE = {"full_attention", "sliding_attention"}


def _layers(cache: DynamicCache) -> list[Any]:
    """Return the cache's layers, each with keys and values (b, G, T, h)."""
    return cast(list[Any], cache.layers)


class TargetContext:
    """The target's keys and values of all verified tokens, and the calls that add to them."""

    def __init__(self, target: Any, taps: FeatureTaps | None = None) -> None:
        """taps, if given, must be entered by the caller. Raises DFlashError for a target that keeps a running state.

        Cropping keys and values does not rewind the state of a linear-attention layer (anatomy 4).
        """
        config = target.config.get_text_config(decoder=True)
        unfit = sorted(set(getattr(config, "layer_types", None) or ()) - CROPPABLE)
        if unfit:
            raise DFlashError(
                f"has {', '.join(unfit)} layers, whose state cannot be taken back when a drafted token is rejected",
                where="target",
                fix="Decode a target that has attention layers only.",
            )
        self.target, self.taps = target, taps
        self.device = next(target.parameters()).device
        self.cache = DynamicCache()  # without a config: sliding layers keep everything, so that they can be cropped
        self.lengths: list[int] = []

    def _call(self, tokens_bQ: Tensor, cache: DynamicCache, **settings: Any) -> tuple[Tensor, Tensor | None]:
        logits = self.target(input_ids=tokens_bQ, past_key_values=cache, use_cache=True, **settings).logits
        return logits, self.taps.features() if self.taps else None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Read the prompts; return the logits (b, V) after each and, with taps, the features (T, C) of each.

        One call per distinct length, so without padding: a query that sees nothing is NaN in some attention code, and
        a NaN value stays one behind any mask.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        longest, order = max(self.lengths), []
        logits, features, layers = [], [], []
        for length in sorted(set(self.lengths)):
            rows = [row for row, of_row in enumerate(self.lengths) if of_row == length]
            cache = DynamicCache()
            tokens_gT = torch.tensor([list(prompts[row]) for row in rows], device=self.device)
            logits_g1V, features_gTC = self._call(tokens_gT, cache, logits_to_keep=1)
            order += rows
            logits.append(logits_g1V[:, -1])
            features += [] if features_gTC is None else list(features_gTC)
            front = (0, 0, longest - length, 0)
            layers.append([(F.pad(layer.keys, front), F.pad(layer.values, front)) for layer in _layers(cache)])
        back = torch.tensor(order, device=self.device).argsort()
        for index, parts in enumerate(zip(*layers, strict=True)):
            keys, values = (torch.cat(tensors)[back] for tensors in zip(*parts, strict=True))
            self.cache.update(keys, values, index)
        return torch.cat(logits)[back], [features[place] for place in back.tolist()] if features else []

    def verify(self, tokens_bQ: Tensor) -> tuple[Tensor, Tensor | None]:
        """Append Q tokens to every row; return their logits (b, Q, V) and, with taps, their features (b, Q, C)."""
        length_b = torch.tensor(self.lengths, device=self.device)
        num_tokens, longest = tokens_bQ.shape[1], max(self.lengths)
        positions_bQ = length_b[:, None] + torch.arange(num_tokens, device=self.device)
        mask_bT = None
        if min(self.lengths) < longest:
            column = torch.arange(longest + num_tokens, device=self.device)
            mask_bT = (column >= longest - length_b[:, None]).long()
        return self._call(tokens_bQ, self.cache, position_ids=positions_bQ, attention_mask=mask_bT)

    def keep(self, num_tokens: int, counts: Sequence[int]) -> None:
        """Keep of the last `num_tokens` tokens of every row the first `counts[row]`, and align the rows again."""
        longest = max(self.lengths)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        columns = max(self.lengths)
        if len(set(counts)) == 1:
            self.cache.crop(counts[0] - num_tokens)
            return
        # Row r ends in column `longest + counts[r]`; what a shorter row takes from before column 0 is padding.
        shift_b1 = torch.tensor(counts, device=self.device)[:, None] + (longest - columns)
        source_bT = (torch.arange(columns, device=self.device) + shift_b1).clamp(min=0)[:, None, :, None]
        for layer in _layers(self.cache):
            layer.keys = layer.keys.take_along_dim(source_bT, dim=2)
            layer.values = layer.values.take_along_dim(source_bT, dim=2)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, and of their columns none that is padding in all of them."""
        surplus = max(self.lengths)
        self.lengths = [self.lengths[row] for row in rows]
        surplus -= max(self.lengths)
        self.cache.batch_select_indices(torch.tensor(list(rows), device=self.device))
        for layer in _layers(self.cache):
            layer.keys, layer.values = layer.keys[:, :, surplus:], layer.values[:, :, surplus:]


class DraftContext:
    """The drafter's keys and values of all verified tokens, one pair per layer."""

    def __init__(self, drafter: DFlashDraftModel, num_rows: int = 1) -> None:
        self.drafter = drafter
        self.lengths = [0] * num_rows
        self._buffers: list[KeyValues] = []

    @property
    def length(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.lengths)

    @property
    def key_values(self) -> list[KeyValues]:
        """Each layer's keys and values (b, G, T, h), T the longest row's length; what is behind a row's own is junk."""
        end = self.length
        return [(keys[:, :, :end], values[:, :, :end]) for keys, values in self._buffers]

    @torch.no_grad()
    def extend(self, features_bTC: Tensor, counts: Sequence[int] | None = None) -> None:
        """Append newly verified tokens by their target features: the first `counts[row]` of each row, or all T."""
        num_tokens, device = features_bTC.shape[1], features_bTC.device
        counts = [num_tokens] * len(self.lengths) if counts is None else counts
        start_b1 = torch.tensor(self.lengths, device=device)[:, None]
        positions_bT = start_b1 + torch.arange(num_tokens, device=device)
        fresh = self.drafter.context_key_values(features_bTC, positions_bT)
        self._reserve(self.length + num_tokens, fresh)
        row_b1 = torch.arange(len(self.lengths), device=device)[:, None]
        for buffers, tensors in zip(self._buffers, fresh, strict=True):
            for buffer_bGTh, tensor_bGTh in zip(buffers, tensors, strict=True):
                buffer_bGTh.transpose(1, 2)[row_b1, positions_bT] = tensor_bGTh.transpose(1, 2)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _reserve(self, columns: int, like: list[KeyValues]) -> None:
        """Make room for so many columns: half as many again as needed, so that few extensions copy everything.

        Zeros, not empty memory: a NaN behind a row's end would pass the mask."""
        if not self._buffers:
            self._buffers = [(keys[:, :, :0], values[:, :, :0]) for keys, values in like]
        missing = columns - self._buffers[0][0].shape[2]
        if missing > 0:
            room = (0, 0, 0, missing + columns // 2)
            self._buffers = [(F.pad(keys, room), F.pad(values, room)) for keys, values in self._buffers]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        index = torch.tensor(list(rows), device=self._buffers[0][0].device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers = [(keys[index], values[index]) for keys, values in self._buffers]
