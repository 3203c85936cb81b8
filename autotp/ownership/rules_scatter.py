"""Writes by index: along dims that the index does not touch, every index is on its own."""

from __future__ import annotations

from typing import Any

from autotp.ownership.engine import Ownership
from autotp.ownership.registry import rule
from autotp.ownership.rules_dims import Operand, aligned, argument, by_dims
from autotp.record import Op
from autotp.trees import Ref


def _onto(own: Ownership, op: Op, touched: set[int], sources: list[Operand]) -> None:
    """Write sources onto the first operand, whose shape the result has."""
    target = op.args[0].tid
    dims = range(len(own.shape(target)))
    by_dims(own, op, [Operand(target, tuple(dims)), *sources], [d for d in dims if d not in touched])


def _dim(own: Ownership, op: Op) -> int:
    return argument(op, "dim") % max(len(own.shape(op.args[0].tid)), 1)


def _of(x: Any) -> list[int]:
    return [x.tid] if isinstance(x, Ref) else []


@rule("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter(own: Ownership, op: Op) -> None:
    """An index for every element: the dims where all three are equally long are on their own."""
    shape, dim = own.shape(op.args[0].tid), _dim(own, op)
    tids = [t for name in ("index", "src", "value") for t in _of(argument(op, name))]
    short = {d for d, n in enumerate(shape) for t in tids if len(own.shape(t)) == len(shape) and own.shape(t)[d] != n}
    _onto(own, op, {dim, *short}, [Operand(t, tuple(range(len(own.shape(t))))) for t in tids])


@rule("index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_", "index_fill",
      "index_fill_")  # fmt: skip
def along_one(own: Ownership, op: Op) -> None:
    """Rows of one dim by an index that is the same everywhere."""
    tids = [t for name in ("source", "value") for t in _of(argument(op, name))]
    n = len(own.shape(op.args[0].tid))
    dim = _dim(own, op)
    sources = [Operand(t, tuple(range(n)) if len(own.shape(t)) == n else ()) for t in tids]
    _onto(own, op, {dim}, sources)


@rule("index_put", "index_put_", "_unsafe_index_put")
def index_put(own: Ownership, op: Op) -> None:
    """Advanced indexing: the dims without an index tensor are on their own (a mask touches as many as it has)."""
    target = op.args[0].tid
    touched: list[int] = []
    dim, apart = 0, False
    for x in op.args[1]:
        n = len(own.trace.tensors[x.tid].shape) if x is not None and _is_mask(own, x.tid) else 1
        if x is not None:
            apart |= bool(touched) and touched[-1] != dim - 1
            touched += range(dim, dim + n)
        dim += n
    free = [d for d in range(len(own.shape(target))) if d not in touched]
    before = [] if apart or not touched else [d for d in free if d < touched[0]]
    after = [d for d in free if d not in before]
    indexed = _index_dims(own, op)
    places: list[int | None] = [*before, *[None] * indexed, *after]
    source = op.args[2].tid
    mine = own.shape(source)
    placed = places[len(places) - len(mine) :] if mine else []
    if len(mine) > len(places):
        return own.all_whole(op, f"op {op.func} writes by index")
    shape = own.shape(target)
    fits = tuple(r if r is not None and n == shape[r] else None for n, r in zip(mine, placed, strict=True))
    return _onto(own, op, set(touched), [Operand(source, fits)])


def _is_mask(own: Ownership, tid: int) -> bool:
    return str(own.trace.tensors[tid].dtype) in ("torch.bool", "torch.uint8")


def _index_dims(own: Ownership, op: Op) -> int:
    """How many dims the index tensors are broadcast to."""
    tids = [x.tid for x in op.args[1] if x is not None]
    return max((1 if _is_mask(own, t) else len(own.shape(t)) for t in tids), default=0)


@rule("slice_scatter", "select_scatter", "diagonal_scatter")
def part_scatter(own: Ownership, op: Op) -> None:
    """A part set out of place."""
    n, name = len(own.shape(op.args[0].tid)), op.func.overloadpacket.__name__
    if name == "diagonal_scatter":
        touched = {argument(op, "dim1") % n, argument(op, "dim2") % n}
        places = (*(d for d in range(n) if d not in touched), None)
    else:
        touched = {_dim(own, op)}
        places = tuple(d for d in range(n) if name != "select_scatter" or d not in touched)
    _onto(own, op, touched, [Operand(op.args[1].tid, places)])


@rule("masked_scatter", "masked_scatter_")
def masked_scatter(own: Ownership, op: Op) -> None:
    """The source is read in order, so rows of it are on their own only along last dims where the mask is expanded."""
    target, mask, source = (a.tid for a in op.args[:3])
    shape, m, s = own.shape(target), own.trace.objects[mask], own.shape(source)
    last = len(shape) - 1
    rows = bool(shape) and bool(s) and s[-1] == shape[-1] and _expanded(m, shape[-1])
    inner = set(range(last)) if rows else set(range(len(shape)))
    placed = (*[None] * (len(s) - 1), last) if rows else (None,) * len(s)
    marks = aligned(own, mask, shape)
    return _onto(own, op, inner, [Operand(mask, marks.places), Operand(source, placed)])


def _expanded(mask: Any, size: int) -> bool:
    """Whether a mask is the same along its last dim by the way it was made, not by its content."""
    return bool(mask.ndim) and (mask.shape[-1] == 1 or (mask.shape[-1] == size and mask.stride(-1) == 0))
