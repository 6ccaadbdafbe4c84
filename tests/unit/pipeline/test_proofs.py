"""The proofs hold on an honest drafter, and fail when the thing that they prove is broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint import save_drafter
from dflash.model import DFlashDraftModel
from pipeline import proofs
from pipeline.proofs import (
    DecodedSet,
    chained_tau,
    decode_set,
    export_equals_training,
    lossless,
    train_equals_decode,
)
from tests.drafters import drafter_config, leaky_masks, random_drafter
from tests.tiny import EOS_ID, tiny_model
from tests.tiny_run import made_up_samples


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def drafter() -> DFlashDraftModel:
    return random_drafter()


@pytest.fixture(scope="module")
def decoded(target: Any, drafter: DFlashDraftModel) -> DecodedSet:
    done = []
    prompts = [replace(s, loss_mask=[False] * len(s.input_ids)) for s in made_up_samples(3, answer_len=0)]
    found = decode_set(
        "held_out", target, drafter, prompts, max_new_tokens=14, eos_ids={EOS_ID}, advance=lambda: done.append(1)
    )
    assert len(done) == 3
    return found


def test_prompts_decoded_at_once_give_what_each_gives_alone(
    decoded: DecodedSet, target: Any, drafter: DFlashDraftModel
) -> None:
    prompts = [replace(s, loss_mask=[False] * len(s.input_ids)) for s in made_up_samples(3, answer_len=0)]
    limits: Any = {"max_new_tokens": 14, "eos_ids": {EOS_ID}, "advance": lambda: None}
    for at_once in (2, 3):
        found = decode_set("held_out", target, drafter, prompts, **limits, at_once=at_once)
        assert (found.prompts, found.plain) == (decoded.prompts, decoded.plain)
        assert [d.tokens for d in found.speculative] == [d.tokens for d in decoded.speculative]
        assert [d.accepted for d in found.speculative] == [d.accepted for d in decoded.speculative]
        assert lossless([found]).holds


def test_speculative_decoding_is_lossless_and_a_single_other_token_is_found(decoded: DecodedSet) -> None:
    assert sum(len(p) for p in decoded.plain) > 30
    assert lossless([decoded]).holds
    tokens = list(decoded.plain[1])
    tokens[5] += 1
    wrong = replace(decoded, plain=[decoded.plain[0], tokens, decoded.plain[2]])
    gate = lossless([decoded, wrong])
    assert (gate.holds, gate.value) == (False, 1)
    assert gate.detail == "first difference: held_out prompt 1, token 5"
    short = replace(decoded, plain=[decoded.plain[0][:-1], *decoded.plain[1:]])
    assert lossless([short]).detail.endswith(f"prompt 0, token {len(decoded.plain[0]) - 1}")


def test_training_sees_what_decoding_sees_unless_the_mask_leaks(
    decoded: DecodedSet, drafter: DFlashDraftModel, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = train_equals_decode(decoded, drafter, target)
    assert gate.holds
    assert int(gate.detail.split()[2]) > 10  # anchors
    monkeypatch.setattr(proofs, "layer_masks", leaky_masks)
    assert not train_equals_decode(decoded, drafter, target).holds


def test_texts_without_an_anchor_prove_nothing(decoded: DecodedSet, drafter: DFlashDraftModel, target: Any) -> None:
    empty = replace(decoded, plain=[p[:1] for p in decoded.plain])
    assert not train_equals_decode(empty, drafter, target).holds


def test_the_chained_tau_is_that_of_decoding(decoded: DecodedSet, drafter: DFlashDraftModel, target: Any) -> None:
    assert chained_tau(decoded, drafter, target) == pytest.approx(decoded.tau, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_equals_the_weights_it_was_made_from_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: p.detach() for name, p in random_drafter().named_parameters()}
    save_drafter(tmp_path / "drafter", drafter_config(), weights, dtype)
    assert export_equals_training(tmp_path / "drafter", weights, dtype).holds
    changed = {**weights, "fc.weight": weights["fc.weight"] * 1.01}
    gate = export_equals_training(tmp_path / "drafter", changed, dtype)
    assert (gate.holds, gate.value) == (False, "1 tensors differ")


def test_an_export_with_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    weights = {name: p.detach() for name, p in random_drafter().named_parameters()}
    save_drafter(tmp_path / "drafter", drafter_config(), weights, torch.float32)
    file = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.zeros(2, 2)}, file)
    gate = export_equals_training(tmp_path / "drafter", weights, torch.float32)
    assert (gate.holds, gate.value) == (False, "refused")
    assert "lm_head.weight" in gate.detail
