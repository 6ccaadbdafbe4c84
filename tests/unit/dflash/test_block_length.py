"""The adaptive block length drafts what pays, tries longer blocks again, and changes no token."""

from __future__ import annotations

import pytest
import torch

from dflash.block_length import AdaptiveLength, BlockLength, FixedLength
from dflash.decode import Decoded, greedy_decode, speculative_decode, speculative_decode_batch
from dflash.errors import DFlashError
from tests.drafters import OracleDrafter, drafter_config, random_drafter
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def _run(length: BlockLength, accepted_if_drafted: int, calls: int, most: int = 15) -> list[int]:
    """Let `length` choose for a drafter whose first so many slots are always right, and the next never."""
    chosen = []
    for _ in range(calls):
        chosen.append(length.choose(most))
        length.observe(chosen[-1], [min(chosen[-1], accepted_if_drafted)])
    return chosen


def test_expected_tokens_by_hand() -> None:
    """c = 1, 1/2, 1/2: E(1) = 2, E(2) = 2.5, E(3) = 2.75."""
    length = AdaptiveLength(0.1, prior=0.5, rate=1.0, recovery=0.5)
    length.observe(1, [1])
    assert length.conditional(3) == [1.0, 0.5, 0.5]
    assert [length.expected_tokens(k) for k in (1, 2, 3)] == [2.0, 2.5, 2.75]
    # 2 / 1.1 = 1.82, 2.5 / 1.2 = 2.08, 2.75 / 1.3 = 2.12, 2.875 / 1.4 = 2.05
    assert length.choose(15) == 3
    assert length.choose(2) == 2


@pytest.mark.parametrize(("marginal_cost", "expected"), [(0.0, 15), (0.2, 3), (5.0, 1)])
def test_the_dearer_a_slot_the_fewer_are_drafted(marginal_cost: float, expected: int) -> None:
    """c = 0.7 everywhere; at 0.2, E(k) / cost(k) = 1.42, 1.56, 1.58, 1.54 for k = 1 to 4."""
    assert AdaptiveLength(marginal_cost, prior=0.7).choose(15) == expected


def test_of_equal_lengths_the_shortest_is_drafted() -> None:
    length = AdaptiveLength(0.0, prior=0.5, rate=1.0)
    length.observe(3, [1])  # slot 2 never: every k from 1 on gives two tokens
    assert length.conditional(2) == [1.0, 0.0]
    assert length.choose(15) == 1


def test_slots_that_are_never_accepted_are_no_longer_drafted() -> None:
    chosen = _run(AdaptiveLength(0.05), accepted_if_drafted=4, calls=200)
    assert chosen[0] > 8
    later = chosen[-100:]
    assert sorted(later)[50] == 4
    assert sum(later) / len(later) < 5


def test_a_drafter_that_is_always_right_keeps_its_whole_block() -> None:
    assert _run(AdaptiveLength(0.02), accepted_if_drafted=15, calls=50)[-1] == 15


def test_a_block_that_was_cut_short_is_tried_longer_again() -> None:
    """Without the way back to the prior, a slot once refused would never be seen again (anatomy 6.5)."""
    for recovery, longest in ((0.01, 15), (1e-9, 2)):
        length = AdaptiveLength(0.05, recovery=recovery)
        _run(length, accepted_if_drafted=2, calls=200)
        assert min(_run(length, accepted_if_drafted=2, calls=20)) == 2
        assert _run(length, accepted_if_drafted=15, calls=400)[-1] == longest


def test_rows_of_a_batch_are_pooled_as_that_many_single_calls() -> None:
    """Three of four rows accept slot 1, and one of those three slot 2: weights 1 - 0.9^4 and 1 - 0.9^3."""
    length = AdaptiveLength(0.1, prior=0.9, rate=0.1)
    length.observe(2, [1, 0, 2, 1])
    assert length.conditional(2) == pytest.approx(
        [0.9 + (1 - 0.9**4) * (3 / 4 - 0.9), 0.9 + (1 - 0.9**3) * (1 / 3 - 0.9)]
    )


def test_a_row_that_stopped_early_says_nothing_of_later_slots() -> None:
    length = AdaptiveLength(0.1, prior=0.9, rate=0.5, recovery=0.1)
    length.observe(3, [0])
    assert length.conditional(3) == pytest.approx([0.45, 0.9, 0.9])


def test_values_outside_their_range_are_refused() -> None:
    for settings in ({"marginal_cost": -0.1}, {"marginal_cost": float("nan")}, {"prior": 0.0}, {"recovery": 2.0}):
        with pytest.raises(DFlashError) as caught:
            AdaptiveLength(**({"marginal_cost": 0.1} | settings))
        assert caught.value.where == next(iter(settings))
    with pytest.raises(DFlashError, match="0 is not 1 or more"):
        FixedLength(0)


def test_more_slots_than_the_drafter_has_are_refused() -> None:
    with pytest.raises(DFlashError, match="4 slots are more than the 3 that the drafter was trained for"):
        speculative_decode(
            tiny_model(), random_drafter(), [1, 2], max_new_tokens=5, eos_ids=(), block_length=FixedLength(4)
        )


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_shorter_block_changes_no_token_and_is_accepted_up_to_its_end(slots: int) -> None:
    target, prompt = tiny_model(), [10, 200, 31, 77]
    plain = greedy_decode(target, prompt, max_new_tokens=31, eos_ids=())
    oracle = OracleDrafter(
        drafter_config(block_size=8), [*prompt, *plain, 0], target.get_output_embeddings().weight, wrong=[34]
    )
    for drafter in (oracle, random_drafter(block_size=8)):
        decoded = speculative_decode(
            target, drafter, prompt, max_new_tokens=25, eos_ids=(), block_length=FixedLength(slots)
        )
        assert decoded.tokens == plain[:25]
        assert decoded.drafted == [slots] * len(decoded.accepted)
        if drafter is oracle:
            assert decoded.accepted == [slots] * -(-24 // (slots + 1))


def test_adaptive_decoding_of_a_batch_changes_no_token_and_drafts_less() -> None:
    target, drafter = tiny_model().double(), random_drafter(block_size=8, dtype=torch.float64)
    prompts = [[10, 200, 31, 77], [5], [90, 91, 92]]
    plain = [greedy_decode(target, p, max_new_tokens=40, eos_ids=()) for p in prompts]
    length = AdaptiveLength(0.1, rate=0.2)

    def decode() -> list[Decoded]:
        return speculative_decode_batch(target, drafter, prompts, max_new_tokens=40, eos_ids=(), block_length=length)

    found = decode()
    assert [answer.tokens for answer in found] == plain
    # A random drafter is hardly ever right: its whole block at first, one slot in the end.
    assert found[0].drafted[0] == 7 and found[0].drafted[-1] == 1
    # What was learned stays with the object, for the next prompts.
    assert max(decode()[0].drafted) < 7
