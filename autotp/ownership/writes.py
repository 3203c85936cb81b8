"""Writes through a view made in the same call: ``h[:, :8] = 1``."""

from __future__ import annotations

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.record import Op

_ORDER = {"permute", "transpose", "t", "unsqueeze", "squeeze", "alias", "detach", "view_as_real", "view_as_complex"}


def writes_part(own: Ownership, op: Op, tid: int) -> bool:
    """Whether an operation writes into what its own call took out of a cut tensor along a cut dim.

    On a rank such a place would be counted from the start of its part. Along whole dims all ranks write alike.
    """
    if own.made_in.get(tid) != op.call or own.owners(tid) is None:
        return False
    tensors, ops = own.trace.tensors, own.trace.ops[own.start : own.at]
    storage = tensors[tid].storage
    outside = {t for o in ops for t in o.ins if own.made_in.get(t) != op.call}
    if not any(tensors[t].storage == storage for t in outside):
        return False
    while own.made_in.get(tid) == op.call:
        view = next((o for o in ops if tid in o.outs and tid not in o.writes), None)
        if view is None or not _along_whole(own, view):
            return True
        tid = view.ins[0]
    return False


def _along_whole(own: Ownership, view: Op) -> bool:
    name = view.func.overloadpacket.__name__
    if name in _ORDER:
        return True
    o = own.owners(view.ins[0])
    if o is None or name not in ("select", "slice"):
        return False
    dim = (view.args[1] if len(view.args) > 1 else 0) % o.ndim
    return not varies(o, dim) or own.shape(view.outs[0]) == own.shape(view.ins[0])
