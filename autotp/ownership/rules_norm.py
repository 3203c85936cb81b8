"""Normalisations: over features (layer, RMS, group) or over everything but channels (batch)."""

from __future__ import annotations

from torch import Tensor

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.ownership.registry import rule
from autotp.ownership.rules_linear import add_bias
from autotp.ownership.state import Count, Owned, Weights
from autotp.record import Op
from autotp.trees import Ref


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(own: Ownership, op: Op) -> None:
    """Statistics over the last dims: nothing may be cut there."""
    x, normalized = op.args[0].tid, len(op.args[1])
    params = [a.tid for a in op.args[2:4] if isinstance(a, Ref)]
    o = own.owners(x)
    merged = own.merge_along(o, list(range(o.ndim - normalized, o.ndim))) if o is not None else None
    features = own.shape(x)[-normalized:]
    if merged is None or not any(varies(merged, d) for d in range(merged.ndim)):
        return own.all_whole(op, f"feeds a layer norm over its features {list(features)}")
    own.want(x, "own")
    for p in params:
        own.note(p, "is shared by everything that is cut where it is used, so its gradient is summed over the ranks")
        own.want(p)
    own.put(op, Owned(merged))
    for i in range(1, len(op.outs)):
        stats = merged
        for d in range(merged.ndim - normalized, merged.ndim):
            stats = stats.narrow(d, 0, 1)
        own.put(op, Owned(stats.expand(own.shape(op.outs[i]))), i)
    return None


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_with_update",
    "_batch_norm_no_update",
    "batch_norm",
    "_batch_norm_with_update_functional",
)
def batch_norm(own: Ownership, op: Op) -> None:
    """Every channel on its own; running statistics are cut with the channels."""
    x = op.args[0].tid
    state = own.states.get(x)
    if isinstance(state, Weights) and len(op.ins) == 1:  # weights standardised per channel are still weights
        own.want(x, "as", {1: (op.outs[0], 1)})
        return own.put(op, Weights(tuple(state.at(1)), state.params))
    o = own.owners(x)
    merged = own.merge_along(o, [d for d in range(o.ndim) if d != 1]) if o is not None else None
    if merged is None or not varies(merged, 1):
        return own.all_whole(op, "feeds a batch norm over whole channels")
    own.want(x, "own")
    own.put(op, Owned(merged))
    channels = [a.tid for a in op.args[1:5] if isinstance(a, Ref)]
    for t in channels:
        if own.trace.tensors[t].leaf is not None and own.states.get(t) is None:
            own.leaf(t)
        add_bias(own, op, t, {0: (op.outs[0], 1)})
    for i in range(1, len(op.outs)):
        if op.outs[i] >= 0 and len(own.shape(op.outs[i])) == 1 and own.shape(op.outs[i])[0] == own.shape(x)[1]:
            flat = merged.movedim(1, 0).reshape(own.shape(x)[1], -1)[:, 0]
            own.put(op, Owned(flat), i)
    return None


@rule("native_group_norm", "group_norm")
def group_norm(own: Ownership, op: Op) -> None:
    """Statistics per group of channels: groups stay together."""
    x = op.args[0].tid
    group = op.args[6]
    o = own.owners(x)
    grouped = merge_groups(own, o, group) if o is not None else None
    if grouped is None:
        return own.all_whole(op, f"feeds a group norm with {group} groups")
    own.want(x, "own")
    own.scaled[op.call] = (Count(group, 1),)
    own.put(op, Owned(grouped))
    for a in op.args[1:3]:
        if isinstance(a, Ref):
            add_bias(own, op, a.tid, {0: (op.outs[0], 1)})
    for i in range(1, len(op.outs)):
        first = grouped.reshape(o.shape[0], group, -1)[:, :, 0] if o is not None else grouped
        own.put(op, Owned(first.expand(own.shape(op.outs[i]))), i)
    return None


def merge_groups(own: Ownership, o: Tensor, group: int) -> Tensor | None:
    """Owners of channels with every group of them on one rank; None where too few groups would be left."""
    merged = own.merge_along(o, [d for d in range(o.ndim) if d != 1])
    if merged is None or not varies(merged, 1) or group < own.tp:
        return None
    flat = merged.movedim(1, 0).reshape(o.shape[1], -1)[:, 0]
    per_group = flat.view(group, -1)
    if not own.merge(per_group, per_group[:, :1]):
        return None
    view = [1] * o.ndim
    view[1] = -1
    return own.nodes.canonical(flat).view(view).expand(o.shape)
