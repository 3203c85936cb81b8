"""Private corners of torch, one of three: facts about aten operations, and running them on shapes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from autotp.torch_hooks import kept_rng

_aten = torch.ops.aten


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an aten operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


_BY_CONTENT = {"index", "_unsafe_index"}  # a mask among what they get is an index of the size of its content
_BY_CONTENT_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@functools.cache
def is_pure(func: Any) -> bool:
    """Whether an aten operation makes new tensors, of shapes that follow from the shapes it gets."""
    if func.namespace != "aten" or not is_functional(func) or func.overloadpacket.__name__ in _BY_CONTENT:
        return False
    alone = all(str(r.type) == "Tensor" for r in func._schema.returns)  # no lists of tensors
    return alone and not _BY_CONTENT_TAGS & set(func.tags)


@functools.cache
def functional(func: Any) -> Any:
    """The out-of-place form of an in-place aten operation (``relu_`` -> ``relu``); others as they are."""
    name = func.overloadpacket.__name__
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    overload = getattr(packet, func._overloadname, None) if packet is not None else None
    return func if overload is None else overload


@functools.cache
def makes_new(func: Any) -> bool:
    """Whether an operation makes new tensors: it writes into none, and gives no views."""
    return all(a.alias_info is None for a in (*func._schema.arguments, *func._schema.returns))


def is_functional(func: Any) -> bool:
    """Whether an operation makes new tensors and nothing else: no writes, no views, no draws."""
    return not is_random(func) and makes_new(func)


def operation(name: str) -> Any:
    """An operation by its full name, ``aten::add.Tensor``."""
    space, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), short), overload or "default")


def schema_of(func: Any) -> Any | None:
    """The schema of an operation, however it was reached (``torch.ops.x.y`` with one overload, or one overload)."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0]) if len(func.overloads()) == 1 else None
    return func._schema if isinstance(func, torch._ops.OpOverload) else None


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether torch tags an aten operation as elementwise (with broadcasting)."""
    return torch.Tag.pointwise in getattr(func, "tags", ())


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    schema = func._schema
    out = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            out.append((i, a.name))
    return tuple(out)


def written_args(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten operation writes in place."""
    out: list[Tensor] = []
    for i, name in _written(func):
        x = args[i] if i < len(args) else kwargs.get(name)
        out += [y for y in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(y, Tensor)]
    return out


def without_device(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Everything recorded lives on one pretended CPU, so device arguments are turned into it."""
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    return kwargs


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], real: dict[int, Tensor]) -> Any:
    """Run an aten operation on meta tensors; ``real`` maps a meta stand-in's id to the tensor with content."""
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._unsafe_index.Tensor):
        args = (args[0], _mask_to_index(args[1], real), *args[2:])
        if func in (_aten.index_put_.default, _aten.index_put.default):
            return func(*args, **kwargs)
    if func is _aten.masked_select.default:
        index = _mask_to_index([args[1]], real)
        return _aten.index.Tensor(args[0], index)
    if func is _aten.repeat_interleave.Tensor:
        n = int(real[id(args[0])].sum()) if id(args[0]) in real else args[0].shape[0]
        return torch.empty(n, dtype=torch.int64, device="meta")
    if func is _aten.nonzero.default:
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device="meta")
    if func is _aten.index_add_.default or func is _aten.index_add.default:
        return args[0] if func is _aten.index_add_.default else torch.empty_like(args[0])
    if func.overloadpacket.__name__ == "_grouped_mm":
        half = tuple(a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return func(*half, **{k: v for k, v in kwargs.items() if k != "out_dtype"}).to(args[0].dtype)
    if func is _aten.view.default:
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # the strides of a stand-in may differ from those of the real thing
            return args[0].reshape(args[1])
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as e:
        if "meta" not in str(e).lower() and "Meta" not in str(e):
            raise
        return _run_on_zeros(func, args, kwargs)


def _mask_to_index(index: list[Tensor | None], real: dict[int, Tensor]) -> list[Tensor | None]:
    out: list[Tensor | None] = []
    for x in index:
        if x is not None and x.dtype in (torch.bool, torch.uint8):
            content = real.get(id(x))
            if content is None:
                content = torch.ones(x.shape, dtype=torch.bool)
            out += [torch.empty_like(i, device="meta") for i in content.nonzero().unbind(1)]
        else:
            out.append(x)
    return out


def _run_on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For operations without a meta kernel: the samples are tiny, so run them on zeros and keep the shapes."""

    def real(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.zeros(x.shape, dtype=x.dtype)
        if isinstance(x, (list, tuple)):
            return type(x)(real(y) for y in x)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to("meta")
        return type(x)(meta(y) for y in x) if isinstance(x, (list, tuple)) else x

    with kept_rng():
        return meta(func(*real(args), **{k: real(v) for k, v in kwargs.items()}))
