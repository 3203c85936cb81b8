"""Experts dealt out to the ranks: where values begin of which each rank computes the rows of its own experts.

Weights of experts are ``[experts, ...]``. By choice only (style ``expertwise``) they are cut along that dim. What a
rank computes with them has full size, and zeros in the rows of all other experts: see :class:`Disjoint`.

Rows of two tensors are the same if one tensor of indices says whose they are. Where rows are sorted by expert and an
operation is told where each expert's end, it is looked up what these ends were counted from, and tried.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autotp import torch_hooks
from autotp.ownership.choices import Experts
from autotp.ownership.engine import Ownership
from autotp.ownership.state import Disjoint, Vec, Weights
from autotp.record import Op
from autotp.trees import Ref, flatten, rebuild

DRAWS = 6


def grouped(own: Ownership, op: Op, x: int, w: int, ends: int) -> bool:
    """One product per group of rows, each rank those of its experts; False if they are not to be cut so."""
    state = own.states.get(w)
    if not isinstance(state, Weights) or own.is_apart(ends):
        return False
    n = own.shape(x)[0]
    key = _counted_from(own, ends, n)
    rows = numbers(own, key, (n,))
    given = own.disjoint(x)
    follows = given is not None and given.rows is not None and same(given.rows, rows[:, None])
    if not _begin(own, state, key, explicit=not follows):
        return _refused(own, op, state)
    if follows:
        own.want(x, "own")
    else:
        own.whole(x, "meets experts on other ranks than its rows")
    own.want(w, "own")
    own.want(ends)
    own.experts[own.at] = Experts(w, ends, x)
    own.put(op, Disjoint(rows[:, None].expand(own.shape(op.outs[0]))))
    return True


def picked(own: Ownership, op: Op, w: int, ids: int | None) -> bool:
    """Weights looked up by expert: zeros for those of other ranks. ``ids`` says whose, else the call's own index."""
    state = own.states.get(w)
    if not isinstance(state, Weights):
        return False
    for v in state.at(0):
        own.picked.setdefault(v.param, v.param_dim)
    if ids is None:  # select, by a number that the call got, or that it read from a tensor
        made = own.trace.ops[own.trace.calls[op.call].start : own.at]
        read = [t for o in made for t in o.ins if o.func.overloadpacket.__name__ == "_local_scalar_dense"]
        ids = read[0] if read else None
    key = ("at", op.args[2]) if ids is None else ("of", first_name(own, ids), writes_before(own, ids))
    if ids is not None and own.is_apart(ids):
        return False
    if not _begin(own, state, key, explicit=True):
        return _refused(own, op, state)
    rows = numbers(own, key, own.shape(ids) if ids is not None else ())
    out = own.shape(op.outs[0])
    own.want(w, "own")
    own.experts[own.at] = Experts(w, ids)
    own.put(op, Disjoint(rows.reshape(*rows.shape, *[1] * (len(out) - rows.ndim)).expand(out)))
    return True


def _begin(own: Ownership, state: Weights, key: Any, explicit: bool) -> bool:
    """Cut weights by expert if that was chosen (or needs no choice), and if it agrees with others of the same rows."""
    for choice in own.options(state, 0):
        if explicit and not all(_chosen(own, v) for v in choice):
            continue
        nodes = choice[0].nodes
        others = own.experts_of.setdefault(key, nodes)
        if others.shape != nodes.shape or not own.merge(others, nodes):
            continue
        own.settle(state, 0, choice)
        own.role(state, 0, "expert")
        own.by_expert |= {v.param for v in choice}
        return True
    return False


def _refused(own: Ownership, op: Op, state: Weights) -> bool:
    """Say why weights could not be cut by expert, if that was chosen."""
    for v in state.at(0):
        if _chosen(own, v):
            own.all_whole(op, f"its {own.shape(v.param)[v.param_dim]} experts cannot be dealt to {own.tp} ranks")
            return True
    return False


def _chosen(own: Ownership, v: Vec) -> bool:
    dealt = own.choices.dealt.get(v.param)
    return own.choices.dims.get(v.param, dealt[0] if dealt else None) == v.param_dim


