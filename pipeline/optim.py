"""AdamW on float32 masters, and the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then cosine down to min_lr_ratio of the peak."""
    warmup = max(1, round(config.warmup_ratio * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


Tensors = dict[str, dict[str, Tensor]]
"""What a checkpoint holds: "weights" by name, and "optimizer" by name and moment."""


class Partners(Protocol):
    """Optimizers of other processes that keep what this one does not (pipeline/sharded.py)."""

    def complete(self, values: Tensor) -> None:
        """Add up, in place, values of which each is 0 on all but one."""

    def spread(self) -> None:
        """Give all the working weights that each has updated."""


class MasterAdamW:
    """AdamW whose weights are float32 whatever the model's dtype.

    A float32 model is its own master. Otherwise gradients are added up in float32 after each micro-batch, and the
    model gets a rounded copy after each step. Decay acts on matrices only.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        start: Mapping[str, Tensor] | None = None,
        keeps: Sequence[int] | None = None,
    ) -> None:
        """Take over `model`.

        start   the float32 weights that a rounded model was made from
        keeps   the parameters that are updated here, in ascending order; `partners` update the others
        """
        named = list(model.named_parameters())
        self.names = [name for name, _ in named]
        self.working = [parameter for _, parameter in named]
        self.partners: Partners | None = None
        self._shared = all(p.dtype == torch.float32 for p in self.working)
        self._kept = list(range(len(named))) if keeps is None else list(keeps)
        own = [named[index] for index in self._kept]
        if self._shared:
            self.masters = [parameter for _, parameter in own]
        else:
            exact = start or {name: parameter.detach() for name, parameter in named}
            self.masters = [
                nn.Parameter(exact[name].detach().to(p.device, torch.float32, copy=True)) for name, p in own
            ]
        self._parts = self._apart()
        self._kept_P = torch.tensor(self._kept, device=self.working[0].device)
        self.use_gradients([torch.zeros_like(p, dtype=torch.float32) for p in self.working])
        self.overwriting = False
        """Whether the next micro-batch is written over the gradients: what they hold was used in the last step."""
        matrices = [p for p in self.masters if p.dim() == 2]
        vectors = [p for p in self.masters if p.dim() != 2]  # and the taps of a convolution, which start at 1
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # Fused reads and writes each tensor once: 9 ms for 31 to 48 at 5.2 M parameters on one CPU core.
        self._adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
        for master in self.masters:  # now, so that the first step finds its memory as every other one does
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master.detach()),
                "exp_avg_sq": torch.zeros_like(master.detach()),
            }
        self._clip = config.clip_norm

    def use_gradients(self, gradients: list[Tensor]) -> None:
        """Let the float32 gradients, zeros now, be these tensors from here on."""
        self._gradients = gradients
        for master, index in zip(self.masters, self._kept, strict=True):
            master.grad = gradients[index]
        for parameter, gradient in zip(self.working, gradients, strict=True) if self._shared else ():
            parameter.grad = gradient

    @property
    def gradients(self) -> list[Tensor]:
        """The float32 gradients, in the order of `names`; sums of numerators until `step` divides them."""
        gradients = self._gradients
        if self._shared:  # autograd's own, should it ever not have added in place
            gradients = [p.grad for p in self.working if p.grad is not None]
        if self.overwriting:
            torch._foreach_zero_(gradients)
            self.overwriting = False
        return gradients

    def forget(self) -> None:
        """Begin a step: whatever the gradients hold no longer counts."""
        if self._shared:
            torch._foreach_zero_(self.gradients)  # autograd adds to them
        self.overwriting = not self._shared  # zeroed if somebody asks; mostly the next micro-batch is written over them

    def collect(self) -> None:
        """Add the model's gradients of one micro-batch to the float32 sums, and drop them: kept and zeroed, the next
        backward would read and write them once more."""
        if self._shared:
            return
        fresh = [parameter.grad for parameter in self.working]
        known = [gradient for gradient in fresh if gradient is not None]
        if self.overwriting and len(known) == len(fresh):
            self.overwriting = False
            torch._foreach_copy_(self.gradients, known)
        else:
            totals = [total for total, gradient in zip(self.gradients, fresh, strict=True) if gradient is not None]
            torch._foreach_add_(totals, known)
        for parameter in self.working:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, denominator: Tensor) -> Tensor:
        """Divide the summed gradients by `denominator`, clip, update, forget them; return the norm before clipping
        (scalar).

        Everything stays on the device: nothing here waits for it.
        """
        inverse = 1.0 / denominator.clamp(min=1e-12)
        gradients = self.gradients
        norms_P = self._norms(gradients)
        norm, *_ = [self._scaled(part, gradients, norms_P, inverse) for part in self._parts]
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.forget()
        self._publish()
        return norm

    def _apart(self) -> list[tuple[Tensor, list[int]]]:
        """Return the drafter's parameters and, apart, those of a head that reads its states detached, as (all, those
        kept here): clipped together, the head would change the drafter's steps."""
        heads = [name.startswith(("candidate_selector.", "markov_head.")) for name in self.names]
        found = []
        for own in (False, True):
            members = [index for index, head in enumerate(heads) if head == own]
            kept = [index for index in self._kept if heads[index] == own]
            if members:
                found.append((torch.tensor(members, device=self.working[0].device), kept))
        return found

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of each parameter's gradient (P,)."""
        own = torch._foreach_norm([gradients[index] for index in self._kept]) if self._kept else ()
        if self.partners is None:
            return torch.stack(own)
        norms_P = gradients[0].new_zeros(len(gradients))
        if own:
            norms_P[self._kept_P] = torch.stack(own)
        self.partners.complete(norms_P)
        return norms_P

    def _scaled(
        self, part: tuple[Tensor, list[int]], gradients: list[Tensor], norms_P: Tensor, inverse: Tensor
    ) -> Tensor:
        """Multiply a part's gradients by `inverse` and clip them; return the norm between the two."""
        members, kept = part
        norm = torch.linalg.vector_norm(norms_P[members]) * inverse
        if kept:
            factor = inverse * (self._clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([gradients[index] for index in kept], factor)
        return norm

    def _publish(self) -> None:
        if not self._shared and self._kept:
            torch._foreach_copy_([self.working[index] for index in self._kept], list[Tensor](self.masters))
        if self.partners is not None:
            self.partners.spread()

    @property
    def _named_masters(self) -> list[tuple[str, Tensor]]:
        return [(self.names[index], master) for index, master in zip(self._kept, self.masters, strict=True)]

    def tensors(self) -> Tensors:
        """Return the weights and the optimizer's state that are kept here, for a checkpoint."""
        moments: dict[str, Tensor] = {}
        for name, master in self._named_masters:
            for key, value in self._adamw.state.get(master, {}).items():
                moments[f"{name}.{key}"] = value.detach()
        return {"weights": {name: master.detach() for name, master in self._named_masters}, "optimizer": moments}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `tensors` returned of all processes. Raises KeyError when a name is missing."""
        weights, moments = tensors["weights"], tensors["optimizer"]
        for name, parameter in zip(self.names, self.working, strict=True):
            parameter.copy_(weights[name])
        for name, master in self._named_masters:
            master.copy_(weights[name])
            state = {key: moments[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self._adamw.state[master] = {key: value.clone().to(master.device) for key, value in state.items()}
