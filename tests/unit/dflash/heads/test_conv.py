"""DFlash 2's convolution: the identity at the start, its formula in float64, and no step over a block's edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash.context import DraftContext
from dflash.decode import draft_states
from dflash.errors import DFlashError
from dflash.heads.conv import DynamicConv
from dflash.model import DFlashDraftModel
from tests.drafters import block_inputs, drafter_config, random_drafter, scramble, training_states

BLOCK, WIDTH = 4, 32
ANCHORS = (5, 8, 9)


def convolved(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """Return the drafter as a DFlash 2 one whose convolutions are the identity."""
    config = replace(drafter.config, conv_kernel_size=2, selector_rank=8)
    other = DFlashDraftModel(config).to(drafter.fc.weight.dtype)
    missing, unexpected = other.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected and all("conv" in name or "selector" in name for name in missing)
    return other.eval()


def scrambled(dtype: torch.dtype = torch.float64) -> DynamicConv:
    conv = DynamicConv(WIDTH, BLOCK, group_size=8).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return conv


def states(num_blocks: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_blocks * BLOCK, WIDTH, generator=generator, dtype=torch.float64)


def inputs(drafter: DFlashDraftModel) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
    """Return features (1, T, C), embeddings, positions of the blocks at ANCHORS, the tokens and the table."""
    config, generator = drafter.config, torch.Generator().manual_seed(2)
    tokens = torch.randint(20, 300, (16,), generator=generator).tolist()
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator, dtype=torch.float64)
    features = torch.randn(1, 16, config.feature_size, generator=generator, dtype=torch.float64)
    embeddings, positions = block_inputs(config, tokens, ANCHORS, table)
    return features, embeddings, positions, tokens, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_convolution_changes_no_bit_of_a_drafters_states(dtype: torch.dtype) -> None:
    """Model-Optimizer#2216 claimed it, and then drew the projection at random."""
    plain, other = random_drafter(dtype=dtype), convolved(random_drafter(dtype=dtype))
    features, embeddings, positions, _, _ = inputs(plain)
    found = [training_states(d, features.to(dtype), embeddings.to(dtype), positions, ANCHORS) for d in (plain, other)]
    assert torch.equal(found[0], found[1])
    scramble(other, seed=3)
    changed = training_states(other, features.to(dtype), embeddings.to(dtype), positions, ANCHORS)
    assert not torch.allclose(changed, found[0])


def test_the_formula_slot_by_slot_and_channel_by_channel() -> None:
    conv, x = scrambled(), states(num_blocks=2)
    conv.requires_grad_(False)
    before, after = conv.kernels(x)
    weight = conv.kernel_projection.weight.view(2, 2, WIDTH // 8, WIDTH)
    for side, kernel in enumerate((before, after)):
        mixed = conv.convolve(x, kernel)
        for row in range(2):
            for place in range(2 * BLOCK):
                for channel in (0, 7, 8, 31):
                    wanted = torch.zeros((), dtype=torch.float64)
                    for back in range(2):
                        if place % BLOCK >= back:
                            tap = (
                                conv.base_kernel[side, back, channel] + weight[side, back, channel // 8] @ x[row, place]
                            )
                            wanted = wanted + tap * x[row, place - back, channel]
                    assert float(mixed[row, place, channel]) == pytest.approx(float(wanted), abs=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    conv = DynamicConv(4, 3, group_size=2).double()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    base = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def through(x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        module = {"base_kernel": base, "kernel_projection.weight": weight}
        found: Tensor = torch.func.functional_call(_Around(conv), {f"conv.{k}": v for k, v in module.items()}, (x,))
        return found

    assert torch.autograd.gradcheck(through, (x, base, weight))


class _Around(torch.nn.Module):
    """The convolution around a sublayer that is not linear."""

    def __init__(self, conv: DynamicConv) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv.around(torch.tanh, x)


def test_the_first_slot_reads_zeros_and_a_block_nothing_of_its_neighbors() -> None:
    """anatomy 6.7, SpecForge#470: blocks stand one after another in training, and are drafted one by one."""
    conv, x = scrambled(), states()
    whole = conv.around(torch.tanh, x)
    apart = [conv.around(torch.tanh, x[:, first : first + BLOCK]) for first in range(0, 3 * BLOCK, BLOCK)]
    torch.testing.assert_close(whole, torch.cat(apart, 1), rtol=0, atol=1e-12)
    # The guard works only if a step over the edge would show: as one block of 12 slots, every first slot differs.
    unguarded = DynamicConv(WIDTH, 3 * BLOCK, group_size=8).double()
    unguarded.load_state_dict(conv.state_dict())
    leaked = unguarded.around(torch.tanh, x)
    assert (leaked - whole)[:, [BLOCK, 2 * BLOCK]].abs().amax(-1).min() > 1e-3
    assert torch.equal(leaked[:, 0], whole[:, 0])


def test_a_shorter_draft_gets_the_first_slots_of_a_whole_one() -> None:
    conv, x = scrambled(), states(num_blocks=1)
    whole = conv.around(torch.tanh, x)
    for slots in range(1, BLOCK):
        torch.testing.assert_close(conv.around(torch.tanh, x[:, :slots]), whole[:, :slots], rtol=0, atol=1e-12)


def test_training_equals_decoding_with_scrambled_convolutions() -> None:
    """anatomy 6.8, SpecForge#455: the states under the training mask are those of the cached decode, at every anchor,
    also of blocks that overlap."""
    drafter = scramble(convolved(random_drafter(dtype=torch.float64)), seed=4)
    features, embeddings, positions, tokens, table = inputs(drafter)
    trained = training_states(drafter, features, embeddings, positions, ANCHORS)
    for number, anchor in enumerate(ANCHORS):
        context = DraftContext(drafter, 1)
        context.extend(features[:, :anchor], [anchor])
        decoded = draft_states(drafter, context, tokens[anchor], table)
        torch.testing.assert_close(decoded[0], trained[number], rtol=0, atol=1e-10)


def test_tensor_names_and_shapes_are_the_published_ones() -> None:
    drafter = convolved(DFlashDraftModel(drafter_config()))
    found = {name: tuple(t.shape) for name, t in drafter.state_dict().items() if "conv" in name}
    width = drafter.config.hidden_size
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        for name in ("attention_conv", "mlp_conv"):
            wanted[f"layers.{layer}.{name}.base_kernel"] = (2, 2, width)
            wanted[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * 2 * width // 16, width)
    assert found == wanted


@pytest.mark.parametrize(
    ("settings", "where"), [({"group_size": 12}, "conv_group_size"), ({"taps": 0}, "conv_kernel_size")]
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, int], where: str) -> None:
    with pytest.raises(DFlashError) as caught:
        DynamicConv(WIDTH, BLOCK, **settings)
    assert caught.value.where == where
    assert str(next(iter(settings.values()))) in caught.value.what
