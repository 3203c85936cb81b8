"""Look-ups: embeddings, gathers, scatters, advanced indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import compress, varies
from autotp.ownership.registry import no_rule, rule
from autotp.ownership.rules_experts import picked
from autotp.ownership.rules_movement import move_weights, moved
from autotp.ownership.state import Weights
from autotp.record import Op
from autotp.trees import Ref


@rule("embedding")
def embedding(own: Ownership, op: Op) -> None:
    """Rows by index: cut by rows (each rank looks up its own, then the sum), else by features."""
    w, ids = op.args[0].tid, op.args[1].tid
    state = own.states.get(w)
    if not isinstance(state, Weights) or own.owners(ids) is not None:
        return _rows(own, op, w, [0], [ids])
    own.want(ids)
    own.role(state, 0, "rows")
    own.role(state, 1, "features")
    special = _special(own, op)
    rows = own.shape(w)[0]
    v = own.settle(state, 0) if special is None else None
    if v is not None:
        own.want(w, "own")
        own.vocab.add(own.at)
        own.partial[op.outs[0]] = -1
        return own.put(op, None)
    if special is None or "scaled" in special:
        v = own.settle(state, 1)
    if v is not None:
        own.want(w, "own")
        return own.put(op, v.nodes.expand(own.shape(op.outs[0])))
    own.whole(w, special or f"its {rows} rows and {own.shape(w)[1]} features cannot be dealt to {own.tp} ranks")
    return own.put(op, None)


def _special(own: Ownership, op: Op) -> str | None:
    """Options of an embedding that need to see the whole table."""
    scale = op.args[3] if len(op.args) > 3 else False
    sparse = op.args[4] if len(op.args) > 4 else False
    if scale:
        return "its gradient is scaled by how often each row is used"
    if sparse:
        return "its gradient is sparse"
    return None


def _rows(own: Ownership, op: Op, tid: int, touched: list[int], others: list[int]) -> None:
    """Owners along untouched dims pass; nothing may be cut along touched ones."""
    if any(own.owners(t) is not None for t in others):
        return own.all_whole(op, f"{op.func.overloadpacket} looks up with cut indices")
    for t in others:
        own.want(t)
    state = own.states.get(tid)
    if touched == [0] and len(others) == 1 and picked(own, op, tid, others[0]):
        return None
    shapes = [own.shape(t) for t in op.outs]
    if isinstance(state, Weights):
        untouched = Weights(tuple(v for v in state.vecs if v.dim not in touched), state.params)
        out = _with_indices(own, op, lambda o: move_weights(own, o, tid, untouched, shapes)[0])
        # a cut along a touched dim is gathered: only the dims that reach the result are followed
        dims = {v.dim: v.nodes for v in untouched.vecs}
        own.want(tid, "as", dict(dims))
        return own.put(op, out)
    o = own.owners(tid)
    if o is None:
        own.want(tid)
        return own.put(op, None)
    if any(varies(o, d) for d in touched):
        return own.all_whole(op, f"{op.func.overloadpacket} looks up along a dim where it would be cut")
    own.want(tid, "own")
    return own.put(op, _with_indices(own, op, lambda p: compress(moved(p, tid, o, shapes)[0])))


def _with_indices(own: Ownership, op: Op, run: Callable[[Op], Any]) -> Any:
    """Run with recorded indices in place of references; an operation whose indices are unknown uses zeros."""
    from autotp.record import Traced
    from autotp.trees import flatten, rebuild

    leaves, spec = flatten((op.args, op.kwargs))
    filled = []
    for x in leaves:
        if isinstance(x, Ref) and not own.trace.tensors[x.tid].dtype.is_floating_point:
            t = own.trace.objects[x.tid]
            x = torch.zeros(t.shape, dtype=t.dtype) if isinstance(t, Traced) else t
        filled.append(x)
    args, kwargs = rebuild(filled, spec)
    return run(Op(op.func, args, kwargs, op.ins, op.outs, op.writes, op.call))


@rule("index", "_unsafe_index")
def index(own: Ownership, op: Op) -> None:
    """Advanced indexing: touched dims are those with an index tensor (a mask touches as many as it has)."""
    touched, dim, others = [], 0, []
    for x in op.args[1]:
        if x is None:
            dim += 1
            continue
        others.append(x.tid)
        info = own.trace.tensors[x.tid]
        n = len(info.shape) if info.dtype in (torch.bool, torch.uint8) else 1
        touched += list(range(dim, dim + n))
        dim += n
    _rows(own, op, op.args[0].tid, touched, others)


@rule("index_select")
def index_select(own: Ownership, op: Op) -> None:
    """Rows of one dim by index."""
    n = len(own.shape(op.args[0].tid))
    _rows(own, op, op.args[0].tid, [op.args[1] % n], [op.args[2].tid])


@rule("gather", "take_along_dim")
def gather(own: Ownership, op: Op) -> None:
    """Element look-up along a dim. Along the others the index must be as long as the tensor, or cut nowhere."""
    tid, index_tid = op.args[0].tid, op.args[2].tid
    shape, dim = own.shape(tid), op.args[1] % max(len(own.shape(tid)), 1)
    o = own.owners(tid)
    if o is None or own.owners(index_tid) is not None or isinstance(own.states.get(tid), Weights):
        return no_rule(own, op)
    merged = own.merge_along(o, [dim])
    out_shape = own.shape(op.outs[0])
    aligned = merged is not None and all(
        not varies(merged, d) or out_shape[d] == shape[d] for d in range(len(shape)) if d != dim
    )
    if merged is None or not aligned:
        return no_rule(own, op)
    own.want(tid, "own")
    own.want(index_tid, "as", {d: (op.outs[0], d) for d in range(len(shape)) if d != dim})
    return own.put(
        op,
        merged.narrow(dim, 0, 1).expand(
            [n if d == dim else m for d, (n, m) in enumerate(zip(out_shape, merged.shape, strict=True))]
        ),
    )
