"""Tensors inside the objects that a model is given or gives: the keys and values in a cache.

Such objects are opaque to the record of a run, but what they hold lives on from one call to the next.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Path = tuple[Any, ...]
Place = tuple[str, Path]  # the class of the object, and the way to a tensor in it
Cut = dict[int, tuple[Sequence[int], ...]]  # dim -> for each rank the indices it holds
Layouts = dict[Place, Cut]

PLAIN = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.layout)
_CLOSED = (*PLAIN, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
_DEPTH = 8


def is_object(x: Any) -> bool:
    """Whether a leaf of a model's arguments or results may hold tensors of its own."""
    return not isinstance(x, (Tensor, *_CLOSED))


def tensors_in(x: Any) -> Iterator[tuple[Place, Tensor]]:
    """The tensors that an object holds, each with its place."""
    kind = type(x).__qualname__
    for path, t in _walk(x, (), set()):
        yield (kind, path), t


def _walk(x: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(x, Tensor):
        yield path, x
        return
    if isinstance(x, _CLOSED) or len(path) > _DEPTH or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, dict):
        items = list(x.items())
    elif isinstance(x, (list, tuple)):
        items = list(enumerate(x))
    else:
        items = list(getattr(x, "__dict__", {}).items())
    for key, value in items:
        yield from _walk(value, (*path, key), seen)


def with_tensors(x: Any, change: Callable[[Place, Tensor], Tensor]) -> Any:
    """A deep copy of an object with its tensors changed; the object itself if it cannot be copied."""
    memo: dict[int, Any] = {id(t): change(place, t) for place, t in tensors_in(x)}
    try:
        return copy.deepcopy(x, memo)
    except Exception:
        return x
