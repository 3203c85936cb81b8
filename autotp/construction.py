"""How a model was built, so that it can be built again: for values that only its constructor knows.

    model = autotp.on_meta(LlamaForCausalLM, config)

remembers the constructor. A module that was built under ``torch.device("meta")`` remembers nothing; its class is
called again with the arguments that the module has kept as attributes, and what comes out is taken only if it is the
same module in every respect that can be seen. An argument that was not kept must show in the module: it is varied,
and if nothing else changes with it, the module could have been built with another value, and is not rebuilt.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autotp import meta_build
from autotp.errors import BuildError

Constructor = Callable[[], nn.Module]

_CONSTRUCTORS: WeakKeyDictionary[nn.Module, Constructor] = WeakKeyDictionary()
_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_INTERNAL = set(nn.Module().__dict__)


def on_meta(constructor: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """``constructor(*args, **kwargs)`` with its parameters on meta, where they take no memory, and real buffers.

    The constructor is remembered (with a copy of its arguments), for :func:`autotp.load` and
    :func:`autotp.materialize`.

    Raises:
        BuildError: the constructor returns something else than a module.
    """
    if any(isinstance(x, nn.Module) for x in (*args, *kwargs.values())):
        raise BuildError("on_meta takes a constructor and its arguments, not a module that is there already")
    args, kwargs = copy.deepcopy((args, kwargs))

    def construct() -> nn.Module:
        given, named = copy.deepcopy((args, kwargs))
        made: Any = constructor(*given, **named)
        if not isinstance(made, nn.Module):
            name = getattr(constructor, "__name__", str(constructor))
            raise BuildError(f"{name} returned a {type(made).__name__}, not a torch.nn.Module")
        return made

    model = meta_build.build(construct)
    _CONSTRUCTORS[model] = construct
    return model


def constructor_of(model: nn.Module) -> Constructor | None:
    """A function that builds the same model again, with the same starting values, if one is known."""
    if model not in _CONSTRUCTORS:
        found = _recovered(model, values=True)
        if found is None:
            return None
        _CONSTRUCTORS[model] = found
    return _CONSTRUCTORS[model]


# ---------------------------------------------------------------- buffers


@dataclass(frozen=True)
class Unfilled:
    """A buffer, or a tensor that is a plain attribute, without values."""

    path: str
    module: nn.Module
    name: str
    holder: dict[str, Any]

    @property
    def full_name(self) -> str:
        """Its name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        tensor: Tensor = self.holder[self.name]
        return tensor

    @property
    def steers(self) -> bool:
        """Whether its content matters for planning."""
        return not (self.tensor.is_floating_point() or self.tensor.is_complex())


def unfilled(model: nn.Module) -> list[Unfilled]:
    """The buffers and plain tensor attributes that are on meta."""
    return [
        Unfilled(path, module, name, holder)
        for path, module in model.named_modules()
        for holder in (module._buffers, module.__dict__)
        for name, x in holder.items()
        if isinstance(x, Tensor) and x.is_meta
    ]


def values_of_buffers(model: nn.Module, elsewhere: Collection[int] = ()) -> dict[int, Tensor]:
    """By the id of a buffer on meta: the value its constructor gives it, where that is known.

    Those whose ids are in `elsewhere` are not looked for.
    """
    values: dict[int, Tensor] = {}
    _rebuild(model, values, elsewhere)
    return values


def _rebuild(module: nn.Module, values: dict[int, Tensor], elsewhere: Collection[int]) -> None:
    """Whole first: the outermost constructor is the one that knows all."""
    wanted = [u for u in unfilled(module) if id(u.tensor) not in values and id(u.tensor) not in elsewhere]
    if not wanted:
        return
    construct = _CONSTRUCTORS.get(module) or _recovered(module, values=False)
    rebuilt = dict(meta_build.build(construct).named_modules()) if construct is not None else {}
    for u in wanted:
        made: Any = rebuilt.get(u.path)
        value = None if made is None else made._buffers.get(u.name, made.__dict__.get(u.name))
        if isinstance(value, Tensor) and not value.is_meta and value.shape == u.tensor.shape:
            values[id(u.tensor)] = value.detach().to(u.tensor.dtype)
    for child in module.children():
        _rebuild(child, values, elsewhere)


def buffers_of(model: nn.Module, elsewhere: Collection[int] = (), *, floats: bool = True) -> dict[int, Tensor]:
    """The values of all buffers on meta, except of those whose ids are in `elsewhere`.

    Raises:
        BuildError: one whose value cannot be had from a constructor. Without `floats`, only integers and booleans
            must be known: those steer the planning.
    """
    values = values_of_buffers(model, elsewhere)
    known = {*values, *elsewhere}
    lost = [u for u in unfilled(model) if id(u.tensor) not in known and (floats or u.steers)]
    if lost:
        more = f" (and {len(lost) - 1} others)" if len(lost) > 1 else ""
        raise BuildError(
            f"{lost[0].full_name} is on meta, and what it should hold is not known{more}: the arguments that "
            f"{type(lost[0].module).__name__} was built with cannot be told from the module. Build the model as "
            f"autotp.on_meta({type(model).__name__}, ...), or give the buffer its values yourself"
        )
    return values


