"""Operations that treat every index of some dims on its own: cut along those dims, an operation on the parts gives
the parts of its result.

A rule names, for every operand and every dim of it, the dim of the result that it becomes (its *place*), and which
places are *free*. Along free places owners pass and parameters are cut with them; along all others nothing is cut. A
free place that only parameters have (the output features of a linear map) begins a cut, as a column cut does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.ownership.room import make_room
from autotp.ownership.rules_pointwise import agreeing
from autotp.ownership.state import Owned, Vec, Weights
from autotp.record import Op

Places = Sequence[int | None]
SHARED = "is shared by everything that is cut where it is used, so its gradient is summed over the ranks"


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation reads, and where each of its dims is in the result."""

    tid: int
    places: tuple[int | None, ...]


def argument(op: Op, name: str) -> Any:
    """An argument of an operation by its name in the schema; its default where left out, None where there is none."""
    for i, a in enumerate(op.func._schema.arguments):
        if a.name == name:
            default = a.default_value if a.has_default_value() else None
            return op.args[i] if i < len(op.args) else op.kwargs.get(name, default)
    return None


def aligned(own: Ownership, tid: int, shape: Sequence[int]) -> Operand:
    """An operand that is broadcast against the result from the right."""
    mine = own.shape(tid)
    shift = len(shape) - len(mine)
    return Operand(tid, tuple(d + shift if n == shape[d + shift] else None for d, n in enumerate(mine)))


def by_dims(
    own: Ownership,
    op: Op,
    operands: Sequence[Operand],
    free: Iterable[int],
    results: Sequence[Places | None] | None = None,
    frame: tuple[int, ...] | None = None,
    against: str = "",
) -> None:
    """Carry owners through an operation that treats every index of the ``free`` places on its own.

    Args:
        operands: the operands that may be cut; others of the operation are asked for whole.
        free: places along which every index is on its own.
        results: for every result, which place each of its dims is, or None for one that is the same whatever is cut
            (left out: all are shaped like the frame).
        frame: the sizes of the places (left out: the shape of the first result).
        against: what speaks against other places, if that is known, for the reasons in the plan.
    """
    shape = frame if frame is not None else own.shape(op.outs[0])
    results = _live(own, op, results if results is not None else [range(len(shape))] * len(op.outs))
    allowed = {r for r in free if shape[r] > 1 and all(r in p for p in results if p is not None)}
    rest = [t for t in dict.fromkeys(op.ins) if t not in {x.tid for x in operands}]
    if any(own.owners(t) is not None for t in rest):
        return own.all_whole(op, f"op {op.func} is given a cut tensor where it needs a whole one")
    if op.writes and own.owners(op.writes[0]) is None:
        for x in operands:
            o = own.owners(x.tid)
            o = own.merge_along(o, [d for d, r in enumerate(x.places) if r not in allowed]) if o is not None else None
            if o is not None and o.numel():
                make_room(own, op.writes[0], _framed(o, x.places, allowed, shape))
        return own.all_whole(op, f"{op.func.overloadpacket} writes into a whole tensor")
    for t in rest:
        own.want(t)
    if not rest and _only_weights(own, operands) and not op.writes:
        return _weights(own, op, operands, allowed, results)
    acc = _owners(own, op, operands, allowed, shape, against)
    if acc is None:
        for x in operands:
            own.whole(x.tid, f"goes through {op.func.overloadpacket} with other whole tensors")
        for i in range(len(op.outs)):
            own.put(op, None, i)
        return None
    for x in operands:
        if own.open_weights(x.tid) is not None and not cut_with(own, x, acc):
            own.note(x.tid, SHARED)
    for x in operands:
        own.want(x.tid, "as", _alike(op, x, allowed, results))
    for i, (t, places) in enumerate(zip(op.outs, results, strict=True)):
        own.put(op, Owned(_at(acc, places, own.shape(t))) if places is not None else None, i)
    return None


def _live(own: Ownership, op: Op, results: Sequence[Places | None]) -> list[Places | None]:
    """Results that are not there, or empty, have no part in it."""
    pairs = zip(op.outs, results, strict=True)
    return [p if t >= 0 and 0 not in own.shape(t) else None for t, p in pairs]


def _only_weights(own: Ownership, operands: Sequence[Operand]) -> bool:
    states = [own.states.get(x.tid) for x in operands]
    constant = [s is None and not own.trace.tensors[x.tid].grad for s, x in zip(states, operands, strict=True)]
    weights = [isinstance(s, Weights) for s in states]
    return any(weights) and all(w or c for w, c in zip(weights, constant, strict=True))


def _weights(
    own: Ownership, op: Op, operands: Sequence[Operand], free: set[int], results: Sequence[Places | None]
) -> None:
    """What is computed from parameters alone is still a weight."""
    vecs: list[Vec] = []
    params: frozenset[int] = frozenset()
    for x in operands:
        s = own.states.get(x.tid)
        if isinstance(s, Weights):
            params |= s.params
            placed = [(v, x.places[v.dim]) for v in s.vecs]
            vecs += [Vec(v.param, v.param_dim, r, v.nodes) for v, r in placed if r is not None and r in free]
        own.want(x.tid, "as", _alike(op, x, free, results))
    kept = agreeing(own, vecs)
    for i, places in enumerate(results):
        at = {r: d for d, r in enumerate(places or ()) if r is not None}
        here = tuple(Vec(v.param, v.param_dim, at[v.dim], v.nodes) for v in kept if v.dim in at)
        own.put(op, Weights(here, params) if op.outs[i] >= 0 else None, i)


