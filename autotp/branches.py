"""What a module's code branches on: the reasons why it may take another path than the one that was planned.

A branch on attributes of the module, on globals or on whether an argument is given is known by values that can be
compared before each call; one on anything else (computed values, what a helper returns) may go either way at any call.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autotp.conditions import Code, Source, tested

_LEAVES = (types.FunctionType, types.ModuleType, type, Tensor)  # not objects whose methods a forward would call


@dataclass(frozen=True)
class Branches:
    """What decides on the path of a module's ``code`` beside its arguments; ``open`` if that is not known."""

    sources: tuple[Source, ...]
    open: bool
    code: frozenset[types.CodeType]

    def facts(self, module: nn.Module) -> tuple[Any, ...]:
        """What is compared between calls."""
        try:
            return tuple(source.fact(module) for source in self.sources)
        except LookupError as unknown:  # it became something else
            return (unknown,)

    def open_with(self, code: Iterable[types.CodeType]) -> bool:
        """Whether it is not known either if this code runs too."""
        return self.open or any(tested(Code(c)) for c in code if c not in self.code)


def branches_of(module: nn.Module) -> Branches:
    """The branches in a module's forward, and in the methods and functions that it names."""
    forward = getattr(module.forward, "__func__", module.forward)
    if not isinstance(forward, types.FunctionType):
        return Branches((), True, frozenset())
    reached = list(_reached(module, forward))
    tests = [sources for own in reached for sources in tested(own)]
    known = all(sources is not None and all(_comparable(s, module) for s in sources) for sources in tests)
    kept = [Source(None, (n,), False) for own in reached for n in own.code.co_names if n in module.__dict__]
    called = [source for source in kept if callable(module.__dict__[source.names[0]]) and _comparable(source, module)]
    sources = dict.fromkeys([*called, *(s for sources in tests for s in sources or ())])
    return Branches(tuple(sources) if known else (), not known, frozenset(own.code for own in reached))


def _comparable(source: Source, module: nn.Module) -> bool:
    try:
        source.fact(module)
    except LookupError:
        return False
    return True


def _reached(module: nn.Module, forward: types.FunctionType) -> Iterator[Code]:
    """The forward's code and that of what it names, itself or by way of others; torch's own is left out."""
    todo: list[tuple[Any, bool]] = [(forward, True)]
    seen: set[types.FunctionType] = set()
    while todo:
        function, method = todo.pop()
        if not isinstance(function, types.FunctionType) or function in seen or _of_torch(function):
            continue
        seen.add(function)
        code = function.__code__
        own_name = code.co_varnames[0] if method and code.co_argcount else None
        yield Code(code, function, own_name, function is forward)
        inner = list(_nested(code))
        yield from (Code(c, function) for c in inner)
        names = {n for c in (code, *inner) for n in c.co_names}
        scopes = [function.__globals__, module.__dict__]
        found = [x for scope in scopes for x in map(scope.get, names) if x is not None]
        scopes += [x.__dict__ for x in found if isinstance(x, types.ModuleType)]
        todo += [(f, False) for scope in scopes for f in map(scope.get, names)]
        objects = [type(x) for x in found if not isinstance(x, (nn.Module, *_LEAVES))]
        todo += [
            (f, cls in type(module).__mro__)
            for cls in (*type(module).__mro__, *_all(objects))
            for n in names
            for f in _functions(cls.__dict__.get(n))
        ]
        todo += [(f, True) for cell in function.__closure__ or () for f in _functions(_content(cell))]


def _all(classes: list[type]) -> Iterator[type]:
    for cls in classes:
        yield from cls.__mro__


def _of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _functions(x: Any) -> list[Any]:
    if isinstance(x, property):
        return [x.fget]
    return [getattr(x, "__func__", x)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _nested(constant)
