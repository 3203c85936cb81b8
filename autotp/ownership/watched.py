"""One run of an operation, watched: what it does besides computing its results from its arguments.

Of a custom autograd function the backward runs too. What is looked for would make trials on small tensors lie, or would
not be the same on a rank's part: writes, draws, state kept between runs, tensors read from elsewhere, branches on
computed values.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import torch_ops
from autotp.functions import FunctionOp
from autotp.structures import differentiable

TRUSTED = {"aten", "prims", "torchvision", "torchaudio"}
MAX_DEPTH = 5
MAX_ITEMS = 1000


class Impure(Exception):
    """An operation with effects besides its result."""


def watched(func: Any, call: Callable[[Sequence[Tensor]], list[Any]], tensors: list[Tensor], asked: bool) -> list[Any]:
    """What an operation gives: its results and, of a custom autograd function, its gradients.

    Args:
        asked: the user wants it tried: it may run operations of others, and go by computed values.

    Raises:
        Impure: it does something else besides.
    """
    if not isinstance(func, FunctionOp):
        return call(tensors)
    given = [x.detach().clone().requires_grad_(differentiable(x)) for x in tensors]
    before = _outside(func.function)
    with _Watch(given, asked) as watch:
        results = call(given)
        outs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
        incoming = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view(y.shape) for y in outs]
        kept = [w.clone() for w in incoming]
        watch.give(incoming)
        watch.where = "its backward"
        gradients = _gradients(outs, [x for x in given if x.requires_grad], incoming)
    if _outside(func.function) != before:
        raise Impure("it changes what is kept outside of it")
    if not all(torch.equal(a, b) for a, b in zip(incoming, kept, strict=True)):
        raise Impure("its backward writes into what it is given")
    if watch.found:
        raise Impure(watch.found)
    return [x.detach() if isinstance(x, Tensor) else x for x in (*results, *gradients)]


def _gradients(outs: list[Tensor], inputs: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
    if not outs or not inputs:
        return []
    try:
        found = torch.autograd.grad(outs, inputs, incoming, allow_unused=True)
    except Exception as e:
        raise Impure(f"its backward cannot be run on small tensors ({type(e).__name__}: {e})") from e
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


class _Watch(TorchDispatchMode):
    """Follows the memory that a run makes; ``found`` is the first thing that speaks against it."""

    def __init__(self, given: Iterable[Tensor], asked: bool) -> None:
        super().__init__()
        self.asked, self.where, self.found = asked, "it", ""
        self.kept: list[Tensor] = []  # so that no memory is used twice
        self.given: set[int] = set()
        self.known: set[int] = set()
        self.give(given)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """These are the operation's to read."""
        for x in tensors:
            self.given.add(self._know(x))

    def _know(self, x: Tensor) -> int:
        self.kept.append(x)
        self.known.add(_memory(x))
        return _memory(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = self._against(func, args, kwargs)
        self.found = self.found or (why and f"{self.where} {why}")
        out = func(*args, **kwargs)
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self._know(x)
        return out

    def _against(self, func: Any, args: Any, kwargs: Any) -> str:
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = {_memory(x) for x in torch_ops.written_args(func, args, kwargs)}
        if torch_ops.is_random(func):
            return "draws random numbers"
        if written & self.given:
            return "writes into what it is given"
        if written - self.known:
            return "writes into a tensor that is kept outside of it"
        if func is not torch.ops.aten.lift_fresh.default and any(
            x.numel() > 1 and _memory(x) not in self.known for x in tensors
        ):
            return "reads a tensor that is not among its arguments"
        if not self.asked and func.namespace not in TRUSTED:
            return f"runs {func}, of which nothing is known"
        if not self.asked and torch.Tag.data_dependent_output in func.tags:
            return "goes by values that it computes"
        return ""


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


# ---------------------------------------------------------------- what is kept in Python


def _outside(function: type[torch.autograd.Function]) -> Any:
    """What the code of a function can reach by names, as something to compare."""
    seen = _Seen(function.__module__)
    return [
        seen.items((k, v) for k, v in vars(c).items() if not k.startswith("__"))
        for c in function.__mro__
        if c.__module__ != torch.autograd.Function.__module__ and c is not object
    ]


class _Seen:
    """Values as something to compare, a few steps deep; ``home`` is the module whose functions are looked into."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.on_the_way: set[int] = set()

    def items(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        """Of what has names."""
        return [(str(k), self.value(v)) for k, v in itertools.islice(pairs, MAX_ITEMS)]

    def value(self, x: Any) -> Any:
        """Of anything."""
        if isinstance(x, (type(None), bool, int, float, complex, str, bytes)):
            return x
        if isinstance(x, Tensor):
            return id(x), x._version
        if id(x) in self.on_the_way or len(self.on_the_way) >= MAX_DEPTH:
            return id(x)
        self.on_the_way.add(id(x))
        try:
            return self._inside(x)
        finally:
            self.on_the_way.discard(id(x))

    def _inside(self, x: Any) -> Any:
        if isinstance(x, (staticmethod, classmethod)):
            return self.value(x.__func__)
        if isinstance(x, types.FunctionType):
            return id(x), self.items(_names_of(x, self.home))
        if isinstance(x, (types.ModuleType, type, types.BuiltinFunctionType)):
            return id(x)
        if isinstance(x, dict):
            return len(x), self.items(x.items())
        if isinstance(x, (list, tuple, set, frozenset, deque)):
            return len(x), [self.value(y) for y in itertools.islice(x, MAX_ITEMS)]
        return id(x), self.items(getattr(x, "__dict__", {}).items())


def _names_of(f: types.FunctionType, home: str) -> Iterator[tuple[str, Any]]:
    """What a function reads by name: globals, if it is of the module ``home``, and what it encloses."""
    f = inspect.unwrap(f)
    names = f.__code__.co_names if f.__module__ == home else ()
    yield from ((n, f.__globals__[n]) for n in names if n in f.__globals__)
    enclosed = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    yield from ((n, cell.cell_contents) for n, cell in enclosed if not _empty(cell))


def _empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


__all__ = ["TRUSTED", "Impure", "watched"]
