"""The inner mode of a recorded run: each aten operation runs on shapes, or on real integers, and is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import torch_ops
from autotp.plausible import integer_outputs, scalar
from autotp.record import Recorder, Traced
from autotp.trees import flatten, rebuild
from autotp.twin import MAX_REAL_NUMEL


class Operations(TorchDispatchMode):
    """Runs each aten operation and records it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = torch_ops.without_device(func, kwargs or {})
        leaves, spec = flatten((args, kwargs))
        unreal = [x for x in leaves if isinstance(x, Tensor) and (isinstance(x, Traced) or x.is_meta)]
        if not unreal and not torch_ops.is_random(func) and _is_small(func, leaves):
            out = func(*args, **kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            out = scalar(args[0])
        else:
            out = self._on_meta(func, leaves, spec)
        rec = self.recorder
        at, real = len(rec.trace.calls), not unreal and not torch_ops.is_random(func)
        if func is torch.ops.aten._local_scalar_dense.default:
            out = rec.asking.number(at, func, args[0], out, unreal=not real)
        else:
            out = rec.asking.result(at, func, out, leaves, unreal=not real)
        written = torch_ops.written_args(func, args, kwargs)
        if torch_ops.is_random(func):
            rec.trace.random_calls += 1
        implicit = None
        if rec.call is None:
            implicit = rec.call = rec.open_call(func, args, kwargs, ("implicit",))
            implicit.fixed = any(isinstance(x, Traced) for x in leaves)
            implicit.shut = "is called nowhere in the model's code" if implicit.fixed else ""
            implicit.inner, rec.wrapped = rec.wrapped, set()
        rec.op(func, args, kwargs, out, [rec.tid(w) for w in written])
        if implicit is not None:
            rec.call = None
            rec.close_call(implicit, out)
        return out

    def _on_meta(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        memo: dict[int, Tensor] = {}
        metas = [_to_meta(x, memo) if isinstance(x, Tensor) else _no_device(x) for x in leaves]
        args, kwargs = rebuild(metas, spec)
        known = _memo_key(func, args, kwargs)
        if known is not None and known in _SHAPES:
            out = tuple(torch.empty_strided(size, stride, dtype=d, device="meta") for size, stride, d in _SHAPES[known])
            return _wrap(func, out if len(out) > 1 else out[0], {}, leaves)
        originals = {id(m): x for m, x in zip(metas, leaves, strict=True) if isinstance(x, Tensor)}
        content = {i: x for i, x in originals.items() if not isinstance(x, Traced)}
        out = torch_ops.run_on_meta(func, args, kwargs, content)
        made = out if isinstance(out, tuple) else (out,)
        if known is not None and all(isinstance(o, Tensor) for o in made):
            _SHAPES[known] = tuple((tuple(o.shape), o.stride(), o.dtype) for o in made)
        return _wrap(func, out, originals, leaves)


# What an operation makes of given shapes: many are worked out in Python by torch, and layers repeat them.
_SHAPES: dict[Any, tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]] = {}
_MAX_SHAPES = 1 << 16


def _memo_key(func: Any, args: Any, kwargs: Any) -> Any:
    """A key for operations whose result depends on shapes alone and shares no memory; None for others."""
    if not torch_ops.is_pure(func):
        return None
    if len(_SHAPES) > _MAX_SHAPES:
        _SHAPES.clear()
    key = func, _described(args), tuple((k, _described(v)) for k, v in kwargs.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return "tensor", tuple(x.shape), x.stride(), x.dtype
    if isinstance(x, (tuple, list)):
        return tuple(_described(y) for y in x)
    return type(x), x


def _is_small(func: Any, leaves: list[Any]) -> bool:
    if any(isinstance(x, Tensor) for x in leaves):
        return True
    size = 1
    for x in leaves:
        if isinstance(x, int) and not isinstance(x, bool):
            size *= max(abs(x), 1)
    return size <= MAX_REAL_NUMEL or func.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.scalar_tensor)


def _no_device(x: Any) -> Any:
    return torch.device("meta") if isinstance(x, torch.device) else x


def _to_meta(t: Tensor, memo: dict[int, Tensor]) -> Tensor:
    if isinstance(t, Traced):
        return t.inner
    if id(t) not in memo:
        memo[id(t)] = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
    return memo[id(t)]


def _wrap(func: Any, out: Any, originals: dict[int, Tensor], leaves: list[Any]) -> Any:
    """Meta results -> Traced floats and plausible real integers; an argument returned as it is stays itself."""
    if isinstance(out, (tuple, list)):
        ints = integer_outputs(func, out, leaves)
        return type(out)(_wrap_one(o, originals, i) for o, i in zip(out, ints, strict=True))
    return _wrap_one(out, originals, integer_outputs(func, (out,), leaves)[0])


def _wrap_one(o: Any, originals: dict[int, Tensor], plausible: Tensor | None) -> Any:
    if not isinstance(o, Tensor):
        return o
    same = originals.get(id(o))
    if same is not None:
        return same
    return plausible if plausible is not None else Traced(o)