def put_buffers(model: nn.Module, values: Mapping[int, Tensor], device: str) -> None:
    """Put these values in the place of buffers on meta, and all buffers that have values on `device`."""
    for u in unfilled(model):
        if id(u.tensor) in values:
            u.holder[u.name] = values[id(u.tensor)].to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device.type != device:
                module._buffers[name] = buffer.to(device)


@contextmanager
def with_buffers(model: nn.Module) -> Iterator[list[str]]:
    """Buffers on meta have their values for a while; gives the names of those that steer and have none."""
    values = values_of_buffers(model)
    kept = [(u, u.tensor) for u in unfilled(model)]
    try:
        for u, tensor in kept:
            u.holder[u.name] = values.get(id(tensor), tensor)
        yield [u.full_name for u, tensor in kept if id(tensor) not in values and u.steers]
    finally:
        for u, tensor in kept:
            u.holder[u.name] = tensor


# ---------------------------------------------------------------- constructors of modules built elsewhere


def _recovered(module: nn.Module, *, values: bool) -> Constructor | None:
    """The class of a module with the arguments it was built with, if these can be told; see the module docstring.

    With `values`, starting values of parameters must be certain too, otherwise only those of buffers.
    """
    cls = _class(module)
    found = _arguments(module, cls)
    if found is None:
        return None
    known, unknown = found
    default = torch.get_default_dtype()
    dtypes = [default, *(p.dtype for p in module.parameters() if p.dtype.is_floating_point and p.dtype != default)]
    # Built with another default dtype; or built as now, and moved to another dtype afterwards.
    for dtype, same_dtypes in (*((dtype, True) for dtype in dict.fromkeys(dtypes)), (default, False)):

        def construct(dtype: torch.dtype = dtype, **changed: Any) -> nn.Module:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                made: nn.Module = cls(**copy.deepcopy(known), **changed)
            finally:
                torch.set_default_dtype(before)
            return made

        rebuilt = _built(construct)
        if rebuilt is not None and _alike(rebuilt, module, same_dtypes):
            certain = all(_shows(construct, rebuilt, n, v, values) for n, v in unknown.items())
            return construct if certain else None
    return None


def _class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before fully_shard gave it another."""
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


def _arguments(module: nn.Module, cls: type) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Arguments of a class that a module has kept, and those that are left at their defaults; None if one is lost."""
    modeling = sys.modules.get("transformers.modeling_utils")
    by_config = modeling is not None and isinstance(module, modeling.PreTrainedModel)
    known: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    if inspect.signature(cls) == inspect.signature(nn.Module):
        return known, unknown
    for name, p in list(inspect.signature(cls).parameters.items()):
        if name in module.__dict__ and not isinstance(module.__dict__[name], (Tensor, nn.Module)):
            known[name] = module.__dict__[name]
        elif name in module._parameters and isinstance(p.default, bool):
            known[name] = module._parameters[name] is not None
        elif by_config and (p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)):
            continue  # transformers builds its models from their config alone
        elif p.default is p.empty:
            return None
        elif name not in ("device", "dtype") or p.default is not None:
            unknown[name] = p.default
    return known, unknown


def _built(construct: Constructor) -> nn.Module | None:
    try:
        return meta_build.build(construct)
    except Exception:  # the user's constructor, with arguments that are a guess
        return None


def _shows(construct: Any, rebuilt: nn.Module, name: str, default: Any, values: bool) -> bool:
    """Whether another value of an argument would have made a module that looks different.

    Only numbers are varied: a flag like ``pretrained`` may do anything.
    """
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return False
    for other in (default * 2, default + 1) if default else (default + 1,):
        varied = _built(lambda other=other: construct(**{name: other}))  # type: ignore[misc]
        if varied is not None:
            return not _alike(varied, rebuilt, True) or (not values and _same_buffers(varied, rebuilt))
    return False


def _same_buffers(a: nn.Module, b: nn.Module) -> bool:
    return all(
        x.is_meta == y.is_meta and (x.is_meta or torch.equal(x, y))
        for x, y in zip(a.buffers(), b.buffers(), strict=True)
    )


def _alike(made: nn.Module, model: nn.Module, same_dtypes: bool) -> bool:
    """Same classes, parameters and buffers; and what plain attributes `made` has, `model` has too."""
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (made, model))
    return list(ours) == list(theirs) and all(_alike_alone(ours[p], theirs[p], same_dtypes) for p in ours)


def _alike_alone(made: nn.Module, model: nn.Module, same_dtypes: bool) -> bool:
    def described(x: Tensor | None) -> Any:
        return x if x is None else (tuple(x.shape), x.dtype if same_dtypes else None)

    for ours, theirs in ((made._parameters, model._parameters), (made._buffers, model._buffers)):
        if {n: described(x) for n, x in ours.items()} != {n: described(x) for n, x in theirs.items()}:
            return False
    kept = {n: v for n, v in made.__dict__.items() if n not in _INTERNAL and _is_plain(v)}
    return _class(made) is _class(model) and all(n in model.__dict__ and model.__dict__[n] == kept[n] for n in kept)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)
