"""What is exported means to an independent reader what it means here: same states, same drafts, same decoded text.

tests/reference_drafter.py is written from anatomy 1.1 to 1.6 and 3.1 alone and imports none of the library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import load_drafter
from dflash.decode import greedy_decode, speculative_decode
from dflash.interchange.drafter import ForeignDrafter, write_zlab
from dflash.model import DFlashDraftModel
from dflash.taps import extract_features
from tests import reference_drafter
from tests.drafters import block_inputs, random_drafter, training_states
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "mixed, unsaid": MIXED | {"is_causal": None},
    "mixed, causal": MIXED | {"is_causal": True},
    "mixed, both ways": MIXED | {"is_causal": False},
    "window smaller than the block": MIXED | {"sliding_window": 2, "is_causal": False},
    "biases, scaled input, theta": {"attention_bias": True, "input_embedding_scale": 0.5, "rope_theta": 1e6},
}
TAPS = (0, 2)
"""Not the last layer: transformers gives its output with the final norm applied, which a tap is not."""
TEXT = [5, 90, 17, 33, 200, 41, 7, 7, 12, 250, 61, 99, 18]


def _export(folder: Path, changes: dict[str, Any], text: Sequence[int] = (), target: Any = None) -> Path:
    """Write a random drafter, fitted to `text` if there is one, so that some of its drafts are right."""
    drafter = random_drafter(target_layer_ids=TAPS, **changes)
    if text:
        _fit(drafter, text, target)
    write_zlab(folder, ForeignDrafter("z-lab", drafter.config, dict(drafter.state_dict())), {})
    return folder


def _fit(drafter: DFlashDraftModel, text: Sequence[int], target: Any) -> None:
    table = target.get_input_embeddings().weight.detach()
    features = extract_features(target, torch.tensor([list(text)]), TAPS)
    anchors = list(range(1, len(text) - drafter.config.block_size))
    embeddings, positions = block_inputs(drafter.config, text, anchors, table)
    labels = torch.tensor([list(text[a + 1 : a + drafter.config.block_size]) for a in anchors])
    optimiser = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(30):
        states = training_states(drafter, features, embeddings, positions, anchors)[:, 1:]
        loss = torch.nn.functional.cross_entropy((states @ table.T).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@pytest.mark.parametrize("name", VARIANTS)
def test_an_independent_reader_computes_the_same_states(tmp_path: Path, name: str) -> None:
    folder, target = _export(tmp_path / "drafter", VARIANTS[name]), tiny_model()
    drafter = load_drafter(folder)
    config, tensors = reference_drafter.load(folder)
    anchor = len(TEXT) - 1
    table = target.get_input_embeddings().weight.detach()
    embeddings, positions = block_inputs(drafter.config, TEXT, [anchor], table)
    embeddings = embeddings * drafter.config.input_embedding_scale
    features = extract_features(target, torch.tensor([TEXT[:anchor]]), drafter.config.target_layer_ids)
    with torch.no_grad():
        ours = training_states(drafter, features, embeddings, positions, [anchor])[0]
    theirs = reference_drafter.block_states(
        config, tensors, reference_drafter.target_features(config, target, TEXT[:anchor]), embeddings[0]
    )
    assert (ours - theirs).abs().max() < 1e-5
    # Reading the mask in another way must not pass: the test would prove nothing.
    other = json.loads(json.dumps(config)) | {"is_causal": not drafter.config.layer_causal(1)}
    changed = reference_drafter.block_states(
        other, tensors, reference_drafter.target_features(config, target, TEXT[:anchor]), embeddings[0]
    )
    assert (ours - changed).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["full", "mixed, unsaid"])
def test_an_independent_loop_decodes_the_same_text_with_the_same_acceptance(tmp_path: Path, name: str) -> None:
    target = tiny_model()
    text = TEXT + greedy_decode(target, TEXT, max_new_tokens=24, eos_ids=())
    folder = _export(tmp_path / "drafter", VARIANTS[name], text, target)
    tokens, accepted = reference_drafter.decode(folder, target, TEXT, 20)
    ours = speculative_decode(target, load_drafter(folder), TEXT, max_new_tokens=len(tokens), eos_ids=())
    assert ours.tokens == tokens == text[len(TEXT) :][: len(tokens)]
    assert ours.accepted == accepted
    assert sum(accepted) > 3, "nothing was accepted, so nothing was compared"


def test_an_independent_reader_drafts_the_same_tokens(tmp_path: Path) -> None:
    folder, target = _export(tmp_path / "drafter", VARIANTS["mixed, unsaid"]), tiny_model()
    drafter, (config, tensors) = load_drafter(folder), reference_drafter.load(folder)
    table = target.get_input_embeddings().weight.detach()
    features = extract_features(target, torch.tensor([TEXT]), drafter.config.target_layer_ids)
    for anchor in range(1, len(TEXT)):
        embeddings, positions = block_inputs(drafter.config, TEXT, [anchor], table)
        with torch.no_grad():
            states = training_states(drafter, features, embeddings, positions, [anchor])[0, 1:]
        ours = (states @ table.T).argmax(-1).tolist()
        assert reference_drafter.draft(config, tensors, target, TEXT[: anchor + 1]) == ours
