"""Chained tau without decoding equals what speculative decoding does on the same texts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash import acceptance
from dflash.acceptance import TextDrafts, chained_walk, draft_text, drafted_at, estimate_tau, pooled_tau
from dflash.anchors import build_blocks, eligible_anchors
from dflash.decode import Decoded, DraftContext, draft_states, greedy_decode, speculative_decode
from dflash.model import DFlashDraftModel
from dflash.objective import Weighting, head_loss, make_rows
from dflash.taps import extract_features
from tests.drafters import OracleDrafter, drafter_config, random_drafter, training_states
from tests.tiny import MASK_ID, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[10, 200, 31, 77], [5], [90, 91, 92, 93, 94, 95, 96], [40, 41], [7, 300, 7, 300, 7]]
NUM_TOKENS = 25


class _Setting:
    """A target, its greedy texts and their features, made once."""

    def __init__(self) -> None:
        self.target: Any = tiny_model()
        self.embed = self.target.get_input_embeddings().weight.detach()
        self.head = self.target.get_output_embeddings().weight.detach()
        self.answers = [greedy_decode(self.target, p, max_new_tokens=NUM_TOKENS, eos_ids=()) for p in PROMPTS]

    def features(self, tokens: list[int]) -> Tensor:
        return extract_features(self.target, torch.tensor([tokens]), (1, 3))

    def drafts(self, drafter: DFlashDraftModel, prompt: list[int], answer: list[int]) -> TextDrafts:
        tokens = [*prompt, *answer]
        return draft_text(drafter, self.features(tokens), tokens, len(prompt), self.embed, self.head)

    def walk(self, drafter: DFlashDraftModel, prompt: list[int], answer: list[int]) -> list[int]:
        tokens = [*prompt, *answer]
        return chained_walk(drafter, self.features(tokens), tokens, len(prompt), self.embed, self.head)


@pytest.fixture(scope="module")
def setting() -> _Setting:
    return _Setting()


@pytest.fixture(scope="module")
def trained(setting: _Setting) -> DFlashDraftModel:
    """Return a drafter trained for 90 steps on the target's own answers: partly right."""
    drafter = DFlashDraftModel(drafter_config(block_size=5))
    head_VD = setting.head
    drafter.initialise(0, head_VD)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3, weight_decay=0.0)
    samples = []
    for prompt, answer in zip(PROMPTS, setting.answers, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        supervised = torch.arange(len(tokens)) >= len(prompt)
        anchors = eligible_anchors(supervised.numpy())
        settings: dict[str, Any] = {"num_anchors": len(anchors), "block_size": 5, "mask_token_id": MASK_ID}
        blocks = build_blocks(tokens.numpy(), supervised.numpy(), anchors, **settings)
        noise = F.embedding(torch.from_numpy(blocks.noise_NK), setting.embed).flatten(0, 1)[None]
        positions = (torch.from_numpy(anchors)[:, None] + torch.arange(5)).reshape(1, -1)
        rows = make_rows(torch.from_numpy(blocks.labels_NK), torch.from_numpy(blocks.valid_NK), 1000)
        samples.append((setting.features(tokens.tolist()), noise, positions, anchors.tolist(), rows))
    first = last = 0.0
    for step in range(90):
        features, noise, positions, anchors, rows = samples[step % len(samples)]
        states = training_states(drafter, features, noise, positions, anchors).flatten(0, 1)
        sums = head_loss(states[rows.index_R], head_VD, rows, Weighting("decay", gamma=4.0))
        loss = sums.numerator / sums.denominator
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = first or loss.item(), loss.item()
    assert last < first / 2
    return drafter.eval()


def _assert_same_walk(counts: list[int], decoded: Decoded) -> None:
    """Every count is equal; the last one as far as the text goes, past which the walk knows no truth."""
    assert len(counts) == len(decoded.accepted)
    last_anchor = sum(counts[:-1]) + len(counts) - 1
    known = len(decoded.tokens) - 1 - last_anchor
    assert counts == [*decoded.accepted[:-1], min(decoded.accepted[-1], known)]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_walk_of_a_random_drafter_is_its_decoding(setting: _Setting, seed: int) -> None:
    drafter = random_drafter(seed=seed, block_size=5)
    for prompt, answer in zip(PROMPTS, setting.answers, strict=True):
        decoded = speculative_decode(setting.target, drafter, prompt, max_new_tokens=NUM_TOKENS, eos_ids=())
        assert decoded.tokens == answer
        _assert_same_walk(setting.walk(drafter, prompt, answer), decoded)


def test_the_walk_of_a_partly_right_drafter_is_its_decoding(setting: _Setting, trained: DFlashDraftModel) -> None:
    """No public trainer measures tau; uniform anchors and products of marginals are not it (anatomy 8)."""
    seen: set[int] = set()
    for prompt, answer in zip(PROMPTS, setting.answers, strict=True):
        decoded = speculative_decode(setting.target, trained, prompt, max_new_tokens=NUM_TOKENS, eos_ids=())
        assert decoded.tokens == answer
        counts = setting.walk(trained, prompt, answer)
        _assert_same_walk(counts, decoded)
        seen |= set(counts)
    assert {0} < seen and len(seen) >= 3, "the drafter must be right sometimes and wrong sometimes"


def test_offline_tau_is_the_tau_of_decoding(setting: _Setting, trained: DFlashDraftModel) -> None:
    decoded = [
        speculative_decode(setting.target, trained, prompt, max_new_tokens=NUM_TOKENS, eos_ids=()) for prompt in PROMPTS
    ]
    served = pooled_tau([len(d.tokens) for d in decoded], [len(d.accepted) for d in decoded])
    walks = [setting.walk(trained, p, a) for p, a in zip(PROMPTS, setting.answers, strict=True)]
    offline = pooled_tau([len(answer) for answer in setting.answers], [len(walk) for walk in walks])
    assert offline == served > 1.2


def test_the_walk_notices_a_drafter_that_saw_other_features(setting: _Setting, trained: DFlashDraftModel) -> None:
    """The guard's own proof: with features shifted by one the walk is not the decoding."""
    differing = 0
    for prompt, answer in zip(PROMPTS, setting.answers, strict=True):
        tokens = [*prompt, *answer]
        shifted = setting.features(tokens).roll(1, dims=1)
        wrong = chained_walk(trained, shifted, tokens, len(prompt), setting.embed, setting.head)
        differing += wrong != setting.walk(trained, prompt, answer)
    assert differing >= 3


def test_an_answer_that_ends_with_eos_has_the_same_walk(setting: _Setting, trained: DFlashDraftModel) -> None:
    for prompt, answer in zip(PROMPTS, setting.answers, strict=True):
        eos = answer[14]
        short = answer[: answer.index(eos) + 1]
        decoded = speculative_decode(setting.target, trained, prompt, max_new_tokens=99, eos_ids={eos})
        assert decoded.tokens == short
        _assert_same_walk(setting.walk(trained, prompt, short), decoded)


def test_known_acceptances_are_counted_and_the_last_is_cut_at_the_text(setting: _Setting) -> None:
    prompt, answer = PROMPTS[0], setting.answers[0]
    head = setting.head
    wrong = [len(prompt) + index for index in (3, 4, 12)]
    drafter = OracleDrafter(drafter_config(block_size=8), [*prompt, *answer], head, wrong)
    # anchors 0, 3, 4, 12, 20: the last block has four known tokens after its anchor
    assert setting.walk(drafter, prompt, answer) == [2, 0, 7, 7, 4]
    assert setting.walk(drafter, prompt, answer[:13]) == [2, 0, 7]
    assert setting.walk(drafter, prompt, answer[:2]) == [1]


def test_an_answer_of_one_token_has_no_walk(setting: _Setting) -> None:
    assert setting.walk(random_drafter(), PROMPTS[0], setting.answers[0][:1]) == []


def test_features_of_all_but_the_last_token_suffice(setting: _Setting, trained: DFlashDraftModel) -> None:
    tokens = [*PROMPTS[0], *setting.answers[0]]
    features = setting.features(tokens)
    rest = (tokens, len(PROMPTS[0]), setting.embed, setting.head)
    assert chained_walk(trained, features[:, :-1], *rest) == chained_walk(trained, features, *rest)


def test_drafts_of_all_anchors_at_once_are_those_of_decoding_one_by_one(
    setting: _Setting, trained: DFlashDraftModel
) -> None:
    tokens = [*PROMPTS[2], *setting.answers[2]]
    features, anchors = setting.features(tokens), torch.arange(1, len(tokens))
    drafted = drafted_at(trained, features, torch.tensor(tokens), anchors, setting.embed, setting.head)
    context = DraftContext(trained)
    with torch.no_grad():
        for anchor, row in zip(anchors.tolist(), drafted.tolist(), strict=True):
            context.extend(features[:, context.length : anchor])
            states = draft_states(trained, context, tokens[anchor], setting.embed)
            assert (states[0, 1:] @ setting.head.T).argmax(-1).tolist() == row


def test_pooled_tau_by_hand() -> None:
    """11 and 4 tokens in 5 and 1 calls: (10 + 3) / 6; the mean of the two means would be 2.5."""
    assert pooled_tau([11, 4], [5, 1]) == 13 / 6
    assert pooled_tau([11], [5]) == 2.0
    assert math.isnan(pooled_tau([1, 1], [0, 0]))
    assert math.isnan(pooled_tau([], []))


# -- the proxies -------------------------------------------------------------------------------------------------------


def test_the_estimates_of_hits_by_hand() -> None:
    """Anatomy 2.6: TorchSpec's and speculators' product of marginals, plus 1; uniform anchors are block-exact.

    Three anchors and three slots, so the text has four tokens: slot 2 of the last anchor but one is the last token.
    """
    hits = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    found = estimate_tau([TextDrafts(hits)])
    assert found.chained == 3.0  # one call accepts two tokens and emits three
    assert found.uniform == 1 + (2 + 2 + 0) / 3  # the cut anchors count, with what the text shows
    assert found.marginals == pytest.approx(1 + 2 / 3 + 2 / 3 * 2 / 2 + 2 / 3 * 2 / 2 * 0 / 1)
    # Two texts are pooled by count, and one without an anchor adds nothing.
    other, empty = TextDrafts(torch.tensor([[False] * 3])), TextDrafts(torch.zeros(0, 3, dtype=torch.bool))
    both = estimate_tau([TextDrafts(hits), empty, other])
    assert (both.chained, both.uniform) == (4 / 2, 1 + 4 / 4)
    assert both.marginals == pytest.approx(1 + 2 / 4 + 2 / 4 * 2 / 2)
    assert all(math.isnan(value) for value in vars(estimate_tau([empty])).values())


def test_a_hit_after_a_miss_is_not_accepted() -> None:
    drafts = TextDrafts(torch.tensor([[True, False, True], [False, True, True], [True, True, True]]))
    assert drafts.accepted == [1, 0, 3]
    assert drafts.walk() == [1, 3]


def test_misses_in_clusters_make_both_proxies_too_high(setting: _Setting) -> None:
    """Right in the first half of the answer, wrong in the second: decoding runs through the one and crawls through the
    other, which an average over all anchors weighs alike."""
    prompt, answer = PROMPTS[0], setting.answers[0]
    wrong = range(len(prompt) + 13, len(prompt) + 25)
    drafter = OracleDrafter(drafter_config(block_size=8), [*prompt, *answer], setting.head, wrong)
    drafts = setting.drafts(drafter, prompt, answer)
    assert drafts.walk() == [7, 4] + [0] * 11
    assert drafts.accepted == [7] * 6 + [6, 5, 4, 3, 2, 1, 0] + [0] * 11
    found = estimate_tau([drafts])
    assert found.chained == 24 / 13
    assert found.uniform == 1 + 63 / 24
    assert found.chained < found.marginals < found.uniform
    decoded = speculative_decode(setting.target, drafter, prompt, max_new_tokens=NUM_TOKENS, eos_ids=())
    assert decoded.tau == found.chained


def test_misses_at_the_rhythm_of_the_blocks_make_both_proxies_too_low(setting: _Setting) -> None:
    """Each miss is the token that the target gives for free: decoding stands right on it, uniform anchors do not."""
    prompt, answer = PROMPTS[0], setting.answers[0]
    wrong = [len(prompt) + index for index in (8, 16, 24)]
    drafter = OracleDrafter(drafter_config(block_size=8), [*prompt, *answer], setting.head, wrong)
    drafts = setting.drafts(drafter, prompt, answer)
    assert drafts.walk() == [7, 7, 7]
    found = estimate_tau([drafts])
    assert (found.chained, found.uniform) == (8.0, 4.5)
    assert found.uniform < found.marginals < found.chained
    decoded = speculative_decode(setting.target, drafter, prompt, max_new_tokens=NUM_TOKENS, eos_ids=())
    assert decoded.tau == found.chained


def test_the_chained_estimate_is_the_tau_of_decoding_and_no_proxy_is(
    setting: _Setting, trained: DFlashDraftModel
) -> None:
    drafts = [setting.drafts(trained, p, a) for p, a in zip(PROMPTS, setting.answers, strict=True)]
    decoded = [speculative_decode(setting.target, trained, p, max_new_tokens=NUM_TOKENS, eos_ids=()) for p in PROMPTS]
    found = estimate_tau(drafts)
    served = pooled_tau([len(d.tokens) for d in decoded], [len(d.accepted) for d in decoded])
    assert found.chained == served
    assert abs(found.uniform - served) > 0.02
    assert abs(found.marginals - served) > 0.02


def test_uniform_is_the_accepted_length_that_training_logs_when_all_anchors_are_drawn(
    setting: _Setting, trained: DFlashDraftModel
) -> None:
    """verl-SpeCo#62: blocks that the text's end cuts count in the denominator, with a capped numerator."""
    prompt, answer = PROMPTS[3], setting.answers[3]
    tokens = torch.tensor([*prompt, *answer])
    supervised = torch.arange(len(tokens)) >= len(prompt)
    anchors = eligible_anchors(supervised.numpy())
    blocks = build_blocks(
        tokens.numpy(), supervised.numpy(), anchors, num_anchors=len(anchors), block_size=5, mask_token_id=MASK_ID
    )
    noise = F.embedding(torch.from_numpy(blocks.noise_NK), setting.embed).flatten(0, 1)[None]
    positions = (torch.from_numpy(anchors)[:, None] + torch.arange(5)).reshape(1, -1)
    rows = make_rows(torch.from_numpy(blocks.labels_NK), torch.from_numpy(blocks.valid_NK), 1000)
    features = setting.features(tokens.tolist())
    states = training_states(trained, features, noise, positions, anchors.tolist()).flatten(0, 1)
    sums = head_loss(states[rows.index_R].detach(), setting.head, rows, Weighting("decay", gamma=4.0))
    drafts = setting.drafts(trained, prompt, answer)
    assert sum(drafts.accepted) > 0
    assert 1 + float(sums.accepted / sums.blocks) == pytest.approx(estimate_tau([drafts]).uniform)


def test_drafting_in_pieces_changes_nothing_and_bounds_the_mask_and_the_logits(
    setting: _Setting, trained: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answer = PROMPTS[2], setting.answers[2]
    whole = setting.drafts(trained, prompt, answer)
    masks, logits = list[int](), list[int]()
    made_masks, made_logits = acceptance.layer_masks, acceptance.head_logits

    def noted_masks(drafter: Any, anchors_bN: Tensor, *rest: Any) -> Any:
        masks.append(anchors_bN.shape[1])
        return made_masks(drafter, anchors_bN, *rest)

    def noted_logits(states: Tensor, *rest: Any) -> Tensor:
        logits.append(states.shape[0] * states.shape[1])
        return made_logits(states, *rest)

    monkeypatch.setattr(acceptance, "layer_masks", noted_masks)
    monkeypatch.setattr(acceptance, "head_logits", noted_logits)
    monkeypatch.setattr(acceptance, "ANCHORS_AT_ONCE", 7)
    monkeypatch.setattr(acceptance, "HEAD_ROWS", 10)
    pieces = setting.drafts(trained, prompt, answer)
    assert torch.equal(pieces.hits_Nk, whole.hits_Nk)
    assert masks == [7, 7, 7, 3]
    assert sum(logits) == 24 * 4 and max(logits) == 8  # two whole blocks of 4 slots fit in 10 rows
