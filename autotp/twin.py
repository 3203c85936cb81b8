"""A copy of a model whose parameters are shapes, watched while it runs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp import torch_hooks
from autotp.errors import AutotpError
from autotp.record import ModuleCall, Recorder, Trace, Traced
from autotp.repeats import Repeats
from autotp.trees import kinds

MAX_REAL_NUMEL = 1 << 22


@dataclass(frozen=True)
class Twin:
    """A copy of a model whose parameters are shapes: nothing of the original is read or changed by running it."""

    model: nn.Module
    recorder: Recorder
    paths: dict[int, str]
    folds: bool = True


def make_twin(
    model: nn.Module,
    local_shapes: dict[str, tuple[int, ...]] | None = None,
    fold: bool = True,
    follow: Trace | None = None,
) -> Twin:
    """Copy ``model`` with every parameter a :class:`Traced` (of ``local_shapes`` where given) and real buffers."""
    recorder = Recorder()
    memo: dict[int, Any] = {}
    trace = recorder.trace
    for kind in ("named_parameters", "named_buffers"):
        for name, t in getattr(model, kind)(remove_duplicate=False):
            if id(t) not in memo:
                shape = (local_shapes or {}).get(name, tuple(t.shape))
                memo[id(t)] = _leaf(t, shape, kind == "named_parameters")
                tid = recorder.tid(memo[id(t)], leaf=name, grad=kind == "named_parameters" and t.is_floating_point())
                trace.tensors[tid].parameter = kind == "named_parameters"
            trace.leaves[name] = recorder.tid(memo[id(t)])
            trace.canonical[name] = trace.tensors[trace.leaves[name]].leaf or name
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as e:
        raise AutotpError(f"{type(model).__name__} cannot be copied for planning (copy.deepcopy failed): {e}") from e
    vars(twin).pop("generate", None)  # that of a sharded model
    paths = {id(m): name for name, m in twin.named_modules()}
    for m in twin.modules():
        torch_hooks.drop_hooks(m)
        _watch(m, recorder, paths)
    if fold:
        Repeats(recorder, _fresh, follow=follow).watch(twin)
    return Twin(twin, recorder, paths, fold)


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch_hooks.no_modes():
        return Traced(torch.empty(shape, dtype=dtype, device="meta"))


def _leaf(t: Tensor, shape: tuple[int, ...], parameter: bool) -> Tensor:
    meta = torch.empty(shape, dtype=t.dtype, device="meta")
    if parameter:
        out = Traced(meta)
        out._is_param = True  # what isinstance(_, nn.Parameter) looks at
        return out
    whole_numbers = not (t.is_floating_point() or t.is_complex())
    if torch_hooks.is_dtensor(t):
        return Traced(meta)
    if tuple(t.shape) != shape:
        return torch.zeros(shape, dtype=t.dtype) if whole_numbers else Traced(meta)
    if t.is_meta:
        return torch.zeros(shape, dtype=t.dtype) if whole_numbers else Traced(meta)
    if t.numel() > MAX_REAL_NUMEL and not whole_numbers:
        return Traced(meta)
    return t.detach().cpu().clone()


def _watch(module: nn.Module, rec: Recorder, paths: dict[int, str]) -> None:
    def enter(m: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = rec.by_path((args, kwargs))
        index = len(rec.trace.modules)
        parent = rec.stack[-1] if rec.stack else -1
        if parent < 0:
            rec.turn(paths[id(m)])
            rec.note_objects((args, kwargs))
            rec.note_inputs(inputs.values())
        run = ModuleCall(index, paths[id(m)], parent, inputs, len(rec.trace.calls), kinds=kinds(m, args, kwargs))
        rec.trace.modules.append(run)
        rec.stack.append(index)

    def leave(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = rec.trace.modules[rec.stack.pop()]
        call.outputs = rec.by_path(out)
        if call.parent < 0:
            rec.note_objects(out)
        call.stop = len(rec.trace.calls)

    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(leave, with_kwargs=True)
