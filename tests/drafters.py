"""Tiny drafters for tests, and what they need around them: block inputs, and a drafter that knows the answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.acceptance import layer_masks
from dflash.attention import AttentionMask
from dflash.config import DrafterConfig
from dflash.model import DFlashDraftModel, KeyValues
from tests.tiny import MASK_ID


def drafter_config(**changes: Any) -> DrafterConfig:
    """Return the configuration of a two-layer drafter for the targets of tests/tiny.py: 4 slots, taps 1 and 3."""
    settings: dict[str, Any] = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=320,
        block_size=4,
        mask_token_id=MASK_ID,
        target_layer_ids=(1, 3),
        num_target_layers=4,
        rope_theta=10000.0,
    )
    return DrafterConfig(**(settings | changes))


def scramble(drafter: DFlashDraftModel, seed: int = 0, scale: float = 0.2) -> DFlashDraftModel:
    """Fill every parameter with random numbers, norms around 1, so that no term of the forward is idle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(drawn + 1.0 if parameter.dim() == 1 else drawn)
    return drafter


def random_drafter(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> DFlashDraftModel:
    """Return a scrambled drafter of `drafter_config(**changes)`."""
    return scramble(DFlashDraftModel(drafter_config(**changes)), seed).to(dtype).eval()


def block_inputs(
    config: DrafterConfig, tokens: Sequence[int], anchors: Sequence[int], table_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return embeddings (1, N*B, D) and positions (1, N*B) of the blocks at `anchors`, one slot at a time."""
    ids, positions = [], []
    for anchor in anchors:
        for slot in range(config.block_size):
            ids.append(tokens[anchor] if slot == 0 else config.mask_token_id)
            positions.append(anchor + slot)
    return table_VD[torch.tensor(ids)][None], torch.tensor(positions)[None]


def training_states(
    drafter: DFlashDraftModel,
    features_1TC: Tensor,
    embeddings: Tensor,
    positions: Tensor,
    anchors: Sequence[int],
    masks: Sequence[AttentionMask] | None = None,
) -> Tensor:
    """Return the states (N, B, D) of all blocks in one forward under the training mask, or under `masks`."""
    chosen = masks or layer_masks(drafter, torch.tensor([list(anchors)]), features_1TC.shape[1], "sdpa")
    states = drafter(features_1TC, embeddings, positions, chosen, "sdpa")
    return states.view(len(anchors), drafter.config.block_size, -1)


def leaky_masks(model: DFlashDraftModel, anchors_bN: Tensor, *given: Any, **more: Any) -> list[AttentionMask]:
    """The mistake that a mask can make most easily: the context reaches up to the anchor itself."""
    return layer_masks(model, anchors_bN + 1, *given, **more)


class OracleDrafter(DFlashDraftModel):
    """Drafts the tokens of `text` by looking them up, except at the positions in `wrong`, where it drafts another.

    Its states are rows of the target's tied head, scaled so that the head's argmax is the looked-up token.
    """

    def __init__(
        self, config: DrafterConfig, text: Sequence[int], head_VD: Tensor, wrong: Collection[int] = ()
    ) -> None:
        super().__init__(config)
        self.text, self.wrong = list(text), set(wrong)
        self.head_VD = head_VD.detach()
        best = (self.head_VD @ self.head_VD.T).argmax(-1)
        assert torch.equal(best, torch.arange(len(head_VD))), "a row of the head is not its own best match"

    def draft(
        self,
        embeddings_bQD: Tensor,
        positions_bQ: Tensor,
        context: Sequence[KeyValues],
        masks: Sequence[AttentionMask],
        implementation: str,
    ) -> Tensor:
        """Return head rows (1, Q, D) of the tokens that stand at `positions_bQ`."""
        ids = []
        for position in positions_bQ[0].tolist():
            token = self.text[position] if position < len(self.text) else 0
            ids.append((token + 1) % len(self.head_VD) if position in self.wrong else token)
        return self.head_VD[torch.tensor(ids)][None]
