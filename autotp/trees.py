"""Nested Python arguments as a flat list of leaves, slices included, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Ref(NamedTuple):
    """Stands for a tensor in recorded arguments."""

    tid: int


_LEAVES = (int, float, str, type(None))
Build = Callable[[list[Any]], Any]


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves in order, and a spec for :func:`rebuild`. Tuples, lists, dicts, slices and dataclasses are opened."""
    leaves: list[Any] = []
    return leaves, _walk(tree, leaves)


def _walk(x: Any, leaves: list[Any]) -> Any:
    if isinstance(x, Ref):
        leaves.append(x)
        return None
    if isinstance(x, _LEAVES):
        leaves.append(x)
        return None
    if isinstance(x, (tuple, list)):
        return (type(x), [_walk(y, leaves) for y in x])
    if isinstance(x, dict):
        return (type(x), list(x), [_walk(y, leaves) for y in x.values()], x)
    if isinstance(x, slice):
        return (slice, [_walk(y, leaves) for y in (x.start, x.stop, x.step)])
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [f.name for f in dataclasses.fields(x) if hasattr(x, f.name)]
        return ("dataclass", x, names, [_walk(getattr(x, n), leaves) for n in names])
    leaves.append(x)
    return None


def rebuild(leaves: list[Any], spec: Any) -> Any:
    """The inverse of :func:`flatten`, with other leaves."""
    it = iter(leaves)
    return _build(spec, it)


def _build(spec: Any, it: Any) -> Any:
    if spec is None:
        return next(it)
    kind = spec[0]
    if kind == "dataclass":
        return _build_dataclass(spec, it)
    if len(spec) == 4:
        return _build_dict(spec, it)
    items = [_build(s, it) for s in spec[1]]
    if kind is slice:
        return slice(*items)
    if hasattr(kind, "_fields"):
        return kind(*items)
    try:
        return kind(items)
    except TypeError:  # torch.return_types and torch.Size with traced integers
        return tuple(items)


def _build_dict(spec: Any, it: Any) -> Any:
    kind, keys, subs, original = spec
    items = dict(zip(keys, [_build(s, it) for s in subs], strict=True))
    if kind is dict:
        return items
    import copy

    out = copy.copy(original)
    for k, v in items.items():
        out[k] = v
    return out


def _build_dataclass(spec: Any, it: Any) -> Any:
    _, original, names, subs = spec
    values = [_build(s, it) for s in subs]
    if all(v is getattr(original, n) for n, v in zip(names, values, strict=True)):
        return original
    import copy

    out = copy.copy(original)
    for n, v in zip(names, values, strict=True):
        object.__setattr__(out, n, v)
    return out


def key_paths(tree: Any) -> list[tuple[Any, ...]]:
    """A path of keys for every leaf, in the order of :func:`flatten`."""
    out: list[tuple[Any, ...]] = []
    _paths(tree, (), out)
    return out


def _paths(x: Any, at: tuple[Any, ...], out: list[tuple[Any, ...]]) -> None:
    if isinstance(x, Ref):
        out.append(at)
    elif isinstance(x, (tuple, list)):
        for i, y in enumerate(x):
            _paths(y, (*at, i), out)
    elif isinstance(x, dict):
        for k, y in x.items():
            _paths(y, (*at, k), out)
    elif isinstance(x, slice):
        for k in ("start", "stop", "step"):
            _paths(getattr(x, k), (*at, k), out)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for f in dataclasses.fields(x):
            if hasattr(x, f.name):
                _paths(getattr(x, f.name), (*at, f.name), out)
    else:
        out.append(at)


def edit_at(tree: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The tree with the leaf at a key path changed; a path that is not there leaves it as it is."""
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    if isinstance(tree, (tuple, list)):
        if not isinstance(key, int) or key >= len(tree):
            return tree
        items = [edit_at(x, rest, change) if i == key else x for i, x in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        if key not in tree:
            return tree
        new = edit_at(tree[key], rest, change)
        if type(tree) is dict:
            return {**tree, key: new}
        tree[key] = new
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and hasattr(tree, key):
        setattr(tree, key, edit_at(getattr(tree, key), rest, change))
    return tree


def kinds(module: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What steers a forward's Python: which arguments are given, flags, mode. Numbers and tensors count by type."""
    given = [*enumerate(args), *kwargs.items()]
    return (module.training, *((k, _kind(x)) for k, x in given))


def _kind(x: Any) -> Any:
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, (tuple, list)):
        return type(x), *(_kind(y) for y in x)
    return "tensor" if hasattr(x, "dtype") and hasattr(x, "shape") else type(x)