def numbers(own: Ownership, key: Any, shape: tuple[int, ...]) -> Tensor:
    """The numbers of rows that something tells apart."""
    if key not in own.numbers:
        first = own.nodes.allocate(max(1, math.prod(shape)))
        own.numbers[key] = torch.arange(first, first + math.prod(shape)).view(shape)
    return own.numbers[key]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same rows, element by element."""
    from autotp.ownership.nodes import pairs

    x, y = pairs(a, b)
    return bool((x == y).all())


def _counted_from(own: Ownership, ends: int, n: int) -> Any:
    """What says whose each of ``n`` sorted rows is: the indices that the ends were counted from, else the ends."""
    chain: list[Op] = []
    tid = ends
    while (op := own.made_by.get(tid)) is not None:
        chain.append(op)
        sources = list(dict.fromkeys(op.ins))
        if len(sources) != 1:
            break
        tid = sources[0]
        info = own.trace.tensors[tid]
        listed = info.shape == (n,) and not info.dtype.is_floating_point
        if listed and _is_sorted(own, tid) and _counts(own, chain, tid, ends):
            return "of", first_name(own, tid), 0
    return "ends", ends, writes_before(own, ends)


def first_name(own: Ownership, tid: int) -> Any:
    """What is equal for two tensors that were moved in the same way from the same one: ``ids.flatten()``, twice."""
    from autotp.ownership.registry import rule_of
    from autotp.ownership.rules_movement import movement

    op = own.made_by.get(tid)
    if op is None or rule_of(op.func) is not movement or len(op.ins) != 1:
        return tid
    if writes_before(own, tid) or writes_before(own, op.ins[0]):
        return tid
    args = [x for x in flatten((op.args, op.kwargs))[0] if not isinstance(x, Ref)]
    return op.func, first_name(own, op.ins[0]), op.outs.index(tid), repr(args)


def writes_before(own: Ownership, tid: int) -> int:
    """How often a tensor has been written into by now: its content may be another one each time."""
    tensors = own.trace.tensors
    written = (t for op in own.trace.ops[: own.at] for t in op.writes)
    return sum(tensors[t].storage == tensors[tid].storage for t in written)


def _is_sorted(own: Ownership, tid: int) -> bool:
    """Whether a list of indices is sorted by the way it was made: by ``sort``, or by the order that this gives."""
    op = own.made_by.get(tid)
    if op is not None and op.func.overloadpacket.__name__ in ("index", "index_select"):
        given = op.args[1] if isinstance(op.args[1], (list, tuple)) else [op.args[2]]
        order = own.made_by.get(given[0].tid) if len(given) == 1 and isinstance(given[0], Ref) else None
        if order is None or len(order.ins) != 1 or not _ascending(order, given[0].tid, -1):
            return False
        return first_name(own, order.ins[0]) == first_name(own, op.args[0].tid)
    return op is not None and _ascending(op, tid, 0)


def _ascending(op: Op, tid: int, out: int) -> bool:
    from autotp.ownership.rules_dims import argument

    sorts = op.func.overloadpacket.__name__ in ("sort", "argsort")
    return sorts and op.outs[out] == tid and not argument(op, "descending")


def _counts(own: Ownership, chain: list[Op], ids: int, ends: int) -> bool:
    """Whether a chain of operations makes the ends of the groups of sorted indices: tried on drawn ones."""
    if any(writes_before(own, t) for t in (ids, *(t for op in chain for t in op.outs))):
        return False
    n, experts = own.shape(ids)[0], own.shape(ends)[0]
    g = torch.Generator().manual_seed(0)
    with torch_hooks.no_modes(), torch.no_grad():
        for k in range(DRAWS):
            few = experts if k % 2 else max(1, experts // 2)  # some experts have no row
            drawn = torch.randint(few, (n,), generator=g).sort().values.to(own.trace.tensors[ids].dtype)
            try:
                found = _replayed(chain, ids, drawn)
            except Exception:
                return False
            if not torch.equal(found.long(), torch.bincount(drawn.long(), minlength=experts).cumsum(0)):
                return False
    return True


def _replayed(chain: list[Op], tid: int, value: Tensor) -> Tensor:
    for op in reversed(chain):
        leaves, spec = flatten((op.args, op.kwargs))
        args, kwargs = rebuild([value if isinstance(x, Ref) and x.tid == tid else x for x in leaves], spec)
        out = op.func(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(f"{op.func} gives several tensors")
        value, tid = out, op.outs[0]
    return value
