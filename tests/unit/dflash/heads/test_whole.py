"""Drafters with a head, whole: they start as plain ones, train, and draft in decoding what tau's walk says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash.acceptance import chained_walk, layer_masks
from dflash.anchors import build_blocks, eligible_anchors
from dflash.checkpoint import load_drafter, save_drafter
from dflash.decode import greedy_decode, speculative_decode, speculative_decode_batch
from dflash.errors import DFlashError
from dflash.head import block_embeddings
from dflash.heads.loss import picker_loss
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss, make_rows
from dflash.sampling import Sampling, row_generators
from dflash.taps import extract_features
from tests.drafters import drafter_config, scramble
from tests.tiny import MASK_ID, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4},
    "markov": {"markov_rank": 8},
}
PROMPTS = [[10, 200, 31, 77], [5], [90, 91, 92, 93, 94, 95, 96], [40, 41], [7, 300, 7, 300, 7]]
BLOCK, NUM_TOKENS = 5, 22


@dataclass
class _Texts:
    """A float64 target, its greedy answers and their features."""

    target: Any
    answers: list[list[int]]
    features: list[Tensor]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.target.get_input_embeddings().weight, self.target.get_output_embeddings().weight


@pytest.fixture(scope="module")
def texts() -> _Texts:
    target: Any = tiny_model().double()
    answers = [greedy_decode(target, p, max_new_tokens=NUM_TOKENS, eos_ids=()) for p in PROMPTS]
    whole = [torch.tensor([[*p, *a]]) for p, a in zip(PROMPTS, answers, strict=True)]
    return _Texts(target, answers, [extract_features(target, ids, (1, 3)) for ids in whole])


def _fresh(texts: _Texts, **changes: Any) -> DFlashDraftModel:
    drafter = DFlashDraftModel(drafter_config(block_size=BLOCK, **changes))
    drafter.initialise(0, texts.tables[1])
    return drafter.double()


def _train(drafter: DFlashDraftModel, texts: _Texts, steps: int) -> DFlashDraftModel:
    embedding_VD, head_VD = texts.tables
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3, weight_decay=0.0)
    weighting = Weighting("decay", gamma=3.0)
    for step in range(steps):
        number = step % len(PROMPTS)
        tokens = np.array([*PROMPTS[number], *texts.answers[number]])
        supervised = np.arange(len(tokens)) >= len(PROMPTS[number])
        anchors = eligible_anchors(supervised)
        blocks = build_blocks(
            tokens, supervised, anchors, num_anchors=len(anchors), block_size=BLOCK, mask_token_id=MASK_ID
        )
        rows = make_rows(torch.from_numpy(blocks.labels_NK), torch.from_numpy(blocks.valid_NK), 40)
        noise = block_embeddings(torch.from_numpy(blocks.noise_NK).view(1, -1), embedding_VD, drafter.config)
        anchors_1N = torch.from_numpy(anchors)[None]
        positions = (anchors_1N[0, :, None] + torch.arange(BLOCK)).view(1, -1)
        features = texts.features[number]
        states = drafter(
            features, noise, positions, layer_masks(drafter, anchors_1N, features.shape[1], "sdpa"), "sdpa"
        )
        hidden_RD = states.flatten(0, 1)[rows.index_R]
        sums = head_loss(hidden_RD, head_VD, rows, weighting)
        loss = sums.numerator
        if drafter.picker:
            places = (torch.from_numpy(tokens)[None], anchors_1N, rows)
            loss = loss + picker_loss(drafter.picker, hidden_RD, head_VD, *places, weighting, drafter.config)
        optimizer.zero_grad()
        (loss / sums.denominator).backward()
        optimizer.step()
    return drafter.eval()


def _walks(drafter: DFlashDraftModel, texts: _Texts) -> list[list[int]]:
    return [
        chained_walk(drafter, features, [*prompt, *answer], len(prompt), *texts.tables)
        for prompt, answer, features in zip(PROMPTS, texts.answers, texts.features, strict=True)
    ]


@pytest.mark.parametrize("head", HEADS)
def test_a_fresh_one_is_the_plain_drafter_of_the_same_seed(head: str, texts: _Texts) -> None:
    plain, fresh = _fresh(texts), _fresh(texts, **HEADS[head])
    own = dict(fresh.named_parameters())
    assert all(torch.equal(own[name], parameter) for name, parameter in plain.named_parameters())
    assert len(own) > len(dict(plain.named_parameters()))
    scrambled = scramble(_fresh(texts), 3)  # a fresh drafter accepts nothing, which would show little
    fresh.load_state_dict(scrambled.state_dict(), strict=False)
    assert _walks(fresh, texts) == _walks(scrambled.double(), texts)


@pytest.mark.parametrize("head", HEADS)
def test_a_trained_one_decodes_what_the_target_writes_in_the_calls_that_the_walk_says(head: str, texts: _Texts) -> None:
    """Train equals decode for heads that look at the token before a slot: the walk drafts by the training mask."""
    drafter = _train(_fresh(texts, **HEADS[head]), texts, 60)
    walks = _walks(drafter, texts)
    for prompt, answer, walk in zip(PROMPTS, texts.answers, walks, strict=True):
        decoded = speculative_decode(texts.target, drafter, prompt, max_new_tokens=NUM_TOKENS, eos_ids=())
        assert decoded.tokens == answer
        # The text ends where it was cut: the last call may accept more than is known.
        assert decoded.accepted[:-1] == walk[:-1] and len(decoded.accepted) == len(walk)
    batch = speculative_decode_batch(texts.target, drafter, PROMPTS, max_new_tokens=NUM_TOKENS, eos_ids=())
    assert [d.tokens for d in batch] == texts.answers

    calls = sum(map(len, walks))
    picker, drafter.candidate_selector, drafter.markov_head = drafter.picker, None, None
    without = sum(map(len, _walks(drafter, texts)))
    assert picker is not None and calls < without, "the head chooses nothing that the plain drafter does not"


@pytest.mark.parametrize("head", HEADS)
def test_sampling_with_a_head_keeps_the_targets_distribution(head: str, texts: _Texts) -> None:
    """The second of two sampled tokens, drafted by the head, over 3,000 rows, against exact probabilities."""
    drafter = _train(_fresh(texts, **HEADS[head]), texts, 60)
    prompt, sampling, count = PROMPTS[0], Sampling(temperature=0.6, top_k=3), 3000
    found = speculative_decode_batch(
        texts.target,
        drafter,
        [prompt] * count,
        max_new_tokens=2,
        eos_ids=(),
        sampling=sampling,
        generators=row_generators(7, count),
    )
    expected: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        first = sampling.probabilities(texts.target(torch.tensor([prompt])).logits[0, -1])
        for a in first.nonzero()[:, 0].tolist():
            second = sampling.probabilities(texts.target(torch.tensor([[*prompt, a]])).logits[0, -1])
            for b in second.nonzero()[:, 0].tolist():
                expected[a, b] = float(first[a] * second[b])
    seen = [tuple(d.tokens) for d in found]
    assert set(seen) <= set(expected)
    distance = sum(abs(seen.count(pair) / count - chance) for pair, chance in expected.items()) / 2
    assert distance < 0.03
    assert sum(d.accepted[0] for d in found) > 0.05 * count, "nothing drafted was accepted, so nothing was shown"


@pytest.mark.parametrize("head", HEADS)
def test_a_folder_holds_the_public_names_and_loads_to_the_bit(head: str, texts: _Texts, tmp_path: Any) -> None:
    drafter = scramble(_fresh(texts, **HEADS[head])).float()
    names = set(dict(drafter.named_parameters()))
    public = {
        "dflash2": {
            "layers.0.attention_conv.base_kernel",
            "layers.1.mlp_conv.kernel_projection.weight",
            "candidate_selector.predecessor_codebook",
            "candidate_selector.successor_codebook",
            "candidate_selector.hidden_projection.weight",
        },
        "markov": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
    }
    assert public[head] <= names
    save_drafter(tmp_path / "out", drafter.config, dict(drafter.named_parameters()), torch.float32)
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == drafter.config
    pairs = zip(drafter.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_half_a_dflash2_and_two_heads_are_refused() -> None:
    with pytest.raises(DFlashError, match="selector_rank: 0 beside conv_kernel_size 2"):
        drafter_config(conv_kernel_size=2)
    with pytest.raises(DFlashError, match="only one of them can choose"):
        drafter_config(**HEADS["dflash2"], **HEADS["markov"])
