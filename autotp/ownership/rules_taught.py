"""Operations that a user has taught: the rule follows from a declaration of their dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotp.errors import RuleError
from autotp.ownership.claims import Trial, slot
from autotp.ownership.declaration import Declaration, covers, parse, spelled
from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import core, varies
from autotp.ownership.rules_dims import SHARED, Operand, argument, by_dims
from autotp.ownership.state import Count
from autotp.ownership.trials import mistake
from autotp.record import Op
from autotp.trees import Ref, flatten


@dataclass(frozen=True, kw_only=True)
class OpView:
    """One call of an operation, for a rule that is a function.

    ``shapes``: of its tensor arguments by name, ``results``: of what it returns, ``arguments``: all others by name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    results: tuple[tuple[int, ...], ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """What ``register_rule`` was told about one operation."""

    name: str
    rule: str | Callable[[OpView], str]
    counts: Mapping[str, str] = field(default_factory=dict)
    check: bool = True


@dataclass(frozen=True)
class _Named:
    """A declaration with a name for every dim of every tensor that is there."""

    text: str
    tids: tuple[int, ...]
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    cut: frozenset[str]
    sums: frozenset[str]
    sizes: Mapping[str, int]


def taught(own: Ownership, op: Op, teaching: Teaching) -> None:
    """Carry owners through an operation as its declaration says."""
    named = _names(own, op, teaching)
    if teaching.check:
        _check(own, op, named, teaching)
    _count(own, op, named, teaching)
    if named.sums and _sum(own, op, named):
        return
    letters = list(named.sizes)
    frame = tuple(named.sizes.values())
    operands = [
        Operand(t, tuple(letters.index(n) if own.shape(t)[d] == named.sizes[n] else None for d, n in enumerate(names)))
        for t, names in zip(named.tids, named.operands, strict=True)
    ]
    results = [tuple(letters.index(n) for n in names) for names in named.results]
    by_dims(own, op, operands, [letters.index(n) for n in named.cut], results, frame)


def _names(own: Ownership, op: Op, teaching: Teaching) -> _Named:
    tensors = _tensor_arguments(op)
    view = OpView(
        shapes={n: own.shape(t) for n, t in tensors.items() if t is not None},
        results=tuple(own.shape(t) for t in op.outs if t >= 0),
        arguments={
            a.name: argument(op, a.name) for a in op.func._schema.arguments if a.name not in tensors
        },
    )  # fmt: skip
    text = teaching.rule if isinstance(teaching.rule, str) else teaching.rule(view)
    if not isinstance(text, str):
        raise RuleError(f"{teaching.name}: the rule must give a declaration, a text; it gave {text!r}")
    d = parse(text, teaching.name)
    if len(d.operands) != len(tensors) or len(d.results) != len(op.outs):
        raise RuleError(
            f'{teaching.name}: "{text}" has {len(d.operands)} operands and {len(d.results)} results, the operation has '
            f"{len(tensors)} tensor arguments and returns {len(op.outs)}"
        )
    there = [(t, names) for t, names in zip(tensors.values(), d.operands, strict=True) if t is not None]
    return _sized(own, op, teaching, d, there)


def _tensor_arguments(op: Op) -> dict[str, int | None]:
    """Tensor arguments by name, in the order of the schema; None for those left out."""
    out: dict[str, int | None] = {}
    for a in op.func._schema.arguments:
        if "Tensor" in str(a.type):
            x = argument(op, a.name)
            out[a.name] = x.tid if isinstance(x, Ref) else None
    return out


def _sized(
    own: Ownership, op: Op, teaching: Teaching, d: Declaration, there: list[tuple[int, tuple[str, ...]]]
) -> _Named:
    where, sizes = teaching.name, dict[str, int]()
    groups = [(t, names, True) for t, names in there] + [
        (t, names, False) for t, names in zip(op.outs, d.results, strict=True)
    ]
    spelt = [spelled(names, len(own.shape(t)), where, d.text) for t, names, _ in groups]
    for (t, _, may_broadcast), names in zip(groups, spelt, strict=True):
        for name, n in zip(names, own.shape(t), strict=True):
            known = sizes.get(name, 1)
            if known != n and 1 not in (known, n if may_broadcast else 0):
                raise RuleError(f'{where}: in "{d.text}", {name!r} is {known} and {n} in one call')
            sizes[name] = max(known, n)
    known_names = list(sizes)
    k = len(there)
    return _Named(
        d.text, tuple(t for t, _ in there), tuple(spelt[:k]), tuple(spelt[k:]),
        frozenset(covers(d.cut, known_names)), frozenset(covers(d.sums, known_names)), sizes,
    )  # fmt: skip


# ---------------------------------------------------------------- is it so?


def _check(own: Ownership, op: Op, named: _Named, teaching: Teaching) -> None:
    """Try a declaration on small tensors; a wrong one is refused."""
    for name in sorted(named.cut | named.sums):
        if named.sizes[name] < 2:
            continue
        trial = _trial(own, op, named, name, teaching)
        why = mistake(trial)
        if why:
            clause = "sum" if name in named.sums else "cut"
            raise RuleError(
                f'{teaching.name}: the declaration "{named.text}" does not hold for "{clause} {name}": '
                f"{why}. "
                "Take the name out of the clause; or pass check=False if the operation cannot be tried on the CPU."
            )


def _trial(own: Ownership, op: Op, named: _Named, name: str, teaching: Teaching) -> Trial:
    leaves, spec = flatten((op.args, op.kwargs))
    slots, dims = [], []
    for i, x in enumerate(leaves):
        if isinstance(x, Ref):
            slots.append(slot(own.trace, i, x.tid))
            names = named.operands[named.tids.index(x.tid)]
            at = names.index(name) if name in names else None
            dims.append(at if at is not None and own.shape(x.tid)[at] == named.sizes[name] else None)
    results = tuple(names.index(name) if name in names else None for names in named.results)
    counted = [a for a, n in teaching.counts.items() if n == name]
    places = tuple(i for i, a in enumerate(_leaf_names(op)) if a in counted)
    return Trial(
        op.func, tuple(leaves), spec, tuple(slots), tuple(dims), results, name in named.sums, places, asked=True
    )


def _leaf_names(op: Op) -> list[str]:
    """The argument that each leaf of an operation's arguments belongs to."""
    out: list[str] = []
    for i, x in enumerate(op.args):
        out += [op.func._schema.arguments[i].name] * len(flatten(x)[0])
    for name, x in op.kwargs.items():
        out += [name] * len(flatten(x)[0])
    return out


# ---------------------------------------------------------------- counts and sums


def _count(own: Ownership, op: Op, named: _Named, teaching: Teaching) -> None:
    """Numbers that count a dim count a rank's part of it, should it be cut."""
    found = []
    for arg, name in teaching.counts.items():
        value = argument(op, arg)
        for t, names in zip(named.tids, named.operands, strict=True):
            if name in names and isinstance(value, int) and own.shape(t)[names.index(name)] > 1:
                found.append(Count(value, names.index(name), t, arg))
                break
    if found:
        own.scaled[op.call] = tuple(found)


def _sum(own: Ownership, op: Op, named: _Named) -> bool:
    """A cut along a dim that is summed over: the result is a partial sum."""
    for name in sorted(named.sums):
        having = {t: names.index(name) for t, names in zip(named.tids, named.operands, strict=True) if name in names}
        owned = {t: o for t in having if (o := own.owners(t)) is not None}
        flat = [_only(o, having[t]) for t, o in owned.items()]
        others = [t for t in named.tids if t not in having and own.owners(t) is not None]
        if not flat or any(f is None for f in flat) or others:
            continue
        first = flat[0]
        assert first is not None
        if any(not own.merge(first, f) for f in flat[1:] if f is not None):
            continue
        rest = [t for t in having if t not in owned]
        if all(_join(own, t, having[t], first) for t in rest):
            for t in having:
                own.want(t, "own")
            for t in named.tids:
                if t not in having:
                    own.note(t, SHARED)
                    own.want(t)
            own.partial[op.outs[0]] = -1
            own.put(op, None)
            return True
    return False


def _only(o: Any, dim: int) -> Any:
    c = core(o)
    return c.reshape(-1) if varies(o, dim) and c.numel() == c.shape[dim] else None


def _join(own: Ownership, tid: int, dim: int, owners: Any) -> bool:
    """Cut a still open parameter along a summed dim with what it meets there."""
    w = own.open_weights(tid)
    if w is None:
        return False
    own.role(w, dim, "in")
    for choice in own.options(w, dim):
        if own.merge(owners, choice[0].nodes):
            own.settle(w, dim, choice)
            return True
    return False
