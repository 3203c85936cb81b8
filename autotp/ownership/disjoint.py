"""Carry values of which each rank computes other rows, and the others have zeros (or nothing that counts) there.

Such a value is a sum over the ranks without overlaps. So it may be summed at once, everywhere; but it also goes through
whatever treats rows apart and keeps zeros: ``silu(gate) * up``, a factor for every row, moved or picked rows, a product
with whole weights or with values of the same rows. Added up over rows it can only be scaled, moved and summed.

A function that does not keep zeros (``up + 1``) leaves in the rows of others what must not be summed. It may be
multiplied by zeros of the same rows again. Nothing of that reaches a gradient: a product with zeros passes none on to
its other factor, and what goes through functions of zeros ends where the rows began, which pass on that of their own
rows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp import torch_hooks, torch_ops
from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import compress, varies
from autotp.ownership.registry import find_rule
from autotp.ownership.state import Disjoint, Owned
from autotp.record import Op
from autotp.trees import Ref, flatten, rebuild

_BLANK = {"zeros_like", "ones_like", "empty_like", "full_like"}
_SHARED = "is shared by the rows of all experts, so its gradient is summed over the ranks"
_N = 8  # values that a function is tried on


def carry_disjoint(own: Ownership, op: Op) -> None:
    """Carry them through one operation, or ask that they be summed before."""
    from autotp.ownership import rules_index, rules_linear, rules_movement, rules_pointwise, rules_reduce, rules_scatter

    if any(t in own.partial for t in op.ins):
        own.new_opaque[op.call] = f"{op.func.overloadpacket} joins two sums that are not complete"
        return own.put(op, None)
    found = find_rule(op)
    if found is rules_movement.movement:
        return _move(own, op)
    if found is rules_pointwise.made_beside:
        return found(own, op)
    if found is rules_pointwise.pointwise:
        return _meet(own, op)
    if found is rules_reduce.reduce:
        return _reduce(own, op)
    if found in (rules_index.index, rules_index.index_select):
        return _pick(own, op)
    if found in (rules_linear.mm, rules_linear.bmm, rules_linear.grouped_mm):
        return found(own, op)
    if found is rules_linear.addmm:
        return _add_product(own, op)
    if found is rules_scatter.along_one and op.func.overloadpacket.__name__.startswith("index_add"):
        return _add_rows(own, op)
    return summed(own, op, f"op {op.func} needs all rows")


def summed(own: Ownership, op: Op, reason: str) -> None:
    """Ask for the sums of all such operands, and for all others whole."""
    for t in dict.fromkeys(op.ins):
        if own.disjoint(t) is not None:
            _complete(own, t, reason)
        else:
            own.whole(t, reason)
    own.put(op, None)


def _complete(own: Ownership, tid: int, reason: str) -> None:
    """Ask for the sum; of what must not be summed, for the sums of what it was made from.

    It is made with the tensor, or where that is written into later, by those who read it.
    """
    own.want(tid)
    state, op = own.disjoint(tid), own.made_by.get(tid)
    is_sum = state is not None and state.zero and own.trace.tensors[tid].dtype.is_floating_point
    if is_sum and tid in own.written:
        return
    sources = [t for t in dict.fromkeys(op.ins) if own.disjoint(t) is not None] if op is not None else []
    if is_sum or not sources:
        own.new_gather.setdefault(tid, reason)
        return
    for t in sources:
        _complete(own, t, reason)


def _move(own: Ownership, op: Op) -> None:
    from autotp.ownership.rules_movement import moved

    tid, name = op.ins[0], op.func.overloadpacket.__name__
    state = own.disjoint(tid)
    assert state is not None
    own.want(tid, "own")
    if name in _BLANK:
        return own.put(op, None)
    dtype = own.trace.tensors[op.outs[0]].dtype
    padded = name == "constant_pad_nd"
    if (state.rows is None and not dtype.is_floating_point) or (padded and len(op.args) > 2 and op.args[2] != 0):
        return summed(own, op, f"{name} makes other values of zeros")
    value = state.elsewhere
    if value:  # else zero, whatever becomes of it, or unknown
        value = None if padded else float(torch.tensor(value, dtype=torch.float64).to(dtype))
    shapes = [own.shape(t) for t in op.outs]
    if state.rows is None:
        for i in range(len(op.outs)):
            own.put(op, state, i)
        return None
    for i, rows in enumerate(moved(op, tid, state.rows, shapes)):
        own.put(op, Disjoint(compress(rows), value), i)
    return None


# ---------------------------------------------------------------- elementwise


def _meet(own: Ownership, op: Op) -> None:
    tids = list(dict.fromkeys(op.ins))
    states = {t: s for t in tids if (s := own.disjoint(t)) is not None}
    others = [t for t in tids if t not in states]
    name = op.func.overloadpacket.__name__.rstrip("_")
    if any(isinstance(own.states.get(t), Owned) for t in others):
        for t in others:
            own.whole(t, "meets rows of experts, and is cut otherwise")
    shape = own.shape(op.outs[0])
    rows = _common([s.rows for s in states.values()], shape)
    if any(own.disjoint(t) is None for t in op.writes):
        return summed(own, op, f"{name} writes into a whole tensor")
    if rows is None:
        if not _linear(op, name, states, others):
            return summed(own, op, f"{name} needs sums over the experts")
        made = [Disjoint(None)] * len(op.outs)
    else:
        values = _elsewhere(own, op, states)
        grads = any(own.trace.tensors[t].grad for t in others)
        if values is None or (grads and any(v != 0 for v in values)):
            return summed(own, op, f"{name} does not keep the zeros in rows of other experts")
        made = [Disjoint(rows.expand(own.shape(t)), v) for t, v in zip(op.outs, values, strict=True) if t >= 0]
    if any(_is_other(states[t], made[0]) and _shared_storage(own, t) for t in op.writes):
        return summed(own, op, f"{name} writes into rows of experts that are read under another name")
    for t in tids:
        own.want(t, "own" if t in states else "as")
        if t not in states:
            own.note(t, _SHARED)
    for i, s in enumerate(made):
        own.put(op, s, i)
    return None


def _common(rows: list[Tensor | None], shape: tuple[int, ...]) -> Tensor | None:
    """The rows of all operands, if they are the same ones."""
    from autotp.ownership.rules_experts import same

    spread = [r.expand(shape) for r in rows if r is not None]
    if len(spread) < len(rows) or not all(same(spread[0], r) for r in spread[1:]):
        return None
    return spread[0]


def _linear(op: Op, name: str, states: dict[int, Disjoint], others: list[int]) -> bool:
    """Whether an operation on a sum, term by term, gives terms of its result."""
    if not all(s.zero for s in states.values()):
        return False
    if name in ("add", "sub"):
        return not others and all(isinstance(x, Ref) for x in op.args[:2])
    first = isinstance(op.args[0], Ref) and op.args[0].tid in states
    one = sum(isinstance(x, Ref) and x.tid in states for x in op.args) == 1
    return name == "neg" or (one and (name == "mul" or (name == "div" and first and not op.kwargs)))


def _is_other(before: Disjoint, after: Disjoint) -> bool:
    return (before.rows is None, before.elsewhere) != (after.rows is None, after.elsewhere)


def _shared_storage(own: Ownership, tid: int) -> bool:
    """Whether another tensor with the memory of this one is read later, so that a write would have to reach it."""
    tensors, ops = own.trace.tensors, own.trace.ops
    made = {t for op in ops[: own.at] for t in op.outs if t >= 0} | set(own.trace.leaves.values())
    others = {t for t in made if t != tid and tensors[t].storage == tensors[tid].storage}
    given = {*own.trace.outputs, *(t for m in own.trace.modules for t in m.outputs.values())}
    return bool(others & given) or any(not others.isdisjoint(op.ins) for op in ops[own.at + 1 :])


def _elsewhere(own: Ownership, op: Op, states: dict[int, Disjoint]) -> list[float | None] | None:
    """What each result is elsewhere, tried on what the operands are there and on values of all others.

    None if it is not finite, or has no finite gradient: then zeros times it would not be zeros.
    """
    leaves, spec = flatten((op.args, op.kwargs))
    found: list[set[float]] = [set() for _ in op.outs]
    with torch_hooks.no_modes(), torch_hooks.kept_rng(), torch.enable_grad():
        for turn in range(3):
            filled = list(leaves)
            for i, x in enumerate(leaves):
                if isinstance(x, Ref):
                    at = states[x.tid].elsewhere if x.tid in states else None
                    filled[i] = _values(own.trace.tensors[x.tid].dtype, at, turn + i)
            try:
                outs = _run(op, filled, spec)
            except Exception:
                return None
            if not all(bool(torch.isfinite(y).all()) for y in outs):
                return None
            for values, y in zip(found, outs, strict=False):
                values.update(y.double().reshape(-1).tolist())
    return [next(iter(v)) if len(v) == 1 else None for v in found]


def _run(op: Op, leaves: list[Any], spec: Any) -> list[Tensor]:
    """The results of an operation, and its gradients."""
    inputs = [x for x in leaves if isinstance(x, Tensor) and x.dtype.is_floating_point]
    for x in inputs:
        x.requires_grad_()
    args, kwargs = rebuild(leaves, spec)
    outs = flatten(torch_ops.functional(op.func)(*args, **kwargs))[0]
    ways = [y.sum() for y in outs if y.requires_grad]
    grads = torch.autograd.grad(sum(ways), inputs, allow_unused=True) if ways else ()
    return [y.detach() for y in outs] + [g for g in grads if g is not None]


def _values(dtype: torch.dtype, at: float | None, turn: int) -> Tensor:
    if at is not None:
        return torch.full((_N,), at, dtype=dtype)
    if dtype == torch.bool:
        return (torch.arange(_N) + turn) % 2 == 0
    values = torch.tensor([-30.0, -2.0, -1.0, -0.5, 0.25, 1.0, 3.0, 40.0], dtype=torch.float64).roll(turn)
    return values.ceil().to(dtype) if not dtype.is_floating_point else values.to(dtype)


# ---------------------------------------------------------------- along dims


def _add_rows(own: Ownership, op: Op) -> None:
    """Rows added to zeros, or to what other experts have added there."""
    from autotp.ownership.rules_dims import argument

    target, index, source = (argument(op, name).tid for name in ("self", "index", "source"))
    before, added = own.disjoint(target), own.disjoint(source)
    zero = (before is not None and before.zero) or _is_blank(own, target)
    if added is None or not added.zero or not zero or own.is_apart(index):
        return summed(own, op, f"{op.func.overloadpacket.__name__} adds rows of experts to other values")
    if before is None and op.writes and _shared_storage(own, target):
        return summed(own, op, "rows of experts are added to a tensor that is read under another name")
    own.want(target, "own")
    own.want(index)
    own.want(source, "own")
    return own.put(op, Disjoint(None))


def _is_blank(own: Ownership, tid: int) -> bool:
    """Whether a tensor is made of zeros and nothing was written into it yet."""
    tensors, ops = own.trace.tensors, own.trace.ops
    written = (t for op in ops[: own.at] for t in op.writes)
    if any(tensors[t].storage == tensors[tid].storage for t in written):
        return False
    while (op := own.made_by.get(tid)) is not None:
        if op.func.overloadpacket.__name__ in ("zeros", "zeros_like", "new_zeros"):
            return True
        if op.func.overloadpacket.__name__ not in ("detach", "alias"):
            return False
        tid = op.ins[0]
    return False


def _reduce(own: Ownership, op: Op) -> None:
    from autotp.ownership.rules_reduce import reduced_dims

    tid, name = op.ins[0], op.func.overloadpacket.__name__
    state = own.disjoint(tid)
    dims = reduced_dims(op, len(own.shape(tid)))
    if state is None or len(op.ins) > 1:
        return summed(own, op, f"{name} needs all rows")
    rows = state.rows
    added = name in ("sum", "mean")
    if rows is None or any(varies(compress(rows), d) for d in dims):
        if not added or not state.zero:
            return summed(own, op, f"{name} needs all rows")
        own.want(tid, "own")
        return own.put(op, Disjoint(None))
    own.want(tid, "own")
    value = state.elsewhere if name == "mean" else 0.0 if added and state.zero else None
    for i, t in enumerate(op.outs):
        if t >= 0:
            own.put(op, Disjoint(_kept(rows, dims, own.shape(t)), value), i)
    return None


def _kept(rows: Tensor, dims: list[int], shape: tuple[int, ...]) -> Tensor:
    """The rows of a result along ``dims`` of which they are the same."""
    for d in sorted(dims, reverse=True):
        rows = rows.narrow(d, 0, 1) if len(shape) == rows.ndim and shape else rows.select(d, 0)
    return rows.expand(shape)


def _pick(own: Ownership, op: Op) -> None:
    """Rows picked by index are rows of their own, alike where the same index picks from the same rows."""
    from autotp.ownership.rules_experts import numbers, writes_before

    tid = op.args[0].tid
    state = own.disjoint(tid)
    given: list[Any] = list(op.args[1]) if isinstance(op.args[1], (list, tuple)) else [op.args[2]]
    ids = [x for x in given if x is not None]
    dim = given.index(ids[0]) if isinstance(op.args[1], (list, tuple)) else op.args[1] % len(own.shape(tid))
    plain = len(ids) == 1 and not own.is_apart(ids[0].tid) and own.trace.tensors[ids[0].tid].dtype != torch.bool
    if state is None or not plain:
        return summed(own, op, f"{op.func.overloadpacket.__name__} needs all rows")
    own.want(tid, "own")
    own.want(ids[0].tid)
    if state.rows is None:
        return own.put(op, state)
    n, shape = len(own.shape(ids[0].tid)), own.shape(op.outs[0])
    rows = compress(state.rows)
    first = rows.select(dim, 0)
    first = first.reshape(*first.shape[:dim], *[1] * n, *first.shape[dim:]).expand(shape)
    if not varies(rows, dim):
        return own.put(op, Disjoint(first, state.elsewhere))
    if any(varies(rows, d) for d in range(rows.ndim) if d != dim):
        return summed(own, op, "rows of experts lie along several dims")
    flat = rows.movedim(dim, 0).reshape(rows.shape[dim], -1)[:, 0]
    key = ("picked", ids[0].tid, writes_before(own, ids[0].tid), tuple(flat.tolist()))
    made = numbers(own, key, own.shape(ids[0].tid))
    view = [1] * dim + list(made.shape) + [1] * (len(shape) - dim - n)
    return own.put(op, Disjoint(made.view(view).expand(shape), state.elsewhere))


def _add_product(own: Ownership, op: Op) -> None:
    """A product, and a bias of the same expert."""
    bias, a, b = (x.tid for x in op.args[:3])
    state = own.disjoint(bias)
    vector = len(own.shape(b)) == 1
    product(own, op, a, "mk", b, "k" if vector else "kn", "m" if vector else "mn")
    made, shape = own.disjoint(op.outs[0]), own.shape(op.outs[0])
    if made is None:
        return own.whole(bias, "is added to a whole product")
    if state is None or not (state.zero and made.zero) or _common([state.rows, made.rows], shape) is None:
        return summed(own, op, "the bias is not of the same experts")
    return own.want(bias, "own")


def product(own: Ownership, op: Op, a: int, la: str, b: int, lb: str, lout: str) -> None:
    """A product with whole values, or with values of the same rows; dims named by letters."""
    from autotp.ownership.rules_linear import relabel

    shape = own.shape(op.outs[0])
    operands = ((a, la, own.disjoint(a)), (b, lb, own.disjoint(b)))
    made = []
    for t, labels, s in operands:
        if s is None:
            if isinstance(own.states.get(t), Owned) or own.open_weights(t) is not None:
                return summed(own, op, f"meets {op.func.overloadpacket} with what may be cut otherwise")
            continue
        lost = [d for d, c in enumerate(labels) if c not in lout]
        rows = compress(s.rows) if s.rows is not None else None
        if rows is None or any(varies(rows, d) for d in lost):
            if not s.zero:
                return summed(own, op, f"{op.func.overloadpacket} needs all rows")
            made.append(Disjoint(None))
        else:
            made.append(Disjoint(compress(relabel(rows, labels, lout, shape)), 0.0 if s.zero else None))
    both = [s.rows for s in made if s.rows is not None]
    if len(made) == 2 and (len(both) < 2 or _common(list(both), shape) is None):
        return summed(own, op, "meets rows of other experts")
    for t, _, s in operands:
        own.want(t, "own" if s is not None else "as")
    own.put(op, Disjoint(made[0].rows, 0.0 if any(s.zero for s in made) else None))
    return None
