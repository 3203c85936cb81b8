"""Custom autograd functions as operations: what they compute and its gradient are both their author's.

A recorded call of one is a single operation, for which a rule may be found as for any other (by trying it, or from a
declaration). Where its forward does more than to make new tensors of its arguments, the call only sees whole tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autotp import torch_hooks, torch_ops
from autotp.record import Call, Op, Recorder
from autotp.trees import Ref, rebuild

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size,
)  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One argument of a function, described as torch describes those of an operation."""

    name: str
    type: str
    alias_info: None = None

    def has_default_value(self) -> bool:
        """What is left out is filled in by the function itself."""
        return False


@dataclass(frozen=True)
class Schema:
    """All of them."""

    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class FunctionOp:
    """A custom autograd function in the place of an aten operation. ``tensors``: which arguments are tensors here."""

    function: type[torch.autograd.Function]
    tensors: tuple[bool, ...]
    namespace = "autograd.Function"
    tags = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __str__(self) -> str:
        return self.function.__name__

    @property
    def overloadpacket(self) -> FunctionOp:
        """It has no overloads."""
        return self

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}.apply"  # with a dot, so that it is never taken for an aten operation

    @property
    def _qualified_op_name(self) -> type[torch.autograd.Function]:
        """What its rule goes by."""
        return self.function

    @cached_property
    def _schema(self) -> Schema:
        given = zip(_names(self.function, len(self.tensors)), self.tensors, strict=True)
        return Schema(tuple(Argument(name, "Tensor" if tensor else "Any") for name, tensor in given))


def is_function(x: Any) -> bool:
    """Whether something is the class of a custom autograd function."""
    return isinstance(x, type) and issubclass(x, torch.autograd.Function)


def _names(function: type[torch.autograd.Function], count: int) -> Iterator[str]:
    """The names of the first arguments of a function, without the context; those of ``*args`` are numbered."""
    skipped = 0 if torch_hooks.has_own_context(function) else 1
    parameters = list(inspect.signature(function.forward).parameters.values())[skipped:]
    for i in range(count):
        starred = i >= len(parameters) or parameters[i].kind is inspect.Parameter.VAR_POSITIONAL
        yield f"argument{i}" if starred else parameters[i].name
        if starred:
            parameters = parameters[:i]


def returned_apart(rec: Recorder, call: Call, out: Any, args: tuple[Any, ...]) -> Any:
    """What a forward returns, with a view in the place of an argument that it hands back, as autograd gives one."""
    written = {rec.trace.tensors[w].storage for op in rec.trace.ops[call.start :] for w in op.writes}

    def apart(x: Any) -> Any:
        same = isinstance(x, torch.Tensor) and any(x is a for a in args)
        return x.view_as(x) if same and rec.trace.tensors[rec.tid(x)].storage not in written else x

    return tuple(map(apart, out)) if type(out) is tuple else apart(out)


def close_function(rec: Recorder, call: Call, known: int) -> None:
    """Make one operation of a recorded call of a function, or say of the call why it is none.

    ``known``: how many tensors there were before it ran.
    """
    trace = rec.trace
    if not trace.calls or trace.calls[-1] is not call:
        return  # it touched no tensor
    call.shut = _obstacle(rec, call, known)
    if call.shut:
        return
    args, kwargs = rebuild(call.leaves, call.spec)
    ins, outs = _tids(call.leaves), _tids(call.outs)
    func = FunctionOp(call.func, tuple(isinstance(x, Ref) for x in args))
    for info in (trace.tensors[t] for t in outs):
        numbers = info.dtype.is_floating_point or info.dtype.is_complex
        info.grad |= numbers and any(trace.tensors[t].grad for t in ins)
    trace.ops[call.start :] = [Op(func, args, kwargs, ins, outs, [], call.index)]
    call.stop = call.start + 1


def _obstacle(rec: Recorder, call: Call, known: int) -> str:
    trace, ops = rec.trace, rec.trace.ops[call.start :]
    args, outs = _tids(call.leaves), _tids(call.outs)
    other = next((x for x in rebuild(call.leaves, call.spec)[0] if not isinstance(x, Ref) and not _is_plain(x)), None)
    if other is not None:
        return f"is given a {type(other).__name__}, which may hold anything"
    if any(torch_ops.is_random(op.func) for op in ops):
        return "draws random numbers"
    if any(rec.alike[trace.tensors[w].storage][0] < known for op in ops for w in op.writes):
        return "writes into what it is given"
    made = {t for op in ops for t in op.outs}
    if any(t < known and t not in made and t not in args for op in ops for t in op.ins):
        return "reads a tensor that is not among its arguments"
    if len(outs) != len(call.outs) or len({*outs, *args}) != len(outs) + len(set(args)) or not outs:
        return "returns something else than new tensors"
    return ""


def _is_plain(x: Any) -> bool:
    return all(map(_is_plain, x)) if type(x) in (tuple, list) else isinstance(x, _PLAIN)


def _tids(leaves: list[Any]) -> list[int]:
    return [x.tid for x in leaves if isinstance(x, Ref)]


__all__ = ["Argument", "FunctionOp", "close_function", "is_function", "returned_apart"]
