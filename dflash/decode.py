"""Decoding, plain and speculative: one prompt or a batch, greedy or sampled.

Both kinds choose every token by the target's own distribution (greedily: by its argmax), so both give the same greedy
tokens and the same distribution of sampled ones. A drafted token becomes context only with the target features it got
when it was verified. Legend: b batch, k drafted slots, Q = k + 1 block tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dflash.block_length import BlockLength, FixedLength
from dflash.context import DraftContext, TargetContext
from dflash.errors import DFlashError
from dflash.head import block_embeddings, head_logits
from dflash.masks import dense_mask, layer_layout
from dflash.model import DFlashDraftModel
from dflash.pick import pick_drafts
from dflash.sampling import GREEDY, Sampling, accept, choose, draw_uniforms
from dflash.taps import FeatureTaps


@dataclass
class Decoded:
    """One prompt's answer and what each verification call of the target did (the prompt's own call is not one).

    tokens     what was emitted after the prompt
    accepted   drafted tokens accepted by each verification, before any cut at EOS or the length limit
    drafted    slots drafted for each verification
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens emitted per verification call. The first token comes from the prompt's call and is not counted."""
        return (len(self.tokens) - 1) / len(self.accepted) if self.accepted else float("nan")


def acceptance_histogram(answers: Sequence[Decoded]) -> list[int]:
    """Return how many verifications of all answers accepted exactly r drafted tokens, for r = 0 to the most drafted."""
    most = max((slots for answer in answers for slots in answer.drafted), default=0)
    counts = [0] * (most + 1)
    for answer in answers:
        for accepted in answer.accepted:
            counts[accepted] += 1
    return counts


def conditional_acceptance(answers: Sequence[Decoded]) -> list[float]:
    """Return, for slots 1 to the most drafted, the share accepted of those drafted after a run kept whole so far.

    Not a number for a slot that no verification reached.
    """
    calls = [pair for answer in answers for pair in zip(answer.drafted, answer.accepted, strict=True)]
    shares = []
    for slot in range(1, max((drafted for drafted, _ in calls), default=0) + 1):
        reached = [accepted for drafted, accepted in calls if drafted >= slot and accepted >= slot - 1]
        shares.append(sum(r >= slot for r in reached) / len(reached) if reached else float("nan"))
    return shares


def greedy_decode(
    target: nn.Module, prompt_ids: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int]
) -> list[int]:
    """Return the target's greedy continuation, one token a call, ending with EOS or at `max_new_tokens`."""
    return sample_decode(target, prompt_ids, max_new_tokens=max_new_tokens, eos_ids=eos_ids, sampling=GREEDY)


