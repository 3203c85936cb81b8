"""How a model was built, so that it can be built again: for values that only its constructor knows.

    model = autotp.on_meta(LlamaForCausalLM, config)

remembers the constructor; of others it is found where that can be done with certainty (:mod:`autotp.recovering`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from autotp import meta_build
from autotp.errors import BuildError
from autotp.recovering import Constructor, copied, recovered

_CONSTRUCTORS: WeakKeyDictionary[nn.Module, Constructor] = WeakKeyDictionary()


def on_meta(constructor: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """``constructor(*args, **kwargs)`` with its parameters on meta, where they take no memory, and real buffers.

    The constructor is remembered (with a copy of its arguments), for :func:`autotp.load` and
    :func:`autotp.materialize`.

    Raises:
        BuildError: the constructor returns something else than a module.
    """
    if any(isinstance(x, nn.Module) for x in (*args, *kwargs.values())):
        raise BuildError("on_meta takes a constructor and its arguments, not a module that is there already")
    kept = copied((args, kwargs))

    def construct() -> nn.Module:
        given, named = copied(kept)
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
        found = recovered(model, values=True)
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
    construct = _CONSTRUCTORS.get(module) or recovered(module, values=False)
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
