"""The types of numbers that torch gives, and computes in, where the ranks do a call together."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from autotp import torch_hooks
from autotp.ownership.rules_shared_classes import of_probabilities
from autotp.torch_dynamo import at_trace


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are made in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def result_dtype(func: Any, kind: str, x: Tensor, other: Tensor | None) -> torch.dtype:
    """The dtype that ``func`` gives of ``x`` and ``other`` (a norm's weight, a loss's target), under autocast too.

    ``kind``: of the call, as the rules name it.
    """
    of_other, device = None if other is None else other.dtype, x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _asked(func, kind, x.dtype, of_other, device, autocast)


@at_trace
def _asked(func: Any, kind: str, x: Any, other: Any, device: str, autocast: Any) -> torch.dtype:
    return _cached(func, kind, x, other, device, autocast)


@functools.lru_cache(maxsize=512)
def _cached(func: Any, kind: str, x: Any, other: Any, device: str, autocast: Any) -> torch.dtype:
    """What torch says, of the smallest call there is; autocast is part of the key."""
    with torch_hooks.no_modes(), torch.no_grad():
        one = torch.ones(1, 2, dtype=x, device=device)
        if kind in ("layer", "rms", "group"):
            weight = None if other is None else torch.ones(2, dtype=other, device=device)
            return func(one, 1 if kind == "group" else [2], weight).dtype
        if kind == "gather":
            return func(one, 1, torch.zeros(1, 1, dtype=torch.int64, device=device)).dtype
        if other is None:
            return func(one, 1).dtype
        shape = (1, 2) if of_probabilities(other) else (1,)
        return func(one, torch.zeros(shape, dtype=other, device=device)).dtype
