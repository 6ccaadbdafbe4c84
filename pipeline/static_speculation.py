"""Greedy decoding of one prompt at a time, plain or speculative, with nothing of a step left to Python.

A step drafts a block, verifies it, and keeps what was accepted: on tensors that never move, with positions and counts
on the device, so that on CUDA one graph is recorded for each number of attended slots and replayed for every step.
Plain decoding is the same with a block of one token and no drafter: same cache, same layers, same compiled code. The
host follows one step behind, so that the device never waits for it. The tokens are those of dflash.decode, which is the
reference for both.

Shape suffixes: Q tokens of a block, k drafted, P prompt tokens read at once, S slots, C = taps x width, D width, L
draft layers, N key-value heads, h head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from dflash.block_length import FixedLength
from dflash.decode import Decoded
from dflash.errors import DFlashError
from dflash.head import block_embeddings, head_logits
from dflash.masks import MaskLayout, allowed, layer_layout
from dflash.model import DFlashDraftModel, RMSNorm, Rotation, rotate, rotation
from dflash.pick import pick_drafts
from dflash.sampling import GREEDY, Drafts, accept
from dflash.taps import FeatureTaps
from pipeline.recorded import Recordings
from pipeline.static_decode import _device, _round_up, why_not_static
from pipeline.static_layers import Block, Function, StaticLayers, as_written, compiled_once

KEY_BUCKET = 128
"""Attended slots are rounded up to this, and prompts are read in pieces of it. A smaller one records more graphs."""


@dataclass(frozen=True)
class _State:
    """The sequence on the device; every number is a tensor of one element.

    position   of the last token that is known
    end        position of the last token that may be written
    last       position of the prompt's last token
    start      of the next piece of the prompt
    calls      steps taken; each noted in accepted_S how many drafted tokens it kept
    seen       position and finished, for the host
    """

    ids_S: Tensor
    accepted_S: Tensor
    slots_S: Tensor
    stops: Tensor
    position: Tensor
    end: Tensor
    last: Tensor
    start: Tensor
    calls: Tensor
    finished: Tensor
    seen: Tensor


class StaticSpeculator:
    """Decodes prompts of up to num_tokens tokens, answer included, greedily and one by one.

    drafter    None: plain greedy decoding
    stops      tokens that end an answer
    drafted    tokens drafted in a step; None is all that the drafter has
    compiled   run everything between two attentions through torch.compile. The first steps then take a minute, and
               `warm_up` takes all of them.
    Raises DFlashError for a target that has no static decoding, taps that it has not, or more drafts than the drafter.

    A step's cost does not depend on what was accepted. Recording must not meet another thread's work on the device.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DFlashDraftModel | None,
        *,
        stops: Sequence[int],
        num_tokens: int,
        drafted: int | None = None,
        compiled: bool = False,
    ) -> None:
        if reason := why_not_static(target):
            raise DFlashError(reason, where="target", fix="Decode it with dflash.decode.")
        device, config, body = target.device, target.config.get_text_config(), cast(Any, target.base_model)
        self.drafter, self.device, self.num_tokens, self.final_norm = drafter, device, num_tokens, body.norm
        self._wrap = compiled_once if compiled else as_written
        self.num_drafted = 0
        if drafter is not None:
            most = drafter.config.block_size - 1
            self.num_drafted = FixedLength(most if drafted is None else drafted).choose(most)
            self.taps = FeatureTaps(target, drafter.config.target_layer_ids).layer_ids
        num_slots = _round_up(num_tokens + self.num_drafted + 1, KEY_BUCKET)
        slots_S = torch.arange(num_slots, device=device)
        self.embedding_VD: Tensor = cast(Any, target.get_input_embeddings()).weight
        self.head_VD: Tensor = cast(Any, target.get_output_embeddings()).weight
        with torch.no_grad():
            cos_1Sh, sin_1Sh = body.rotary_emb(self.embedding_VD[:1], slots_S[None])
            self.layers = StaticLayers(body.layers, config.num_key_value_heads, (cos_1Sh[0], sin_1Sh[0]))
            if drafter is not None:
                of, dtype = drafter.config, drafter.fc.weight.dtype
                cos_11Sh, sin_11Sh = rotation(slots_S[None], of.head_dim, of.rope_theta, dtype)
                rope = cos_11Sh[0, 0], sin_11Sh[0, 0]
                self.draft_layers = StaticLayers(drafter.layers, of.num_key_value_heads, rope)
                self.context = _ContextProjection(drafter)
        numbers = {name: slots_S.new_zeros(1) for name in ("position", "end", "last", "start", "calls")}
        self.state = _State(
            ids_S=torch.zeros_like(slots_S),
            accepted_S=torch.zeros_like(slots_S),
            slots_S=slots_S,
            stops=torch.tensor(list(stops), dtype=torch.long, device=device),
            finished=torch.ones(1, dtype=torch.bool, device=device),
            seen=slots_S.new_zeros(2),
            **numbers,
        )
        self._recordings: Recordings[None] = Recordings(device)
        self._prompt_length = 0
        self._end = 0

    @property
    def num_slots(self) -> int:
        """Slots of the cache: num_tokens and a block, rounded up."""
        return len(self.state.slots_S)

    def warm_up(self) -> None:
        """Compile and record every step there can be, so that decoding does neither."""
        with self._running():
            for num_keys in range(KEY_BUCKET, self.num_slots + 1, KEY_BUCKET):
                for kind in (self._read, self._step):
                    self.state.start.zero_()
                    self.state.position.zero_()
                    self._advance(kind, num_keys)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Decoded:
        """Return the answer of 1 to max_new_tokens tokens, ended by its first stop token; see read and write."""
        self.read(prompt, max_new_tokens)
        return self.write()

    def read(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Read the prompt, which gives the answer's first token. Raises DFlashError if it is empty or does not fit."""
        longest = self.num_tokens - max_new_tokens
        if not 0 < len(prompt) <= longest or max_new_tokens < 1:
            raise DFlashError(
                f"has {len(prompt)} tokens, not 1 to {longest}, to write {max_new_tokens} of {self.num_tokens}",
                where="prompt",
                fix="Give the speculator as many tokens as prompt and answer have together, and at least one each.",
            )
        state, self._prompt_length, self._end = self.state, len(prompt), len(prompt) + max_new_tokens - 1
        with self._running():
            state.ids_S[: len(prompt)] = torch.tensor(list(prompt)).to(self.device)
            state.last.fill_(len(prompt) - 1)
            state.end.fill_(self._end)
            state.start.zero_()
            state.calls.zero_()
            for first in range(0, len(prompt), KEY_BUCKET):
                self._advance(self._read, first + KEY_BUCKET)

    def write(self) -> Decoded:
        """Write the answer to the prompt that was read."""
        state, width = self.state, self.num_drafted + 1
        position, pending = self._prompt_length, list[Callable[[], list[int]]]()
        with self._running():
            while True:
                self._advance(self._step, _round_up(position + width, KEY_BUCKET))
                pending.append(self._look())
                if len(pending) > 1:  # what the step before this one left; the device is at work on this one
                    position, finished = pending.pop(0)()
                    if finished:
                        break
                position = min(position + width, self._end)  # the furthest that this step can have come
        calls = int(state.calls)
        return Decoded(
            tokens=state.ids_S[self._prompt_length : position + 1].tolist(),
            accepted=state.accepted_S[:calls].tolist(),
            drafted=[self.num_drafted] * calls,
        )

    def _look(self) -> Callable[[], list[int]]:
        """Return what waits for the step that was started last and returns [position, finished] as it left them."""
        if self.device.type != "cuda":
            found = self.state.seen.tolist()
            return lambda: found
        seen, event = torch.empty(2, dtype=torch.long, pin_memory=True), torch.cuda.Event()
        seen.copy_(self.state.seen, non_blocking=True)
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            found: list[int] = seen.tolist()
            return found

        return wait

    @contextmanager
    def _running(self) -> Iterator[None]:
        """What holds wherever steps are made: compiled code is bound to it."""
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with torch.no_grad(), _device(self.device), sdpa_kernel(kernels, set_priority=True):
            yield

    def _advance(self, kind: Callable[[int], None], num_keys: int) -> None:
        """Take one step: replayed if it was recorded, else run and recorded."""
        key = kind.__name__, num_keys
        if key in self._recordings:
            self._recordings.replay(key)
            return

        def run() -> None:
            kind(num_keys)

        self._recordings.rehearse(run)  # a step like any other; recording runs nothing
        self._recordings.record(key, run)

    def _read(self, num_keys: int) -> None:
        """Read the prompt's next piece as far as it goes; what stands behind the prompt is overwritten unseen.

        After each piece the token that would be first is set, and the last piece's stays.
        """
        state = self.state
        x_1PD, block = _place_target(state, state.start, KEY_BUCKET, self.embedding_VD, self.layers.rope)
        block = replace(block, masks=list(block.masks) * len(self.layers.layers))
        outputs = self.layers.run(x_1PD, block, num_keys, as_written)
        _finish_prompt(state, outputs[-1], self.final_norm, self.head_VD)
        if self.drafter is not None:
            self._remember(outputs, block.slots_Q, as_written)

    def _step(self, num_keys: int) -> None:
        """Write what one call of the target gives: a token, and before it those that were drafted right."""
        state, wrap = self.state, self._wrap
        drafts = None if self.drafter is None else self._draft(self.drafter, num_keys)
        width = self.num_drafted + 1
        x_1QD, block = wrap(_place_target)(state, state.position, width, self.embedding_VD, self.layers.rope, drafts)
        block = replace(block, masks=list(block.masks) * len(self.layers.layers))
        outputs = self.layers.run(x_1QD, block, num_keys, wrap)
        if self.drafter is not None:
            self._remember(outputs, block.slots_Q, wrap)
        wrap(_take)(state, outputs[-1], self.final_norm, self.head_VD, drafts)

    def _draft(self, drafter: DFlashDraftModel, num_keys: int) -> Tensor:
        """Return the tokens (1, k) drafted after the last known one."""
        config, num_slots = drafter.config, self.num_slots
        layouts = [
            replace(layer_layout(config, layer, num_slots), block_size=self.num_drafted + 1)
            for layer in range(config.num_hidden_layers)
        ]
        different = tuple(dict.fromkeys(layouts))
        rope, dtype = self.draft_layers.rope, drafter.fc.weight.dtype
        place = self._wrap(_place_drafter)
        x_1QD, block = place(self.state, self.num_drafted + 1, self.embedding_VD, config, dtype, rope, different)
        block = replace(block, masks=[block.masks[different.index(layout)] for layout in layouts])
        state_1QD = self.draft_layers.run(x_1QD, block, num_keys, self._wrap)[-1]
        # torch.compile does not follow a picker's walk from slot to slot; recorded, that costs its kernels alone.
        pick = self._wrap(_pick) if drafter.picker is None else _pick
        tokens_1k: Tensor = pick(self.state, drafter, state_1QD, self.head_VD)
        return tokens_1k

    def _remember(self, outputs: list[Tensor], slots_Q: Tensor, wrap: Callable[[Function], Function]) -> None:
        """Write the drafter's context keys and values of the block that the target has just read.

        Those of tokens that were not accepted lie behind the next block's anchor, and it is written over them.
        """
        tapped, layers = [outputs[layer] for layer in self.taps], self.draft_layers
        wrap(_write_context)(
            self.drafter, self.context, tapped, slots_Q, layers.rope, layers.keys_LNSh, layers.values_LNSh
        )


def _place_target(
    state: _State, first: Tensor, width: int, table_VD: Tensor, rope: Rotation, drafts_1k: Tensor | None = None
) -> tuple[Tensor, Block]:
    """Return the embeddings (1, Q, D) of the tokens at `first` and after it, and their block, causal, with one mask."""
    slots_Q = first + torch.arange(width, device=first.device)
    ids_1Q = state.ids_S[slots_Q][None] if drafts_1k is None else torch.cat((state.ids_S[first][None], drafts_1k), 1)
    cos_Sh, sin_Sh = rope
    visible_QS = state.slots_S <= slots_Q[:, None]
    block = Block(slots_Q, (cos_Sh[slots_Q][None, None], sin_Sh[slots_Q][None, None]), [_added(visible_QS, cos_Sh)])
    return table_VD[ids_1Q], block


def _place_drafter(
    state: _State, width: int, table_VD: Tensor, config: Any, dtype: torch.dtype, rope: Rotation,
    layouts: Sequence[MaskLayout],
) -> tuple[Tensor, Block]:  # fmt: skip
    """Return the embeddings (1, Q, D) of the anchor and the mask tokens, and their block with each layout's mask.

    The training mask's own predicate says who sees whom: to it, slots before the anchor are context and those from it
    on are keys of the block.
    """
    offsets_Q = torch.arange(width, device=state.slots_S.device)
    slots_Q, num_slots = state.position + offsets_Q, len(state.slots_S)
    ids_Q = torch.where(offsets_Q == 0, state.ids_S[state.position], config.mask_token_id)
    key_S = state.slots_S + torch.where(state.slots_S < state.position, 0, num_slots - state.position)
    cos_Sh, sin_Sh = rope
    masks = [_added(allowed(state.position, 0, offsets_Q[:, None], key_S, layout), cos_Sh) for layout in layouts]
    block = Block(slots_Q, (cos_Sh[slots_Q][None, None], sin_Sh[slots_Q][None, None]), masks)
    return block_embeddings(ids_Q[None], table_VD, config).to(dtype), block


def _added(visible_QS: Tensor, like: Tensor) -> Tensor:
    """Return 0 where True and -inf where not."""
    return torch.where(visible_QS, 0.0, -torch.inf).to(like.dtype)


def _pick(state: _State, drafter: DFlashDraftModel, x_1QD: Tensor, head_VD: Tensor) -> Tensor:
    """Return the drafted tokens (1, k) from the last draft layer's output."""

    def head(states: Tensor) -> Tensor:
        return head_logits(states, head_VD, drafter.config)

    anchor_1 = state.ids_S[state.position]
    return pick_drafts(drafter, drafter.norm(x_1QD)[:, 1:], anchor_1, head, GREEDY, None).tokens_bk


class _ContextProjection(nn.Module):
    """context_key_values of all draft layers in one product: of a copy of their matrices, one under the other."""

    def __init__(self, drafter: DFlashDraftModel) -> None:
        super().__init__()
        attentions = [cast(Any, layer).self_attn for layer in drafter.layers]
        both = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        self.shape = (2, len(attentions), -1, drafter.config.head_dim)
        self.weight = torch.cat([projection.weight for projection in both])
        self.bias = torch.cat([projection.bias for projection in both]) if drafter.config.attention_bias else None
        self.norm = RMSNorm(drafter.config.head_dim, drafter.config.rms_norm_eps)
        self.norm.weight = nn.Parameter(torch.stack([a.k_norm.weight for a in attentions])[:, None])

    def forward(self, context_QD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys, normed and rotated, and values, each (L, N, Q, h)."""
        key_QLNh, value_QLNh = F.linear(context_QD, self.weight, self.bias).unflatten(-1, self.shape).unbind(1)
        return rotate(self.norm(key_QLNh).permute(1, 2, 0, 3), rope), value_QLNh.permute(1, 2, 0, 3)


def _write_context(
    drafter: DFlashDraftModel, project: _ContextProjection, tapped: Sequence[Tensor], slots_Q: Tensor, rope: Rotation,
    keys_LNSh: Tensor, values_LNSh: Tensor,
) -> None:  # fmt: skip
    """Write every draft layer's keys and values of the tapped outputs, each (1, Q, D), at their slots."""
    features_QC = torch.cat(list(tapped), dim=-1)[0].to(drafter.fc.weight.dtype)
    cos_Sh, sin_Sh = rope
    fresh = project(drafter.hidden_norm(drafter.fc(features_QC)), (cos_Sh[slots_Q], sin_Sh[slots_Q]))
    keys_LNSh.index_copy_(2, slots_Q, fresh[0])
    values_LNSh.index_copy_(2, slots_Q, fresh[1])


def _finish_prompt(state: _State, x_1PD: Tensor, norm: nn.Module, head_VD: Tensor) -> None:
    """Set the answer's first token, as far as the piece of the prompt that was read holds the prompt's last token."""
    width = x_1PD.shape[1]
    row = (state.last - state.start).clamp(max=width - 1)
    first_1 = (norm(x_1PD[:, row])[:, 0] @ head_VD.T).argmax(-1)
    state.position.copy_(state.last + 1)
    state.ids_S.index_copy_(0, state.position, first_1)
    state.finished.copy_((first_1 == state.stops).any() | (state.position >= state.end))
    state.start.add_(width)


def _take(state: _State, x_1QD: Tensor, norm: nn.Module, head_VD: Tensor, drafts_1k: Tensor | None) -> None:
    """Keep the target's own tokens as far as the drafts were right, and no further than a stop token or the end.

    A finished sequence stays as it is: what is written stands behind its end.
    """
    logits_1QV = norm(x_1QD) @ head_VD.T
    chosen_Q = logits_1QV.argmax(-1)[0]
    offsets_Q = torch.arange(len(chosen_Q), device=chosen_Q.device)
    accepted_1 = torch.zeros_like(state.calls)
    if drafts_1k is not None:
        accepted_1, _ = accept(Drafts(drafts_1k, None), logits_1QV, GREEDY, None)
    # After the accepted drafts comes the target's next token. The first stop token ends the answer.
    stop_Q = torch.where((chosen_Q[:, None] == state.stops).any(1), offsets_Q, len(chosen_Q))
    until_stop_1 = stop_Q.amin(0, keepdim=True) + 1
    count_1 = torch.minimum(accepted_1 + 1, until_stop_1)
    position_1 = torch.minimum(state.position + count_1, state.end)
    finished_1 = (until_stop_1 == count_1) | (position_1 >= state.end)
    state.ids_S.index_copy_(0, state.position + 1 + offsets_Q, chosen_Q)
    state.accepted_S.index_copy_(0, state.calls, accepted_1)
    state.calls.add_(~state.finished)
    state.position.copy_(torch.where(state.finished, state.position, position_1))
    state.finished.logical_or_(finished_1)
    state.seen.copy_(torch.cat((state.position, state.finished.long())))
