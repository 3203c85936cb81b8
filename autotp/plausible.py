"""Content for integers and booleans that a run on shapes cannot know.

The model's Python may loop over them, index with them or branch on them, so they are chosen to walk every path once:
routing indices reach all experts, comparisons hold, and nothing is infinite or not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten
_FALSE = {_aten.isnan, _aten.isinf, _aten.eq, _aten.logical_not, _aten.isneginf, _aten.isposinf, _aten.signbit}
_RANKED = {_aten.topk, _aten.sort, _aten.argsort, _aten.msort}


def scalar(t: Tensor) -> Any:
    """The Python number that ``.item()`` gives: real where there is data, else one."""
    if type(t) is Tensor and not t.is_meta:
        return t.item()
    return 1.0 if t.is_floating_point() else 1


def is_ranked(func: Any) -> bool:
    """Whether an operation gives the indices of the largest, which are chosen here so that all are met."""
    return getattr(func, "overloadpacket", None) in _RANKED


def reader(func: Any) -> Callable[..., Any] | None:
    """What stands for a torch function that turns a tensor into Python's or numpy's numbers, of traced tensors."""
    return _READERS.get(getattr(func, "__name__", ""))


def _nested(one: float, shape: tuple[int, ...]) -> Any:
    return [_nested(one, shape[1:]) for _ in range(shape[0])] if shape else one


def _read(make: Callable[..., Any]) -> Callable[..., Any]:
    def read(x: Tensor, *args: Any, **_: Any) -> Any:
        return make(torch.ops.aten._local_scalar_dense.default(x), tuple(x.shape), *args)

    return read


_READERS: dict[str, Callable[..., Any]] = {
    "tolist": _read(_nested),
    "numpy": _read(lambda one, shape, *_: np.full(shape, one)),
    "__array__": _read(lambda one, shape, dtype=None: np.full(shape, one, dtype)),
    "__format__": _read(lambda one, shape, form: format(one, form) if not shape else str(_nested(one, shape))),
}


def integer_outputs(func: Any, outs: Any, leaves: list[Any]) -> list[Tensor | None]:
    """For each meta result: a real tensor if it holds integers or booleans, else None."""
    return [_content(func, o, leaves) if isinstance(o, Tensor) else None for o in outs]


def _content(func: Any, o: Tensor, leaves: list[Any]) -> Tensor | None:
    if o.is_floating_point() or o.is_complex():
        return None
    if o.dtype == torch.bool:
        fill = func.overloadpacket not in _FALSE
        return torch.full(o.shape, fill, dtype=torch.bool)
    if is_ranked(func) and o.ndim:
        source = next(x for x in leaves if isinstance(x, Tensor))
        return _spread(o, source, leaves)
    return torch.zeros(o.shape, dtype=o.dtype)


def _spread(o: Tensor, source: Tensor, leaves: list[Any]) -> Tensor:
    """Distinct indices along the ranked dim, shifted from row to row so that every index occurs."""
    dims = [d for d in range(source.ndim) if source.shape[d] != o.shape[d]]
    dim = dims[0] if dims else o.ndim - 1
    n, k = source.shape[dim], o.shape[dim]
    rows = max(o.numel() // max(k, 1), 1)
    grid = (torch.arange(rows)[:, None] * k + torch.arange(k)[None]) % max(n, 1)
    shape = [o.shape[d] for d in range(o.ndim) if d != dim] + [k]
    return grid.reshape(shape).movedim(-1, dim).to(o.dtype).contiguous()
