"""Elementwise operations with broadcasting: owners that meet merge; whole operands are sliced to match."""

from __future__ import annotations

import torch
from torch import Tensor

from autotp import torch_ops
from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.ownership.registry import rule
from autotp.ownership.state import Owned, Vec, Weights
from autotp.record import Op


@rule(
    "where",
    "masked_fill",
    "masked_fill_",
    "fill_",
    "zero_",
    "copy_",
    "copy",
    "dropout",
    "native_dropout",
    "bernoulli_",
    "bernoulli",
    "rrelu_with_noise",
    "_prelu_kernel",
    "clamp",
    "lerp",
    "addcmul",
    "addcdiv",
    "nan_to_num",
    "log_sigmoid_forward",
    "frexp",
    "_fused_dropout",
    "rand_like",
    "hardswish",  # has no tag
    "randn_like",
)
def pointwise(own: Ownership, op: Op) -> None:
    """Owners of all operands merge element by element; a parameter that varies along a cut dim is cut with it."""
    tids = list(dict.fromkeys(op.ins))
    out = op.outs[0]
    weights = [isinstance(own.states.get(t), Weights) for t in tids]
    constant = [own.states.get(t) is None and not own.trace.tensors[t].grad for t in tids]
    if any(weights) and all(w or c for w, c in zip(weights, constant, strict=True)) and not op.writes:
        return _weights_only(own, op, tids)
    if op.writes == tids and isinstance(own.states.get(tids[0]), Weights) and not torch_ops.is_random(op.func):
        return own.want(tids[0], "own")  # a parameter changed in place by numbers: each rank changes its part
    if op.writes and any(own.owners(t) is None for t in op.writes):
        return _into_whole(own, op, tids)
    owned = [t for t in tids if own.owners(t) is not None]
    if not owned:
        for t in tids:
            own.whole(t, f"is combined with a whole activation ({op.func.overloadpacket.__name__})")
        return own.put(op, None)
    acc = _meet(own, op, owned)
    if any(_would_slice(own, op, t, acc) for t in tids) and own.is_loose(acc):
        for t in tids:
            own.whole(t, "meets a whole activation, and nothing else needs it cut")
        return own.put(op, None)
    for t in tids:
        if own.open_weights(t) is not None:
            _cut_along(own, op, t, acc)
    for t in tids:
        own.want(t, "as", follow(own.shape(t), own.shape(out), out))
    for i in range(len(op.outs)):
        own.put(op, Owned(acc.expand(own.shape(op.outs[i]))) if op.outs[i] >= 0 else None, i)


def _into_whole(own: Ownership, op: Op, tids: list[int]) -> None:
    """A cut value is written into a whole tensor: it is gathered, unless room can be made for it."""
    from autotp.ownership.room import make_room

    target = op.writes[0]
    values = [o for t in tids if t != target and (o := own.owners(t)) is not None]
    if len(values) == 1 and own.open_weights(target) is None:
        shape = own.shape(target)
        make_room(own, target, values[0].expand(torch.broadcast_shapes(values[0].shape, shape)))
    return own.all_whole(op, f"{op.func.overloadpacket} writes into a whole tensor")


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def made_beside(own: Ownership, op: Op) -> None:
    """What is made of numbers takes only its type from the operand: however that is cut, it is whole."""
    own.want(op.ins[0], "own")
    room = own.choices.room.get(op.outs[0])
    own.put(op, Owned(room.owners(own.shape(op.outs[0]))) if room is not None else None)


@rule("triu", "tril")
def by_position(own: Ownership, op: Op) -> None:
    """What happens to an element depends on where it is in the last two dims: these must be whole."""
    o = own.owners(op.ins[0])
    if (
        isinstance(own.states.get(op.ins[0]), Weights)
        or o is None
        or any(varies(o, d) for d in (o.ndim - 2, o.ndim - 1))
    ):
        return own.all_whole(op, f"{op.func.overloadpacket.__name__} goes by position in it")
    return (
        pointwise(own, op) if op.func.overloadpacket.__name__ in ("triu", "tril") else own.all_whole(op, "has no rule")
    )


def follow(shape: tuple[int, ...], out_shape: tuple[int, ...], out: int) -> dict[int, tuple[int, int] | Tensor]:
    """Dims of an operand that are not broadcast, each to be cut as the result is (aligned from the right)."""
    shift = len(out_shape) - len(shape)
    return {d: (out, d + shift) for d, n in enumerate(shape) if n > 1 and n == out_shape[d + shift]}


def _would_slice(own: Ownership, op: Op, tid: int, acc: Tensor) -> bool:
    """Whether a whole activation (not a constant) would have to be sliced to meet these owners."""
    if own.states.get(tid) is not None or not own.trace.tensors[tid].grad or op.writes:
        return False
    shape = own.shape(tid)
    shift = acc.ndim - len(shape)
    return any(n > 1 and varies(acc, d + shift) for d, n in enumerate(shape))


def _meet(own: Ownership, op: Op, owned: list[int]) -> Tensor:
    shape = own.shape(op.outs[0])
    acc, behind = None, []
    for t in owned:
        o = own.owners(t)
        assert o is not None
        o = o.expand(shape)
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
    assert acc is not None
    return acc


def _cut_along(own: Ownership, op: Op, tid: int, acc: Tensor) -> None:
    """Cut a still open parameter along a cut dim of the result, or say why it stays whole."""
    w, shape = own.states[tid], own.shape(tid)
    assert isinstance(w, Weights)
    shift = acc.ndim - len(shape)
    for d, n in enumerate(shape):
        if n > 1 and varies(acc, d + shift) and try_cut(own, w, d, shape, acc):
            return
    own.note(tid, "is shared by everything that is cut where it is used, so its gradient is summed over the ranks")


def try_cut(own: Ownership, w: Weights, dim: int, shape: tuple[int, ...], acc: Tensor) -> bool:
    """Merge a parameter's nodes along ``dim`` with the owners it meets and settle that cut, if groups remain."""
    for choice in own.options(w, dim):
        if own.merge(acc, own.spread(choice[0], shape).expand(acc.shape)):
            return own.settle(w, dim, choice) is not None
    return False


def _weights_only(own: Ownership, op: Op, tids: list[int]) -> None:
    """Parameters combined among themselves (weight norm, scales, casts) are still weights."""
    out_shape = own.shape(op.outs[0])
    vecs: list[Vec] = []
    params: frozenset[int] = frozenset()
    for t in tids:
        s = own.states.get(t)
        if isinstance(s, Weights):
            shift = len(out_shape) - len(own.shape(t))
            vecs += [Vec(v.param, v.param_dim, v.dim + shift, v.nodes) for v in s.vecs]
            params |= s.params
        own.want(t, "as", follow(own.shape(t), out_shape, op.outs[0]))
    for i, t in enumerate(op.outs):
        same = t >= 0 and own.shape(t) == out_shape
        own.put(op, Weights(agreeing(own, vecs), params) if same else None, i)


def agreeing(own: Ownership, vecs: list[Vec]) -> tuple[Vec, ...]:
    """Vectors of different parameters that lie along one dim merge; a dim where they cannot is not cut at all."""
    kept: list[Vec] = []
    for dim in dict.fromkeys(v.dim for v in vecs):
        here = [v for v in vecs if v.dim == dim]
        single = len({v.param for v in here}) == len(here)
        if len({v.param for v in here}) == 1 or (single and all(own.merge(here[0].nodes, v.nodes) for v in here[1:])):
            kept += here
    return tuple(kept)
