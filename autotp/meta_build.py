"""Run a model's constructor so that its parameters take no memory.

Plain ``torch.device("meta")`` would also empty the buffers. Those often decide the plan (relative position indices,
masks, position ids), and constructors read small tensors back with ``.item()``. So here only *parameters* go to meta,
at the moment they are registered; a tensor too large to be anything else is born there.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

LARGE = 1 << 22  # elements; smaller tensors are cheap to make for real, and devices then never mix
REAL_LIMIT = 4 << 30  # bytes of parameters up to which a model may be built on CPU when it insists on real values

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


def build(constructor: Callable[[], T]) -> T:
    """Return ``constructor()`` with every parameter on meta and buffers holding real values.

    A constructor that mixes the two kinds, or reads its own weights, is run again on CPU if it is small enough, else
    under plain ``torch.device("meta")``; the first failure is the one raised.
    """
    counter = _Counter()
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            with _parameters_on_meta(counter):
                return _finished(constructor())
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            if not counter.parameters:
                raise
            return _build_otherwise(constructor, counter.bytes, error)


def _build_otherwise(constructor: Callable[[], T], bytes_seen: int, first: Exception) -> T:
    try:
        if bytes_seen <= REAL_LIMIT:
            return _finished(constructor())
        with torch.device("meta"):
            return constructor()
    except Exception:
        raise first from None


def _finished(built: T) -> T:
    """`built` with whatever parameter was not registered in the usual way moved too."""
    for part in built if isinstance(built, tuple) else (built,):
        if isinstance(part, nn.Module):
            parameters_to_meta(part)
    return built


def parameters_to_meta(model: nn.Module) -> None:
    """Move the parameters of `model` to meta in place; tied ones stay tied and buffers stay real."""
    memo: dict[int, nn.Parameter] = {}
    keep = list(model.parameters())  # ids stay unique only while the objects live
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _movable(parameter):
                key = id(parameter)
                if key not in memo:
                    memo[key] = _on_meta(parameter)
                module._parameters[name] = memo[key]
    del keep


class _Counter:
    """What a constructor has registered so far."""

    def __init__(self) -> None:
        self.parameters = 0
        self.bytes = 0

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters += 1
        self.bytes += parameter.numel() * parameter.element_size()


class _LargeOnMeta(TorchFunctionMode):
    """Tensors of more than `LARGE` elements are created on meta unless the caller names a device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None and _numel(args, kwargs) > LARGE:
            kwargs = {**kwargs, "device": "meta"}
            kwargs.pop("generator", None)  # belongs to another device, and nothing is drawn
        return func(*args, **kwargs)


def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    size = kwargs.get("size")
    if size is None:
        size = next((a for a in args if isinstance(a, (tuple, list, torch.Size))), None)
    if size is None:
        size = [a for a in args if isinstance(a, int)]
    try:
        return math.prod(int(n) for n in size)
    except (TypeError, ValueError):
        return 0


@contextmanager
def _parameters_on_meta(counter: _Counter) -> Iterator[None]:
    """Every plain `nn.Parameter` is replaced by one on meta when a module registers it."""
    original = nn.Module.register_parameter
    # Keyed by id and holding the original, so that one Parameter under two names stays one Parameter.
    memo: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and _movable(param):
            if id(param) not in memo:
                memo[id(param)] = (param, _on_meta(param))
            param = memo[id(param)][1]
            counter.add(param)
        elif param is not None and param.is_meta:
            counter.add(param)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _movable(parameter: nn.Parameter) -> bool:
    # Lazy and quantised parameters are classes of their own, with data that means more than its shape.
    return type(parameter) is nn.Parameter and not parameter.is_meta


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    moved = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    moved.__dict__.update(parameter.__dict__)
    return moved


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about meta tensors, and no walk of transformers over weights that have no values."""
    modeling = sys.modules.get("transformers.modeling_utils")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if modeling is None:
            yield
            return
        original = modeling.PreTrainedModel.initialize_weights
        modeling.PreTrainedModel.initialize_weights = lambda self: None
        try:
            yield
        finally:
            modeling.PreTrainedModel.initialize_weights = original
