"""Operations that only move elements: the same operation moves their owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import compress, varies
from autotp.ownership.registry import no_rule, rule
from autotp.ownership.rules_experts import picked
from autotp.ownership.rules_pointwise import agreeing
from autotp.ownership.state import Owned, Vec, Weights
from autotp.record import Op
from autotp.trees import Ref, flatten, rebuild

MAX_DENSE = 1 << 27
_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
IDENTITY = ("clone", "detach", "alias", "contiguous", "_to_copy", "to", "lift_fresh", "lift", "_conj", "zeros_like",
            "ones_like", "empty_like", "full_like", "detach_", "_neg_view", "resolve_conj")  # fmt: skip


def moved(op: Op, tid: int, o: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Run a movement operation on an owner (or index) tensor in place of tensor ``tid``."""
    name = op.func.overloadpacket.__name__
    if name in IDENTITY:
        return [o]
    if name in _RESHAPES:
        return [o.reshape(shapes[0])]
    if name == "expand":
        return [o.expand(shapes[0])]
    if name == "constant_pad_nd":
        return [_pad(o, op.args[1])]
    leaves, spec = flatten((op.args, op.kwargs))
    args, kwargs = rebuild([o if isinstance(x, Ref) and x.tid == tid else x for x in leaves], spec)
    with torch.no_grad():
        out = op.func(*args, **kwargs)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _pad(o: Tensor, pad: Any) -> Tensor:
    """Padding belongs to whoever owns the element next to it."""
    for i in range(len(pad) // 2):
        dim = o.ndim - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        if before or after:
            at = torch.arange(-before, o.shape[dim] + after).clamp(0, o.shape[dim] - 1)
            o = o.index_select(dim, at)
    return o


@rule(
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "permute",
    "transpose",
    "t",
    "expand",
    "select",
    "slice",
    "numpy_T",
    "narrow",
    "unsqueeze",
    "squeeze",
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
    "flip",
    "roll",
    "repeat",
    "diagonal",
    "unfold",
    "movedim",
    "constant_pad_nd",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "rot90",
    "tile",
    "real",
    "imag",
    *IDENTITY,
)
def movement(own: Ownership, op: Op) -> None:
    """Move the owners as the elements are moved."""
    tid = op.ins[0]
    state = own.states.get(tid)
    if op.func.overloadpacket.__name__ == "select" and op.args[1] == 0 and picked(own, op, tid, None):
        return
    own.want(tid, "own")
    shapes = [own.shape(t) for t in op.outs]
    if isinstance(state, Owned):
        for i, o in enumerate(moved(op, tid, state.owners, shapes)):
            own.put(op, compress(o), i)
    elif isinstance(state, Weights):
        for i, s in enumerate(move_weights(own, op, tid, state, shapes)):
            own.put(op, s, i)


def move_weights(
    own: Ownership, op: Op, tid: int, state: Weights, shapes: list[tuple[int, ...]]
) -> list[Weights | None]:
    """Vectors follow the movement as long as each lies along a single dim afterwards."""
    outs: list[list[Vec]] = [[] for _ in shapes]
    for v in state.vecs:
        spread = own.spread(v, own.shape(tid))
        if op.func.overloadpacket.__name__ in _RESHAPES and _would_copy(spread, shapes[0]):
            continue
        for i, o in enumerate(moved(op, tid, spread, shapes)):
            o = compress(o)
            dims = [d for d in range(o.ndim) if varies(o, d)]
            if len(dims) == 1:
                nodes = o.movedim(dims[0], 0).reshape(o.shape[dims[0]], -1)[:, 0].clone()
                outs[i].append(Vec(v.param, v.param_dim, dims[0], nodes))
    return [Weights(tuple(vecs), state.params) for vecs in outs]


def _would_copy(o: Tensor, shape: tuple[int, ...]) -> bool:
    if o.numel() <= MAX_DENSE:
        return False
    try:
        o.view(shape)
        return False
    except RuntimeError:
        return True


@rule("cat", "concat", "stack", "hstack")
def cat(own: Ownership, op: Op) -> None:
    """Pieces keep their owners; along the other dims all pieces must be cut alike, whole ones are sliced to match."""
    tensors = [x.tid for x in op.args[0]]
    stacking = op.func.overloadpacket.__name__ == "stack"
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    out = op.outs[0]
    dim %= len(own.shape(out))
    empty = [t for t in tensors if own.shape(t) == (0,) or (not stacking and own.shape(t)[dim] == 0)]
    for t in empty:
        own.want(t, "own")  # nothing in it, whoever has it
    tensors = [t for t in tensors if t not in empty]
    if all(isinstance(own.states.get(t), Weights) for t in tensors):
        return _cat_weights(own, op, tensors, dim, stacking)
    pieces = {t: own.owners(t) for t in tensors}
    if all(o is None for o in pieces.values()):
        return own.all_whole(op, "is joined with whole tensors")
    tall = {t: o.unsqueeze(dim) if stacking else o for t, o in pieces.items() if o is not None}
    across = any(varies(o, d) for o in tall.values() for d in range(o.ndim) if d != dim)
    common = _agree(own, tall, dim) if across else None
    if (across and common is None) or (not across and len(tall) < len(set(tensors))):
        return own.all_whole(op, "is joined with tensors that are cut otherwise")
    joined = []
    for t in tensors:
        n = 1 if stacking else own.shape(t)[dim]
        size = (*own.shape(out)[:dim], n, *own.shape(out)[dim + 1 :])
        joined.append(tall[t].expand(size) if t in tall else common.expand(size))  # type: ignore[union-attr]
        keep = {d: (out, d + (1 if stacking and d >= dim else 0)) for d in range(len(own.shape(t)))}
        own.want(t, "as" if t not in tall else "own", {d: r for d, r in keep.items() if r[1] != dim})
    own.put(op, compress(torch.cat(joined, dim)))


def _agree(own: Ownership, tall: dict[int, Tensor], dim: int) -> Tensor | None:
    """Merge every piece along the joining dim and the pieces with each other; what they then share."""
    common = None
    for o in tall.values():
        merged = own.merge_along(o, [dim])
        if merged is None:
            return None
        first = merged.narrow(dim, 0, 1)
        if common is not None and not own.merge(common, first):
            return None
        common = first if common is None else own.nodes.canonical(common)
    return common


def _cat_weights(own: Ownership, op: Op, tensors: list[int], dim: int, stacking: bool) -> None:
    vecs: list[Vec] = []
    params: frozenset[int] = frozenset()
    for t in tensors:
        s = own.states[t]
        assert isinstance(s, Weights)
        params |= s.params
        shifted = [Vec(v.param, v.param_dim, v.dim + (stacking and v.dim >= dim), v.nodes) for v in s.vecs]
        vecs += [v for v in shifted if v.dim != dim]
        n = len(own.shape(t))
        own.want(t, "as", {d: (op.outs[0], d + (stacking and d >= dim)) for d in range(n) if stacking or d != dim})
    complete = [v for v in agreeing(own, vecs) if sum(w.dim == v.dim for w in vecs) >= len(tensors)]
    own.put(op, Weights(tuple(complete), params))


@rule("view_as_complex", "view_as_real")
def complex_view(own: Ownership, op: Op) -> None:
    """The real and the imaginary part of a number stay together."""
    tid = op.ins[0]
    o = own.owners(tid)
    to_complex = op.func.overloadpacket.__name__ == "view_as_complex"
    state = own.states.get(tid)
    if isinstance(state, Weights):
        n = o.ndim if o is not None else len(own.shape(tid))
        vecs = tuple(v for v in state.vecs if not to_complex or v.dim < n - 1)
        own.want(tid, "as", {d: (op.outs[0], d) for d in range(n - to_complex)})
        return own.put(op, Weights(vecs, state.params))
    if o is None:
        return own.all_whole(op, "is made of complex numbers")
    merged = own.merge_along(o, [o.ndim - 1]) if to_complex else o.unsqueeze(-1).expand(own.shape(op.outs[0]))
    if merged is None:
        return own.all_whole(op, "real and imaginary parts would be parted")
    own.want(tid, "own")
    return own.put(op, merged.select(-1, 0) if to_complex else merged)


def spatial(own: Ownership, op: Op, dims: int) -> None:
    """Pooling, resampling and the like over the last dims: every channel on its own."""
    tid = op.ins[0]
    o = own.owners(tid)
    if o is None:
        return own.all_whole(op, f"op {op.func} works on whole tensors")
    merged = own.merge_along(o, list(range(o.ndim - dims, o.ndim)))
    if merged is None:
        return no_rule(own, op)
    for d in range(o.ndim - dims, o.ndim):
        merged = merged.narrow(d, 0, 1)
    own.want(tid, "own")
    for t in op.ins[1:]:
        own.whole(t, f"op {op.func} needs all of it for every channel")
    for i, t in enumerate(op.outs):
        if t >= 0:
            own.put(op, merged.expand(own.shape(t)), i)


@rule(
    "max_pool2d_with_indices",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_nearest_exact2d",
    "reflection_pad2d",
    "replication_pad2d",
    "grid_sampler_2d",
    "mkldnn_max_pool2d",
    "fractional_max_pool2d",
)
def spatial_2d(own: Ownership, op: Op) -> None:
    """The last two dims are space."""
    spatial(own, op, 2)


@rule(
    "max_pool1d",
    "avg_pool1d",
    "adaptive_avg_pool1d",
    "adaptive_max_pool1d",
    "upsample_nearest1d",
    "upsample_linear1d",
    "reflection_pad1d",
    "replication_pad1d",
    "max_pool1d_with_indices",
    "_upsample_nearest_exact1d",
)
def spatial_1d(own: Ownership, op: Op) -> None:
    """The last dim is space."""
    spatial(own, op, 1)


@rule(
    "max_pool3d_with_indices",
    "avg_pool3d",
    "adaptive_avg_pool3d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool3d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
    "reflection_pad3d",
    "replication_pad3d",
    "grid_sampler_3d",
)
def spatial_3d(own: Ownership, op: Op) -> None:
    """The last three dims are space."""
    spatial(own, op, 3)
