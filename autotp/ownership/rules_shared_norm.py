"""torch's own norms over features that are cut: each rank has its part, the statistics are made of everyone's.

This is the second way of a norm, taken where merging all features would leave nothing to cut. Only a few numbers per
token are exchanged. The rule is about the whole call, not about the operations inside it, as the call is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.ownership.registry import call_rule
from autotp.ownership.rules_dims import SHARED, Operand, cut_with
from autotp.ownership.state import Owned
from autotp.record import Call
from autotp.trees import Ref


@dataclass(frozen=True)
class SharedNorm:
    """A norm whose statistics are shared: ``layer`` or ``rms`` over the last ``over`` dims, or ``group`` with
    ``over`` groups of channels. ``cut`` is the dim of its input that is cut."""

    kind: str
    over: int
    cut: int


@call_rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm)
def shared_norm(own: Ownership, call: Call) -> bool:
    """Whether the norm keeps its cut by sharing statistics; else the rules for its operations decide."""
    kind = call.name.removesuffix("_norm")
    refs = [x.tid for x in call.leaves if isinstance(x, Ref)]
    if not refs or len(call.outs) != 1 or not isinstance(call.outs[0], Ref):
        return False
    x, out = refs[0], call.outs[0].tid
    o = own.owners(x)
    if o is None or own.by_tokens(o) or not own.trace.tensors[x].dtype.is_floating_point:
        return False
    if own.shape(x) != own.shape(out):
        return False
    counts = [n for n in call.leaves if isinstance(n, int) and not isinstance(n, bool)]
    over = counts[0] if kind == "group" else len(counts)
    if not counts or (kind != "group" and list(own.shape(x)[-over:]) != counts):
        return False
    cut = [d for d in range(o.ndim) if varies(o, d)]
    inside = [1] if kind == "group" else list(range(o.ndim - over, o.ndim))
    if len(cut) != 1 or cut[0] not in inside or _stay_together(own, kind, over, x):
        return False
    if not own.reach.pays(own, out, call.stop - 1):
        return False
    own.at = call.stop - 1
    own.shared[call.index] = SharedNorm(kind, over, cut[0]), x
    own.want(x, "own")
    for p in dict.fromkeys(refs[1:]):
        first = o.ndim - len(own.shape(p)) if kind != "group" else 1
        placed = Operand(p, tuple(d + first for d in range(len(own.shape(p)))))
        if own.open_weights(p) is not None and not cut_with(own, placed, o):
            own.note(p, SHARED)
        own.want(p, "as", {d: (out, r) for d, r in enumerate(placed.places) if r is not None})
    for i in range(call.start, call.stop):
        for t in own.trace.ops[i].outs:
            own.states[t] = None
    own.states[out] = Owned(own.nodes.canonical(o))
    return True


def _stay_together(own: Ownership, kind: str, over: int, x: int) -> bool:
    """Whether whole groups of channels can be kept on one rank, so that nothing has to be exchanged."""
    from autotp.ownership.rules_norm import merge_groups

    if kind != "group":
        return False
    o = own.owners(x)
    return o is not None and merge_groups(own, o, over) is not None
