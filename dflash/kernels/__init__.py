"""Triton kernels for what torch would do in many passes over memory. Each has a plain form beside it in torch, which
the CPU and float64 run and which tests compare with. Import a module only where its tensors are on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on the tensor's GPU: it takes the current one, whatever it is given."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()  # on the CPU it is interpreted
