"""Tensors that are made to be written into: a cache that is filled token by token.

Zeros, or a buffer, are whole at first. Where a cut tensor is written into them, the rules ask for *room*: in the next
pass they are cut from the start, as what is written into them is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotp.ownership.choices import Room
from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import core, varies
from autotp.record import Op

_UNIFORM = {"zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "empty_strided"}


def make_room(own: Ownership, tid: int, o: Tensor) -> None:
    """Ask that the tensor behind ``tid`` be cut from the start, if it is made to be written into.

    ``o`` has the owners of what is written, in the shape of ``tid`` or of size 1 where it does not matter.
    """
    dims = [d for d in range(o.ndim) if varies(o, d)]
    root, chain = _root(own, tid)
    if not dims or root is None or root in own.choices.room:
        return
    shape = own.shape(root)
    placed = core(o)
    homes: list[int] = []
    for d in dims:
        same_size = [b for b, n in enumerate(shape) if n == o.shape[d] and b not in homes]
        found = [(b, p) for b in same_size if (p := _place(own, chain, root, b, tid, d)) is not None]
        if not found:
            return
        homes.append(found[0][0])
        placed = placed.index_select(d, torch.argsort(found[0][1]))
    view = [shape[b] if b in homes else 1 for b in range(len(shape))]
    flat = placed.reshape([placed.shape[d] for d in dims])
    own.new_room[root] = Room(flat.permute(sorted(range(len(homes)), key=homes.__getitem__)).reshape(view))


def _place(own: Ownership, chain: list[Op], root: int, base_dim: int, tid: int, dim: int) -> Tensor | None:
    """Where along ``base_dim`` of the root each index along ``dim`` of a view of it is; None if it is not all there."""
    from autotp.ownership.rules_movement import moved

    shape = own.shape(root)
    view = [1] * len(shape)
    view[base_dim] = shape[base_dim]
    place, at = torch.arange(shape[base_dim]).view(view).expand(shape), root
    for op in chain:
        place = moved(op, at, place, [own.shape(t) for t in op.outs])[op.outs.index(_next(op, chain, tid))]
        at = _next(op, chain, tid)
    flat = place.movedim(dim, 0).reshape(place.shape[dim], -1)
    same = flat.shape[1] > 0 and bool((flat == flat[:, :1]).all())
    return flat[:, 0] if same and len(torch.unique(flat[:, 0])) == shape[base_dim] else None


def _next(op: Op, chain: list[Op], tid: int) -> int:
    """The result of a view operation that the chain goes on with."""
    after = chain.index(op) + 1
    return chain[after].ins[0] if after < len(chain) else tid


def _root(own: Ownership, tid: int) -> tuple[int | None, list[Op]]:
    """The buffer, or the uniform tensor made by a module's own call, that ``tid`` is a view of; and the way to it."""
    chain: list[Op] = []
    while True:
        info = own.trace.tensors[tid]
        if info.leaf is not None:
            return (None if info.parameter else tid), chain
        op = own.made_by.get(tid)
        if op is None:
            return None, chain
        call = own.trace.calls[op.call]
        if op.func.overloadpacket.__name__ in _UNIFORM:
            others = {o.func.overloadpacket.__name__ for o in own.trace.ops[call.start : call.stop] if o is not op}
            return (tid if call.module >= 0 and others <= {"detach", "alias"} else None), chain
        if not op.ins or own.trace.tensors[op.ins[0]].storage != info.storage:
            return None, chain
        chain.insert(0, op)
        tid = op.ins[0]
