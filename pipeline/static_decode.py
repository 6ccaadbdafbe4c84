"""Decoding of a whole batch in tensors that never move, so that one CUDA graph serves every step.

The library's loop launches each kernel of each token from Python, and at small models the GPU waits for that. Here a
step reads and writes only buffers made once: on CUDA it is recorded at its first use and replayed after that, and the
host asks every CHECK_EVERY steps whether anything is left to do. On other devices the same step runs unrecorded.
Greedy unless the decoder was made with a Sampling: then the noise is drawn inside the step, from a generator that the
graph knows, so that a replay draws anew.

Shape suffixes: B rows, S slots of a row, T slots attended to, W prompt tokens, H query heads, N key-value heads,
G query heads of one key-value head, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from dflash.sampling import GREEDY, Sampling

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies are fixed; the others look at the positions on the host at every step."""

CHECK_EVERY = 16
"""Steps between two questions to the device, each of which waits for it."""

KEY_BUCKET = 128
"""Attended slots are rounded up to this: a smaller one reads less and records more graphs, at two slow steps each."""

NUM_SIZES = 3
"""Row counts that steps are recorded for: all rows, a half, a quarter."""

MIN_ROWS = 128
"""No step is recorded for fewer rows than this unless the batch is smaller: below it, kernels' launches decide."""

PREFILL_TOKENS = 1 << 17
"""Prompt tokens of one forward pass, padding included: bounds its activations."""

ATTENTION = "dflash_static"


def why_not_static(model: PreTrainedModel) -> str | None:
    """Return what about `model` StaticDecoder cannot run, or None if it can."""
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(MODEL_TYPES)}"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        return f"it has layers of {', '.join(others)}"
    if (rope := config.rope_parameters["rope_type"]) not in ROPE_TYPES:
        return f"rope_type {rope!r} is none of {', '.join(ROPE_TYPES)}"
    return None


