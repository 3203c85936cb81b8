"""What is claimed of one dim of an operation, to be tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp.record import Trace, Traced
from autotp.trees import flatten, rebuild

Places = tuple[int | None, ...]


@dataclass(frozen=True)
class Slot:
    """A tensor argument: where it is among the leaves, and what it is like; ``content`` of integers where known."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: Tensor | None = None


@dataclass(frozen=True)
class Trial:
    """An operation with its arguments, and what is claimed of one dim of it.

    ``dims[k]``: the dim of operand k that it is, or None; ``results[j]`` likewise. ``summed``: the result is a sum over
    it. ``counts``: leaves that count its indices. ``thorough``: it must be seen to hold for several sizes. ``full``:
    how many indices it has in the model. ``asked``: the user wants it tried, whatever it runs.
    """

    func: Any
    leaves: tuple[Any, ...]
    spec: Any
    slots: tuple[Slot, ...]
    dims: Places
    results: Places
    summed: bool = False
    counts: tuple[int, ...] = ()
    thorough: bool = False
    full: int = 0
    asked: bool = False

    @property
    def size(self) -> int:
        """How many indices the dim has as recorded."""
        return next(s.shape[d] for s, d in zip(self.slots, self.dims, strict=True) if d is not None)

    @property
    def key(self) -> Any:
        """What tells this trial from others."""
        tensors = tuple((s.shape, s.dtype) for s in self.slots)
        others = tuple(repr(x) for i, x in enumerate(self.leaves) if i not in {s.at for s in self.slots})
        claim = self.dims, self.results, self.summed, self.counts, self.thorough, self.full, self.asked
        return self.func, tensors, others, repr(self.spec), *claim

    def call(self, tensors: Sequence[Tensor], size: int) -> list[Any]:
        """The results on these tensors, whose dim has ``size`` indices."""
        leaves = list(self.leaves)
        for slot, t in zip(self.slots, tensors, strict=True):
            leaves[slot.at] = t
        for i in self.counts:
            whole, rest = divmod(leaves[i] * size, self.size)
            if rest:
                raise Indivisible
            leaves[i] = whole
        args, kwargs = rebuild(leaves, self.spec)
        return flatten(self.func(*args, **kwargs))[0]


def slot(trace: Trace, at: int, tid: int) -> Slot:
    """A tensor argument of a recorded operation, with the content of integers where it is known."""
    info, there = trace.tensors[tid], trace.objects[tid]
    known = not info.dtype.is_floating_point and not isinstance(there, Traced) and info.real
    return Slot(at, info.shape, info.dtype, there if known else None)


class Indivisible(Exception):
    """A count that is not whole for this size."""


__all__ = ["Indivisible", "Places", "Slot", "Trial", "slot"]