@torch.no_grad()
def sample_decode(
    target: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Return a continuation drawn from the target, one token a call: what speculative decoding must be like."""
    _check([prompt_ids], sampling, None if generator is None else [generator])
    context, tokens = TargetContext(target), list[int]()
    while len(tokens) < max_new_tokens:
        if tokens:
            logits_bV = context.verify(torch.tensor([tokens[-1:]], device=context.device))[0][:, -1]
            context.keep(1, [1])
        else:
            logits_bV = context.prefill([prompt_ids])[0]
        uniforms_b = None
        if generator and not sampling.greedy:
            uniforms_b = draw_uniforms([generator], 1, context.device)[:, 0]
        tokens.append(int(choose(logits_bV, sampling, uniforms_b)[0]))
        if tokens[-1] in eos_ids:
            break
    return tokens


def _decode_masks(context: DraftContext, num_slots: int, device: torch.device) -> list[Tensor | None]:
    """Return each layer's mask for one block after the context; None where everything is visible."""
    config = context.drafter.config
    anchor_b1 = torch.tensor(context.lengths, device=device)[:, None]
    ragged = min(context.lengths) < context.length
    layouts = [
        replace(layer_layout(config, layer, context.length), block_size=num_slots)
        for layer in range(config.num_hidden_layers)
    ]
    made = {
        layout: dense_mask(anchor_b1, layout) if layout.window or layout.causal or ragged else None
        for layout in set(layouts)
    }
    return [made[layout] for layout in layouts]


@torch.no_grad()
def draft_states(
    drafter: DFlashDraftModel,
    context: DraftContext,
    anchor_tokens: int | Sequence[int] | Tensor,
    embedding_VD: Tensor,
    num_slots: int | None = None,
) -> Tensor:
    """Return the drafter's states (b, Q, D) of the blocks whose anchors are each row's next token after the context.

    embedding_VD   the target's raw embedding table
    num_slots      Q, the anchor's slot and those to draft; None is the drafter's block size
    """
    config, device = drafter.config, embedding_VD.device
    anchor_b = torch.as_tensor(anchor_tokens, device=device).reshape(-1)
    num_slots = num_slots or config.block_size
    ids_bQ = torch.full((len(anchor_b), num_slots), config.mask_token_id, device=device)
    ids_bQ[:, 0] = anchor_b
    first_b1 = torch.tensor(context.lengths, device=device)[:, None]
    return drafter.draft(
        block_embeddings(ids_bQ, embedding_VD, config).to(drafter.fc.weight.dtype),
        first_b1 + torch.arange(num_slots, device=device),
        context.key_values,
        _decode_masks(context, num_slots, device),
        "sdpa",
    )


def _check(prompts: Sequence[Sequence[int]], sampling: Sampling, generators: Sequence[torch.Generator] | None) -> None:
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise DFlashError("is empty", where=f"prompts[{row}]", fix="A prompt needs at least one token.")
    if not sampling.greedy and (generators is None or len(generators) != len(prompts)):
        given = "none" if generators is None else len(generators)
        raise DFlashError(
            f"{given} for {len(prompts)} prompts at temperature {sampling.temperature}",
            where="generators",
            fix="Give each prompt its own, e.g. by row_generators(seed, number).",
        )


def speculative_decode(
    target: Any,
    drafter: DFlashDraftModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampling: Sampling = GREEDY,
    block_length: BlockLength | None = None,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Return one prompt's answer; see speculative_decode_batch."""
    return speculative_decode_batch(
        target,
        drafter,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        sampling=sampling,
        block_length=block_length,
        generators=None if generator is None else [generator],
    )[0]


@torch.no_grad()
def speculative_decode_batch(
    target: Any,
    drafter: DFlashDraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampling: Sampling = GREEDY,
    block_length: BlockLength | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> list[Decoded]:
    """Return each prompt's answer as the target would give it alone, drafted in blocks and verified one call a block.

    Each call verifies the anchors and k drafted tokens of every row; each row keeps its own longest accepted run, and
    the target's own next token after it becomes its next anchor. A row that has ended leaves the batch.

    sampling       greedy, or drawn from the target's processed distribution (rejection sampling: sampling.py)
    block_length   how many slots to draft (block_length.py); None is all that the drafter has. What it learns from the
                   other rows changes the calls of a row, and its random numbers; never its distribution.
    generators     one per prompt, needed to sample; with a fixed block length a row's tokens depend on its own alone
    Raises DFlashError for an empty prompt, missing generators, and a target whose state cannot be taken back.
    """
    _check(prompts, sampling, generators)
    answers = [Decoded() for _ in prompts]
    if max_new_tokens < 1 or not prompts:
        return answers
    config, dtype = drafter.config, drafter.fc.weight.dtype
    most = config.block_size - 1
    lengths = block_length or FixedLength(most)
    embedding_VD, head_VD = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    streams = {} if sampling.greedy or generators is None else dict(enumerate(generators))
    rows = list(range(len(prompts)))  # the prompts still in the batch

    def uniforms(count: int) -> Tensor | None:
        return draw_uniforms([streams[row] for row in rows], count, embedding_VD.device) if streams else None

    def head(states: Tensor) -> Tensor:
        return head_logits(states, head_VD, config)

    with FeatureTaps(target, config.target_layer_ids) as taps:
        verified, context = TargetContext(target, taps), DraftContext(drafter, len(rows))
        logits_bV, features = verified.prefill(prompts)
        context.extend(nn.utils.rnn.pad_sequence(features, batch_first=True).to(dtype), verified.lengths)
        first = uniforms(1)
        anchor_b, _ = choose(logits_bV, sampling, None if first is None else first[:, 0])
        for row, token in zip(rows, anchor_b.tolist(), strict=True):
            answers[row].tokens.append(token)
        while True:
            going = [i for i, row in enumerate(rows) if not _ended(answers[row].tokens, max_new_tokens, eos_ids)]
            if not going:
                return answers
            if len(going) < len(rows):
                rows, anchor_b = [rows[i] for i in going], anchor_b[going]
                verified.select(going)
                context.select(going)
            k = lengths.choose(most)
            drawn = uniforms(2 * k + 1)
            states_bQD = draft_states(drafter, context, anchor_b, embedding_VD, k + 1)
            own = None if drawn is None else drawn[:, :k]
            drafts = pick_drafts(drafter, states_bQD[:, 1:], anchor_b, head, sampling, own)
            logits_bQV, features_bQC = verified.verify(torch.cat((anchor_b[:, None], drafts.tokens_bk), 1))
            assert features_bQC is not None
            accepted_b, anchor_b = accept(drafts, logits_bQV, sampling, None if drawn is None else drawn[:, k:])
            accepted = accepted_b.tolist()
            counts = [number + 1 for number in accepted]  # the anchor and the accepted tokens now have features
            verified.keep(k + 1, counts)
            context.extend(features_bQC[:, : max(counts)].to(dtype), counts)
            lengths.observe(k, accepted)
            emitted = torch.cat((drafts.tokens_bk, anchor_b[:, None]), 1).tolist()
            for row, number, tokens in zip(rows, accepted, emitted, strict=True):
                answers[row].accepted.append(number)
                answers[row].drafted.append(k)
                _emit(answers[row].tokens, [*tokens[:number], tokens[-1]], max_new_tokens, eos_ids)


def _ended(tokens: list[int], max_new_tokens: int, eos_ids: Collection[int]) -> bool:
    return len(tokens) >= max_new_tokens or tokens[-1] in eos_ids


def _emit(tokens: list[int], run: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> None:
    """Append the run up to EOS or the length limit."""
    for token in run:
        tokens.append(token)
        if _ended(tokens, max_new_tokens, eos_ids):
            return