class StaticDecoder:
    """Decodes batches of up to `num_rows` prompts whose prompt and answer fit in `num_slots` tokens each.

    The cache holds num_rows x num_slots x layers x 2 x N x D numbers of the model's dtype. Prompts are padded on the
    right: tokens stand at the positions that they have alone, and padding is overwritten before anything attends to it.
    A finished row idles until its batch ends; when half the rows are finished, the others move together and the steps
    go on with half the rows. Refilling finished rows would idle less, but rows out of step attend to the longest one's
    slots, and each refill is a forward pass launched from Python.

    Recording must not meet another thread's work on the same device: CUDA fails it. The cache stage has one thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stops: Sequence[int],
        num_rows: int,
        num_slots: int,
        sampling: Sampling = GREEDY,
    ) -> None:
        device, config = model.device, model.config.get_text_config()
        self.sampling, self.generator = sampling, None if sampling.greedy else torch.Generator(device)
        self.model, self.device = model, device
        self.num_rows, self.num_slots = num_rows, _round_up(num_slots, KEY_BUCKET)
        self.sizes = _sizes(num_rows)
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (num_rows, heads, self.num_slots, width)
        # Zeros: an unwritten slot has weight 0, but 0 times a NaN of uninitialised memory would be NaN.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.num_hidden_layers)]
            for _ in range(2)
        )
        self.ids_BS = torch.zeros(num_rows, self.num_slots, dtype=torch.long, device=device)
        self.position_B = torch.zeros(num_rows, dtype=torch.long, device=device)  # of the last token that is known
        self.end_B = torch.zeros_like(self.position_B)  # position of the last token that may be written
        self.owner_B = torch.zeros_like(self.position_B)  # which prompt of the batch a row holds
        self.finished_B = torch.ones(num_rows, dtype=torch.bool, device=device)
        self.rows_B = torch.arange(num_rows, device=device)
        self.slots_S = torch.arange(self.num_slots, device=device)
        self.stops = torch.tensor(list(stops), dtype=torch.long, device=device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @torch.no_grad()  # not inference_mode: recording keeps RNG tensors that others must be able to write later
    def answers(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0) -> list[list[int]]:
        """Return each prompt's answer of 1 to max_new_tokens ids, ended by its first stop token.

        seed   of the noise, when the decoder samples: the same batch and seed give the same answers on the same device
        Raises ValueError if a prompt is empty or they do not fit in the rows and slots.
        """
        longest = max(map(len, prompts))
        if not min(map(len, prompts)) or len(prompts) > self.num_rows or longest + max_new_tokens > self.num_slots:
            raise ValueError(
                f"{len(prompts)} prompts of {min(map(len, prompts))} to {longest} tokens and {max_new_tokens} new ones "
                f"do not fit in {self.num_rows} rows of {self.num_slots} slots"
            )
        if self.generator is not None:
            self.generator.manual_seed(seed)
        with _device(self.device), _static_attention(self.model):
            self._place(prompts, max_new_tokens)
            self._prefill(len(prompts), longest - 1)
            rows = self.num_rows
            for step in range(max_new_tokens):
                if step % CHECK_EVERY == 0:
                    live = int((~self.finished_B[:rows]).sum())
                    if not live:
                        break
                    rows = self._shrink(rows, live, longest + step)
                self._advance(rows, _round_up(longest + step, KEY_BUCKET))
        return self._collect(prompts)

    def _place(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Fill the state with `prompts`; rows without one are finished from the start."""
        longest, idle = max(map(len, prompts)), self.num_rows - len(prompts)
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        position_B = torch.tensor([len(prompt) - 1 for prompt in prompts] + [0] * idle)
        self.ids_BS.zero_()
        self.ids_BS[: len(prompts), :longest] = torch.tensor(padded).to(self.device)
        self.position_B.copy_(position_B)
        self.end_B.copy_(position_B + max_new_tokens)
        self.owner_B.copy_(self.rows_B)
        self.finished_B.copy_(self.rows_B >= len(prompts))

    def _prefill(self, num_prompts: int, width: int) -> None:
        """Write keys and values of all prompt tokens but each row's last, which the first step feeds."""
        if not width:
            return
        count = max(1, PREFILL_TOKENS // width)
        for first in range(0, num_prompts, count):
            rows = slice(first, min(first + count, num_prompts))
            self.model.base_model(
                input_ids=self.ids_BS[rows, :width],
                position_ids=self.slots_S[None, :width],
                past_key_values=_PromptSlots(self, rows),
                use_cache=True,
            )

    def _advance(self, rows: int, num_keys: int) -> None:
        """Take one step of the first `rows` rows: replayed if it was recorded, else run and, on CUDA, recorded."""
        if self.device.type != "cuda":
            self._step(rows, num_keys)
            return
        if graph := self.graphs.get((rows, num_keys)):
            graph.replay()
            return
        # A graph's kernels must have run once on a side stream, where libraries make their workspaces. This run is a
        # step like any other, and recording runs nothing.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self._step(rows, num_keys)
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)  # each replay goes on where the one before it stopped
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self._step(rows, num_keys)
        self.graphs[rows, num_keys] = graph

    def _step(self, rows: int, num_keys: int) -> None:
        """Write the next token of the first `rows` rows; finished ones compute the same again and write nothing."""
        ids_BS, position_B, finished_B = self.ids_BS[:rows], self.position_B[:rows], self.finished_B[:rows]
        next_B = self._choose(self._logits(rows, num_keys))
        after_B = position_B + 1
        old_B1 = ids_BS.gather(1, after_B[:, None])
        ids_BS.scatter_(1, after_B[:, None], torch.where(finished_B[:, None], old_B1, next_B[:, None]))
        finished_B |= (next_B[:, None] == self.stops).any(1) | (after_B >= self.end_B[:rows])
        position_B += ~finished_B

    def _logits(self, rows: int, num_keys: int) -> torch.Tensor:
        """Return logits (B, V) after the last known token of the first `rows` rows; num_keys > each live position."""
        position_B1 = self.position_B[:rows, None]
        hidden_BT = self.slots_S[:num_keys] > position_B1
        mask_BT = torch.zeros(hidden_BT.shape, dtype=self.model.dtype, device=self.device)
        mask_BT = mask_BT.masked_fill(hidden_BT, -torch.inf)
        output = self.model(
            input_ids=self.ids_BS[:rows].gather(1, position_B1),
            attention_mask=mask_BT[:, None, None],
            position_ids=position_B1,
            past_key_values=_StepSlots(self, rows, num_keys),
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _choose(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return each row's next token (B,): the likeliest, or one drawn from the distribution of `sampling`.

        Drawn: the argmax of p / e with e exponential is distributed as p (the Gumbel-max trick, without logarithms);
        one pass, and no sum that must be searched. On a GPU torch never draws e = 0, with which any token would win; on
        a CPU once in 2^53.
        """
        if self.generator is None:
            return logits_BV.argmax(-1)
        share_BV = self.sampling.probabilities(logits_BV)
        noise_BV = torch.empty_like(share_BV).exponential_(generator=self.generator)
        return (share_BV / noise_BV).argmax(-1)

    def _shrink(self, rows: int, live: int, num_keys: int) -> int:
        """Return the fewest rows that steps are made for and that hold all `live` ones, moved to the front."""
        fewest = min(size for size in self.sizes if size >= live)
        if fewest >= rows:
            return rows
        order_B = self.finished_B[:rows].to(torch.int8).argsort(stable=True)
        for state in (self.ids_BS, self.position_B, self.end_B, self.owner_B, self.finished_B):
            state[:rows] = state[order_B]
        for cached in (*self.keys, *self.values):
            cached[:fewest, :, :num_keys] = cached[order_B[:fewest], :, :num_keys]
        return fewest

    def _collect(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        states = (self.owner_B, self.position_B, self.ids_BS)
        for owner, position, ids in zip(*(state.tolist() for state in states), strict=True):
            if owner < len(prompts):
                answers[owner] = ids[len(prompts[owner]) : position + 2]
        return answers


@dataclass(frozen=True)
class _PromptSlots:
    """What the library's layers take for their cache while prompts are read: keeps what they add in `rows`."""

    decoder: StaticDecoder
    rows: slice

    def update(self, key_BNWD: torch.Tensor, value_BNWD: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        width = key_BNWD.shape[2]
        self.decoder.keys[layer][self.rows, :, :width] = key_BNWD
        self.decoder.values[layer][self.rows, :, :width] = value_BNWD
        return key_BNWD, value_BNWD


@dataclass(frozen=True)
class _StepSlots:
    """The same for a step: puts each row's token at its position and gives back the first `num_keys` slots."""

    decoder: StaticDecoder
    num_rows: int
    num_keys: int

    def update(self, key_BN1D: torch.Tensor, value_BN1D: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.decoder.keys[layer], self.decoder.values[layer]
        rows_B, position_B = self.decoder.rows_B[: self.num_rows], self.decoder.position_B[: self.num_rows]
        keys[rows_B, :, position_B] = key_BN1D[:, :, 0]
        values[rows_B, :, position_B] = value_BN1D[:, :, 0]
        return keys[: self.num_rows, :, : self.num_keys], values[: self.num_rows, :, : self.num_keys]


def _attend(
    module: torch.nn.Module,
    query_BHWD: torch.Tensor,
    key_BNTD: torch.Tensor,
    value_BNTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention (B, W, H, D): causal without a mask (B, 1, 1, T), else of one token to the slots that it shows.

    The library repeats keys and values for each query head when there is a mask. In a step the cache's traffic is what
    takes time, so here the G query heads of one key-value head stand as G queries, and the cache is read once.
    """
    rows, heads, width, _size = query_BHWD.shape
    groups = heads // key_BNTD.shape[1]
    attend = functional.scaled_dot_product_attention
    if attention_mask is None:
        key_BHTD, value_BHTD = (x.repeat_interleave(groups, dim=1) for x in (key_BNTD, value_BNTD))
        out_BHWD = attend(query_BHWD, key_BHTD, value_BHTD, is_causal=True, scale=scaling)
        return out_BHWD.transpose(1, 2).contiguous(), None
    query_BNGD = query_BHWD.reshape(rows, -1, groups, query_BHWD.shape[-1])
    out_BNGD = attend(query_BNGD, key_BNTD, value_BNTD, attn_mask=attention_mask, scale=scaling)
    return out_BNGD.reshape(rows, width, heads, -1), None


AttentionInterface.register(ATTENTION, _attend)


@contextmanager
def _static_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's layers call _attend, through kernels that need no search at a new shape (cuDNN's do)."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels, set_priority=True):
            yield
    finally:
        config._attn_implementation = before


@contextmanager
def _device(device: torch.device) -> Iterator[None]:
    """Make `device` the one that streams and graphs are made on."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def _sizes(num_rows: int) -> list[int]:
    """Return the row counts that steps are made for, the largest first."""
    sizes = [num_rows]
    while len(sizes) < NUM_SIZES and (half := -(-sizes[-1] // 2)) >= MIN_ROWS and half < sizes[-1]:
        sizes.append(half)
    return sizes


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