def _owners(
    own: Ownership, op: Op, operands: Sequence[Operand], free: set[int], shape: tuple[int, ...], against: str
) -> Tensor | None:
    """What all operands agree on, in the frame of the result; None if nothing is or can be cut."""
    met: list[tuple[int, Tensor]] = []
    for x in operands:
        o = own.owners(x.tid)
        if o is None:
            continue
        merged = own.merge_along(o, [d for d, r in enumerate(x.places) if r not in free])
        if merged is None:
            along = f"{op.func.overloadpacket} works along a dim of it, where it would be cut"
            own.whole(x.tid, f"op {op.func} has no rule there{against}" if against else along)
        elif any(varies(merged, d) for d in range(merged.ndim)):
            met.append((x.tid, _framed(merged, x.places, free, shape)))
    acc = _meet(own, op, met)
    if acc is None:
        return _begin(own, operands, free, shape)
    if own.is_loose(acc) and any(_would_slice(own, op, x, acc) for x in operands):
        for t, _ in met:
            own.whole(t, "meets a whole activation, and nothing else needs it cut")
        return None
    return acc


def _framed(o: Tensor, places: Places, free: set[int], shape: tuple[int, ...]) -> Tensor:
    """Owners of an operand in the frame of the result."""
    for d in reversed(range(o.ndim)):
        if places[d] not in free:
            o = o.select(d, 0)
    kept = [r for r in places if r in free]
    order = sorted(range(len(kept)), key=lambda i: kept[i] or 0)
    o = o.permute(order)
    for r in range(len(shape)):
        if r not in kept:
            o = o.unsqueeze(r)
    return o.expand(shape)


def _at(acc: Tensor, places: Places, shape: tuple[int, ...]) -> Tensor:
    """Owners in the frame as those of one result."""
    missing = [r for r in range(acc.ndim) if r not in places]
    for r in reversed(missing):
        acc = acc.select(r, 0)
    left = [r for r in places if r is not None]
    acc = acc.permute([sorted(left).index(r) for r in left])
    for d, place in enumerate(places):
        if place is None:
            acc = acc.unsqueeze(d)
        elif shape[d] != acc.shape[d]:
            acc = acc.narrow(d, 0, 1)
    return acc.expand(shape)


def _meet(own: Ownership, op: Op, met: list[tuple[int, Tensor]]) -> Tensor | None:
    acc, behind = None, []
    for t, o in met:
        if acc is None:
            acc, behind = o, [t]
        elif own.merge(acc, o):
            behind.append(t)
            acc = own.nodes.canonical(acc)
        elif own.first_yields(o, acc) and t not in op.writes:
            own.whole(t, "meets a tensor that is cut otherwise")
        else:
            for b in behind:
                own.whole(b, "meets a tensor that is cut otherwise")
            acc, behind = o, [t]
    return None if acc is None else own.nodes.canonical(acc)


def _begin(own: Ownership, operands: Sequence[Operand], free: set[int], shape: tuple[int, ...]) -> Tensor | None:
    """A column cut: along a place that no activation has."""
    taken = {r for x in operands if own.open_weights(x.tid) is None for r in x.places}
    for x in operands:
        w = own.open_weights(x.tid)
        for d, r in enumerate(x.places) if w is not None else ():
            if w is not None and r is not None and r in free and r not in taken:
                own.role(w, d, "out")
                v = own.settle(w, d)
                if v is not None:
                    view = [1] * len(shape)
                    view[r] = -1
                    return v.nodes.view(view).expand(shape)
    return None


def _would_slice(own: Ownership, op: Op, x: Operand, acc: Tensor) -> bool:
    """Whether a whole activation (not a constant) would have to be sliced to meet these owners."""
    whole = own.states.get(x.tid) is None and own.trace.tensors[x.tid].grad and not op.writes
    return whole and any(r is not None and varies(acc, r) for r in x.places)


def cut_with(own: Ownership, x: Operand, acc: Tensor) -> bool:
    """Cut a still open parameter along a place that is cut."""
    w = own.open_weights(x.tid)
    for d, r in enumerate(x.places) if w is not None else ():
        if w is None or r is None or not varies(acc, r):
            continue
        for choice in own.options(w, d):
            view = [1] * acc.ndim
            view[r] = -1
            if own.merge(acc, choice[0].nodes.view(view).expand(acc.shape)):
                own.settle(w, d, choice)
                return True
    return False


def _alike(op: Op, x: Operand, free: set[int], results: Sequence[Places | None]) -> dict[int, tuple[int, int] | Tensor]:
    """The dims of an operand that are cut as the first live result is."""
    i = next((i for i, p in enumerate(results) if p is not None), None)
    if i is None:
        return {}
    at = {r: d for d, r in enumerate(results[i] or ()) if r is not None}
    return {d: (op.outs[i], at[r]) for d, r in enumerate(x.places) if r is not None and r in free}
