"""Features are the outputs of the named decoder layers, counted from 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash.errors import DFlashError
from dflash.taps import FeatureTaps, decoder_layers, extract_features
from tests.tiny import tiny_model

IDS = torch.tensor([[7, 8, 9, 10, 11, 12], [20, 30, 40, 50, 60, 70]])


class _AddLayer(nn.Module):
    """A decoder layer whose output is one constant everywhere; `as_tuple` returns it as older transformers did."""

    def __init__(self, number: int, as_tuple: bool) -> None:
        super().__init__()
        self.number, self.as_tuple = number, as_tuple

    def forward(self, x: Tensor) -> Any:
        out = x * 0 + self.number
        return (out, None) if self.as_tuple else out


class _Body(nn.Module):
    def __init__(self, num_layers: int, as_tuple: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_AddLayer(number, as_tuple) for number in range(num_layers))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, use_cache: bool) -> Tensor:
        x = torch.zeros(*input_ids.shape, 3)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class _Counting(nn.Module):
    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.model = _Body(8, as_tuple)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_features_spell_the_layer_ids_in_the_order_of_the_list(as_tuple: bool) -> None:
    features = extract_features(_Counting(as_tuple), IDS, (5, 0, 7))
    assert features.shape == (2, 6, 9)
    assert features[1, 3].tolist() == [5, 5, 5, 0, 0, 0, 7, 7, 7]


def test_the_final_state_is_what_the_head_reads_behind_the_taps() -> None:
    """For soft labels; transformers' own hidden_states[-1], which is normed."""
    target = tiny_model()
    features = extract_features(target, IDS, (1, 3), final_state=True)
    out = target.model(IDS, output_hidden_states=True)
    assert features.shape == (2, 6, 3 * 64)
    assert torch.equal(features[..., :128], extract_features(target, IDS, (1, 3)))
    assert torch.equal(features[..., 128:], out.hidden_states[-1])
    assert not torch.equal(features[..., 128:], features[..., 64:128])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tap_id_is_hidden_state_id_plus_one(arch: str) -> None:
    """Off by one is the usual fault (TorchSpec#87, #89): hidden_states[0] is the embedding."""
    target = tiny_model(arch)
    with torch.no_grad():
        states = target(IDS, output_hidden_states=True).hidden_states
    features = extract_features(target, IDS, (0, 1, 2))
    assert torch.equal(features, torch.cat(states[1:4], dim=-1))
    for layer in range(3):
        assert not torch.allclose(features[..., layer * 64 : (layer + 1) * 64], states[layer])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_tap_of_the_last_layer_is_taken_before_the_final_norm(arch: str) -> None:
    """transformers norms hidden_states[-1]; the tap must not be (TorchSpec#89)."""
    target = tiny_model(arch)
    with torch.no_grad():
        normed = target(IDS, output_hidden_states=True).hidden_states[-1]
        tap = extract_features(target, IDS, (3,))
        assert torch.allclose(target.model.norm(tap), normed, atol=1e-5)
    assert not torch.allclose(tap, normed, atol=1e-2)


def test_right_padding_changes_no_feature_of_the_text() -> None:
    target = tiny_model().double()  # in float32 another shape rounds otherwise, on some CPUs by 8e-5
    padded = torch.cat((IDS, torch.zeros(2, 5, dtype=torch.long)), dim=1)
    features = extract_features(target, padded, (1, 3))
    torch.testing.assert_close(features[:, :6], extract_features(target, IDS, (1, 3)), rtol=0, atol=1e-9)


def test_extraction_does_not_run_the_head() -> None:
    target = tiny_model(tie_word_embeddings=False)
    calls = []
    target.lm_head.register_forward_hook(lambda *_: calls.append(1))
    extract_features(target, IDS, (0,))
    assert calls == []
    target(IDS)
    assert calls == [1]


def _num_hooks(target: nn.Module) -> int:
    return sum(len(layer._forward_hooks) for layer in decoder_layers(target))


def test_hooks_are_removed_afterwards_also_after_an_error() -> None:
    target = tiny_model()
    before = _num_hooks(target)
    with pytest.raises(RuntimeError, match="stop"), FeatureTaps(target, (0, 2)):
        assert _num_hooks(target) == before + 2
        raise RuntimeError("stop")
    assert _num_hooks(target) == before
    extract_features(target, IDS, (0, 2))
    assert _num_hooks(target) == before


def test_features_are_given_once_for_each_forward() -> None:
    """Features of an earlier forward must not pass for those of this one."""
    target = tiny_model()
    with torch.no_grad(), FeatureTaps(target, (1,)) as taps:
        target(IDS)
        first = taps.features()
        with pytest.raises(RuntimeError, match=r"layers \[1\] did not run"):
            taps.features()
        target(IDS.flip(1))
        assert not torch.equal(taps.features(), first)


@pytest.mark.parametrize("layer_id", [-1, 4])
def test_a_layer_that_the_target_has_not_is_refused(layer_id: int) -> None:
    with pytest.raises(DFlashError) as caught:
        FeatureTaps(tiny_model(), (0, layer_id))
    assert str(caught.value) == (
        f"target_layer_ids: [{layer_id}] are not among the target's 4 layers. Layers count from 0."
    )


def test_a_target_without_decoder_layers_is_refused_by_name() -> None:
    with pytest.raises(DFlashError, match=r"target: Linear has no model.layers"):
        decoder_layers(nn.Linear(2, 2))
