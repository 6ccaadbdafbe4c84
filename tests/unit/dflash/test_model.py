"""The drafter's forward: against a second implementation, and that no block sees what decoding would not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash.acceptance import layer_masks
from dflash.anchors import build_blocks
from dflash.attention import AttentionMask
from dflash.masks import MaskLayout, dense_mask
from dflash.model import DFlashDraftModel, _rms_of_rows, rotation
from dflash.taps import extract_features
from tests.drafters import block_inputs, drafter_config, random_drafter, training_states
from tests.tiny import MASK_ID, tiny_model

F64 = torch.float64
OVERLAPPING = [5, 8]  # closer than the block size of 16


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(x_Lh: Tensor, positions: list[int], theta: float) -> Tensor:
    """Rotate each pair (j, j + h/2) of a row by position * theta^(-2j/h); the angle is float32, as the model's."""
    half = x_Lh.shape[1] // 2
    frequency = theta ** (-torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = (torch.tensor(positions, dtype=torch.float32)[:, None] * frequency).to(torch.float32)
    cos, sin = angle.cos().double(), angle.sin().double()
    left, right = x_Lh[:, :half], x_Lh[:, half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=1)


def _dense_forward(
    w: Mapping[str, Tensor],
    features_TC: Tensor,
    blocks: list[tuple[int, Tensor]],
    *,
    heads: int,
    groups: int,
    layers: int,
) -> Tensor:
    """The forward of anatomy 1.3 and 1.4, one block at a time, over its own context only: no mask anywhere."""
    context = _norm(features_TC @ w["fc.weight"].T, w["hidden_norm.weight"])
    states = []
    for anchor, embeddings_BD in blocks:
        x = embeddings_BD
        seen = context[:anchor]
        here = list(range(anchor, anchor + len(x)))
        for layer in range(layers):
            at = {name.split(f"layers.{layer}.")[1]: t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
            h = _norm(x, at["input_layernorm.weight"])
            q_all = h @ at["self_attn.q_proj.weight"].T
            k_all = torch.cat((seen, h)) @ at["self_attn.k_proj.weight"].T
            v_all = torch.cat((seen, h)) @ at["self_attn.v_proj.weight"].T
            width = q_all.shape[1] // heads
            outputs = []
            for head in range(heads):
                group = head // (heads // groups)
                q = q_all[:, head * width : (head + 1) * width]
                k = k_all[:, group * width : (group + 1) * width]
                v = v_all[:, group * width : (group + 1) * width]
                q = _turned(_norm(q, at["self_attn.q_norm.weight"]), here, 10000.0)
                k = _turned(_norm(k, at["self_attn.k_norm.weight"]), [*range(anchor), *here], 10000.0)
                outputs.append(torch.softmax(q @ k.T / width**0.5, dim=-1) @ v)
            x = x + torch.cat(outputs, dim=1) @ at["self_attn.o_proj.weight"].T
            h = _norm(x, at["post_attention_layernorm.weight"])
            gate, up = h @ at["mlp.gate_proj.weight"].T, h @ at["mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ at["mlp.down_proj.weight"].T
        states.append(_norm(x, w["norm.weight"]))
    return torch.stack(states)


def _random_inputs(drafter: DFlashDraftModel, length: int, anchors: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return random features (1, T, C), and embeddings and positions of the blocks at `anchors`."""
    generator = torch.Generator().manual_seed(1)
    config = drafter.config
    features = torch.randn(1, length, config.feature_size, generator=generator, dtype=F64)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator, dtype=F64)
    return features, *block_inputs(config, list(range(20, 20 + length)), anchors, table)


def test_the_forward_equals_a_second_implementation_without_masks() -> None:
    drafter = random_drafter(dtype=F64, num_hidden_layers=3)
    anchors = [1, 3, 5, 17, 19]
    features, embeddings, positions = _random_inputs(drafter, 20, anchors)
    states = training_states(drafter, features, embeddings, positions, anchors)
    blocks = list(zip(anchors, embeddings.view(len(anchors), 4, -1), strict=True))
    expected = _dense_forward(dict(drafter.named_parameters()), features[0], blocks, heads=4, groups=2, layers=3)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


def test_a_block_without_context_equals_the_second_implementation_too() -> None:
    """Anchor 0 is what an empty place holds."""
    drafter = random_drafter(dtype=F64)
    features, embeddings, positions = _random_inputs(drafter, 6, [0])
    states = training_states(drafter, features, embeddings, positions, [0])
    weights = dict(drafter.named_parameters())
    expected = _dense_forward(weights, features[0], [(0, embeddings[0])], heads=4, groups=2, layers=2)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


def _leaky_masks(drafter: DFlashDraftModel, anchors: list[int], length: int, extra: int) -> list[AttentionMask]:
    """Return masks with k < anchor + extra; 1 is the classic fault, k <= anchor."""
    mask = dense_mask(torch.tensor([anchors]), MaskLayout(length, drafter.config.block_size))
    anchor_Q1 = torch.tensor(anchors).repeat_interleave(drafter.config.block_size)[:, None]
    context = torch.arange(length) < anchor_Q1 + extra
    mask[0, 0, :, :length] = context
    return [mask] * drafter.config.num_hidden_layers


def _feature_leak(drafter: DFlashDraftModel, block: int, leaky: bool) -> float:
    """Return how much a block's states move when every feature at and after its anchor is replaced."""
    length = 32
    features, embeddings, positions = _random_inputs(drafter, length, OVERLAPPING)
    masks = _leaky_masks(drafter, OVERLAPPING, length, extra=1) if leaky else None
    before = training_states(drafter, features, embeddings, positions, OVERLAPPING, masks)
    changed = features.clone()
    changed[:, OVERLAPPING[block] :] += 1.0
    after = training_states(drafter, changed, embeddings, positions, OVERLAPPING, masks)
    return (after - before)[block].abs().max().item()


@pytest.mark.parametrize("block", [0, 1])
def test_features_at_and_after_the_anchor_change_nothing_though_blocks_overlap(block: int) -> None:
    """Overlapping blocks leaked future features when anchors stood closer than B (SpecForge#470)."""
    drafter = random_drafter(dtype=F64, block_size=16)
    assert _feature_leak(drafter, block, leaky=False) == 0.0
    assert _feature_leak(drafter, block, leaky=True) > 1e-3


def test_the_feature_just_before_the_anchor_does_change_the_block() -> None:
    drafter = random_drafter(dtype=F64, block_size=16)
    features, embeddings, positions = _random_inputs(drafter, 32, OVERLAPPING)
    before = training_states(drafter, features, embeddings, positions, OVERLAPPING)
    features[:, 4] += 1.0
    after = training_states(drafter, features, embeddings, positions, OVERLAPPING)
    assert ((after - before).abs().amax(-1) > 1e-6).all()


def test_blocks_do_not_see_each_other() -> None:
    drafter = random_drafter(dtype=F64, block_size=16)
    features, embeddings, positions = _random_inputs(drafter, 32, OVERLAPPING)
    before = training_states(drafter, features, embeddings, positions, OVERLAPPING)
    changed = embeddings.clone()
    changed[:, 16:] += 1.0
    after = training_states(drafter, features, changed, positions, OVERLAPPING)
    assert torch.equal(after[0], before[0])
    assert (after[1] - before[1]).abs().max() > 1e-3


def _states_of_text(drafter: DFlashDraftModel, target: Any, tokens: list[int], extra: int) -> Tensor:
    """Return the states of a text by the whole path: tokens, target features, blocks, mask (see _leaky_masks)."""
    anchors = OVERLAPPING
    text, places = torch.tensor(tokens), torch.tensor(anchors)
    features = extract_features(target, text[None], drafter.config.target_layer_ids)
    blocks = build_blocks(
        text.numpy(),
        torch.ones(len(tokens), dtype=torch.bool).numpy(),
        places.numpy(),
        num_anchors=len(anchors),
        block_size=drafter.config.block_size,
        mask_token_id=MASK_ID,
    )
    embeddings = target.get_input_embeddings()(torch.from_numpy(blocks.noise_NK).reshape(1, -1))
    positions = (places[:, None] + torch.arange(drafter.config.block_size)).reshape(1, -1)
    masks = _leaky_masks(drafter, anchors, len(tokens), extra) if extra else None
    return training_states(drafter, features, embeddings, positions, anchors, masks)


def _moved_blocks(position: int, extra: int = 0) -> list[bool]:
    """Return which blocks move when the token at `position` is replaced in the text."""
    target, drafter = tiny_model().double(), random_drafter(dtype=F64, block_size=16)
    tokens = list(range(40, 72))
    changed = [200 if i == position else token for i, token in enumerate(tokens)]
    with torch.no_grad():
        before = _states_of_text(drafter, target, tokens, extra)
        after = _states_of_text(drafter, target, changed, extra)
    return [bool(moved > 1e-6) for moved in (after - before).abs().amax((1, 2))]


@pytest.mark.parametrize(
    ("position", "moved"),
    [
        (4, [True, True]),
        (5, [True, True]),  # the first anchor; context of the second block
        (6, [False, True]),
        (7, [False, True]),
        (8, [False, True]),  # the second anchor, a label of the first block
        (9, [False, False]),
        (20, [False, False]),
        (31, [False, False]),
    ],
)
def test_a_token_after_the_anchor_changes_no_state_of_its_block(position: int, moved: list[bool]) -> None:
    """The whole path with a real target, anchors 5 and 8, B = 16 (SpecForge#470)."""
    assert _moved_blocks(position) == moved


def test_a_mask_one_place_too_wide_is_caught_by_the_same_comparison() -> None:
    """The feature at a + 1 holds the token at a + 1, the first label; k <= a alone adds nothing a text could show."""
    assert _moved_blocks(6, extra=0) == [False, True]
    assert _moved_blocks(6, extra=1) == [False, True]
    assert _moved_blocks(6, extra=2) == [True, True]


def test_slots_of_one_block_see_each_other_both_ways_unless_causal() -> None:
    for causal, first_slot_moves in ((False, True), (True, False)):
        drafter = random_drafter(dtype=F64, is_causal=causal)
        features, embeddings, positions = _random_inputs(drafter, 12, [6])
        before = training_states(drafter, features, embeddings, positions, [6])
        embeddings[:, 3] += 1.0
        after = training_states(drafter, features, embeddings, positions, [6])
        moved = (after - before)[0].abs().amax(-1) > 1e-9
        assert moved.tolist() == [first_slot_moves] * 3 + [True]


def test_a_sliding_layer_forgets_what_left_its_window() -> None:
    """vllm#40898: a sliding drafter must not run as a full one."""
    sliding = random_drafter(dtype=F64, layer_types=("sliding_attention",) * 2, sliding_window=6)
    full = random_drafter(dtype=F64)
    for drafter, moves in ((sliding, False), (full, True)):
        features, embeddings, positions = _random_inputs(drafter, 20, [15])
        before = training_states(drafter, features, embeddings, positions, [15])
        features[:, :10] += 1.0  # slot 0 stands at 15 and sees 10 to 15
        after = training_states(drafter, features, embeddings, positions, [15])
        assert bool((after - before).abs().max() > 1e-6) is moves


def test_each_layer_gets_the_mask_of_its_kind() -> None:
    drafter = random_drafter(
        num_hidden_layers=3,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        sliding_window=3,
        is_causal=True,
    )
    anchors = torch.tensor([[4, 7]])
    masks = layer_masks(drafter, anchors, 10, "eager")
    assert masks[0] is masks[2]
    assert torch.equal(masks[0], dense_mask(anchors, MaskLayout(10, 4, window=3, causal=True)))
    assert torch.equal(masks[1], dense_mask(anchors, MaskLayout(10, 4, window=None, causal=True)))


def test_five_layers_have_the_58_tensors_of_the_published_files() -> None:
    """Anatomy 3.1: no prefix, no rotary buffers, no embedding, no head."""
    with torch.device("meta"):
        drafter = DFlashDraftModel(drafter_config(num_hidden_layers=5))
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for layer in range(5):
        expected |= {f"layers.{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")}
        expected |= {f"layers.{layer}.self_attn.{name}_proj.weight" for name in "qkvo"}
        expected |= {f"layers.{layer}.self_attn.{name}_norm.weight" for name in "qk"}
        expected |= {f"layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert len(expected) == 58
    assert drafter.state_dict().keys() == dict(drafter.named_parameters()).keys() == expected


def test_attention_bias_adds_four_biases_a_layer() -> None:
    with torch.device("meta"):
        drafter = DFlashDraftModel(drafter_config(attention_bias=True))
    biases = [name for name in drafter.state_dict() if name.endswith("bias")]
    assert sorted(biases) == sorted(f"layers.{i}.self_attn.{n}_proj.bias" for i in range(2) for n in "qkvo")


def test_a_drafter_for_qwen3_8b_has_one_billion_parameters() -> None:
    """Anatomy 1.4: 5 x 193 M and 83.9 M for fc."""
    config = drafter_config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
    )
    with torch.device("meta"):
        drafter = DFlashDraftModel(config)
    assert drafter.fc.weight.numel() == 83_886_080
    assert sum(p.numel() for p in drafter.parameters()) == pytest.approx(1.05e9, rel=0.005)


def test_angles_stay_float32_in_a_bf16_drafter() -> None:
    """A bf16 inv_freq is out of phase at position 30,000 (Automodel#2859)."""
    position = torch.tensor([[30000]])
    exact = 30000 * 1e6 ** (-torch.arange(0, 128, 2, dtype=F64) / 128)
    cos, sin = rotation(position, 128, 1e6, torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    rounding = 2**-8  # of the cosine itself
    assert (cos[0, 0, 0, :64].double() - exact.cos()).abs().max() < rounding + 0.005
    assert (sin[0, 0, 0, :64].double() - exact.sin()).abs().max() < rounding + 0.005
    cast = 30000 * (1e6 ** (-torch.arange(0, 128, 2, dtype=F64) / 128)).bfloat16().double()
    assert (cast.cos() - exact.cos()).abs().max() > 1.0


def test_casting_the_whole_drafter_changes_no_angle() -> None:
    """Nothing of the rotation is stored in the module, so there is nothing that `to(bfloat16)` could cast."""
    drafter = random_drafter(dtype=torch.bfloat16)
    assert dict(drafter.named_buffers()) == {}
    features = torch.zeros(1, 1, drafter.config.feature_size, dtype=torch.bfloat16)
    features[..., 0] = 1.0
    near = drafter.context_key_values(features, torch.tensor([[0]]))[0][0]
    far = drafter.context_key_values(features, torch.tensor([[30000]]))[0][0]
    cos, sin = rotation(torch.tensor([[30000]]), 16, 10000.0, F64)
    first, second = near.double().chunk(2, -1)
    expected = near.double() * cos + torch.cat((-second, first), -1) * sin
    torch.testing.assert_close(far.double(), expected, rtol=0.02, atol=0.02)


def test_the_rotation_is_that_of_transformers_qwen3() -> None:
    config = tiny_model(num_hidden_layers=1).config
    positions = torch.tensor([[0, 1, 7, 255, 3000]])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rotation(positions, 16, 10000.0, torch.float32)
    torch.testing.assert_close(ours[0][:, 0], cos, rtol=0, atol=1e-3)
    torch.testing.assert_close(ours[1][:, 0], sin, rtol=0, atol=1e-3)


def test_the_same_seed_gives_the_same_start_and_another_seed_another() -> None:
    head = torch.randn(320, 64)
    drafters = [DFlashDraftModel(drafter_config(attention_bias=True)) for _ in range(3)]
    for drafter, seed in zip(drafters, (1, 1, 2), strict=True):
        drafter.initialise(seed, head)
    first, again, other = (dict(drafter.named_parameters()) for drafter in drafters)
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert first["fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert all(first[name].eq(0).all() for name in first if name.endswith("bias"))


def test_a_fresh_drafter_gives_the_mask_token_a_logit_of_four() -> None:
    """With a tied head and the final norm at 1 it would be sqrt(D) * |row|, and the loss would start far off."""
    target = tiny_model()
    head = target.get_output_embeddings().weight.detach()
    drafter = DFlashDraftModel(drafter_config())
    drafter.initialise(0, head)
    row = head[MASK_ID] / head[MASK_ID].square().mean().sqrt()
    logit = (row * drafter.norm.weight) @ head[MASK_ID]
    typical = head.square().sum(1).mean().sqrt()
    assert logit.item() == pytest.approx(4.0 * (head[MASK_ID].norm() / typical).item(), rel=1e-5)


def test_a_drafter_starts_from_the_same_bits_whatever_the_number_of_threads() -> None:
    """Ranks, threads and hosts have different numbers of cores; the mean over a vocabulary of Qwen3's size depends on
    it."""
    before, starts = torch.get_num_threads(), list[list[float]]()
    heads = [torch.randn(151_936, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            starts.append([_rms_of_rows(head) for head in heads])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert starts[0] == starts[1] == starts[2]
