"""DFlash 2's dynamic depthwise convolution: a slot mixes in the slot before it, around each sublayer of a draft layer.

    y_t = sum_j (base[j] + dynamic[t, j]) * x_{t-j},   x_{t-j} = 0 before the block's first slot

The base taps are one per channel; the dynamic ones are a linear function of the sublayer's input and shared by
`group_size` channels. One projection serves both sides of a sublayer, before it and after it. A plain drafter is the
case base = (1, 0), dynamic = 0, which is where training starts, so a plain drafter can be trained on.

Legend: b batch, Q block tokens (whole blocks of B slots), j taps, D width, G = D / group_size groups.
Source: z-lab's DFlash 2 drafters, whose tensor names these are (anatomy 1.8, 3.1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.errors import DFlashError

BEFORE, AFTER = 0, 1
"""The two sides of a sublayer: the first axis of base_kernel."""


class DynamicConv(nn.Module):
    """The convolutions before and after one sublayer. Starts as the identity, bit for bit.

    base_kernel (2, taps, D); kernel_projection.weight (2 * taps * G, D).
    Raises DFlashError if `group_size` does not divide `hidden_size`, or for fewer than one tap.
    """

    def __init__(self, hidden_size: int, block_size: int, *, taps: int = 2, group_size: int = 16) -> None:
        super().__init__()
        if group_size < 1 or hidden_size % group_size:
            raise DFlashError(
                f"{group_size} does not divide hidden_size {hidden_size}",
                where="conv_group_size",
                fix="Take a divisor of it; the published drafters have 16.",
            )
        if taps < 1:
            raise DFlashError(
                f"{taps} is not at least 1", where="conv_kernel_size", fix="The published drafters have 2."
            )
        self.block_size, self.taps, self.group_size = block_size, taps, group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)
        self.reset_to_identity()

    @torch.no_grad()
    def reset_to_identity(self) -> None:
        """Set the first tap to 1, the others and the dynamic part to 0."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def around(self, sublayer: Callable[[Tensor], Tensor], x_bQD: Tensor) -> Tensor:
        """Return after(sublayer(before(x))) as (b, Q, D), both convolutions' dynamic taps made from `x_bQD`.

        Q is whole blocks one after another, or one block with fewer slots (a shorter draft).
        """
        before_bQjD, after_bQjD = self.kernels(x_bQD)
        return self.convolve(sublayer(self.convolve(x_bQD, before_bQjD)), after_bQjD)

    def kernels(self, x_bQD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the taps before and after a sublayer whose normed input is `x_bQD`, each (b, Q, taps, D)."""
        dynamic = self.kernel_projection(x_bQD).unflatten(-1, (2, self.taps, -1))
        both = self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)
        return both[:, :, BEFORE], both[:, :, AFTER]

    def convolve(self, x_bQD: Tensor, kernel_bQjD: Tensor) -> Tensor:
        """Return sum_j kernel[j] * (x of j slots earlier in the same block) as (b, Q, D)."""
        slots = min(self.block_size, x_bQD.shape[1])
        blocks = x_bQD.unflatten(1, (-1, slots))
        mixed = kernel_bQjD[:, :, 0] * x_bQD
        for back in range(1, min(self.taps, slots)):
            earlier = F.pad(blocks[:, :, :-back], (0, 0, back, 0)).flatten(1, 2)
            mixed = mixed + kernel_bQjD[:, :, back] * earlier
        return mixed
