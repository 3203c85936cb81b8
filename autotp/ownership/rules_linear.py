"""Products: matrix products, convolutions, and the partial sums they leave behind.

Dims are named by letters as in einsum. With an activation ``x`` and weights ``w``:

* *column cut*: x is whole, w is cut along a dim of the result, which then is cut
* *row cut*: x is cut along the summed dim, w with it; the result is a partial sum until it is summed over the ranks
"""

from __future__ import annotations

from torch import Tensor

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import core, varies
from autotp.ownership.registry import no_rule, rule
from autotp.ownership.rules_movement import IDENTITY
from autotp.ownership.rules_pointwise import follow, try_cut
from autotp.ownership.state import Count, Owned, Weights
from autotp.record import Op
from autotp.trees import Ref


@rule("mm", "matmul", "dot", "mv")
def mm(own: Ownership, op: Op) -> None:
    """Two matrices (or a matrix and a vector)."""
    a, b = op.args[0].tid, op.args[1].tid
    la = "mk" if len(own.shape(a)) == 2 else "k"
    lb = "kn" if len(own.shape(b)) == 2 else "k"
    product(own, op, a, la, b, lb, (la + lb).replace("k", ""))


@rule("bmm")
def bmm(own: Ownership, op: Op) -> None:
    """A batch of matrix products."""
    product(own, op, op.args[0].tid, "bmk", op.args[1].tid, "bkn", "bmn")


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(own: Ownership, op: Op) -> None:
    """One matrix product per group of rows (experts): as a product whose weights have one dim more."""
    a, b = op.args[0].tid, op.args[1].tid
    if len(own.shape(b)) != 3:
        return no_rule(own, op)
    batched = len(own.shape(a)) == 3
    if not batched:
        from autotp.ownership.rules_dims import argument
        from autotp.ownership.rules_experts import grouped

        ends = argument(op, "offs")
        if isinstance(ends, Ref) and grouped(own, op, a, b, ends.tid):
            return None
    for t in op.ins:
        if t not in (a, b):
            own.want(t)
    return product(own, op, a, "etk" if batched else "tk", b, "ekn", "etn" if batched else "tn")


@rule("addmm", "addmv")
def addmm(own: Ownership, op: Op) -> None:
    """A matrix product and something added, once."""
    vector = len(own.shape(op.args[2].tid)) == 1
    product(own, op, op.args[1].tid, "mk", op.args[2].tid, "k" if vector else "kn", "m" if vector else "mn")
    add_bias(own, op, op.args[0].tid, follow(own.shape(op.args[0].tid), own.shape(op.outs[0]), op.outs[0]))


@rule("baddbmm")
def baddbmm(own: Ownership, op: Op) -> None:
    """A batch of matrix products and something added, once."""
    product(own, op, op.args[1].tid, "bmk", op.args[2].tid, "bkn", "bmn")
    add_bias(own, op, op.args[0].tid, follow(own.shape(op.args[0].tid), own.shape(op.outs[0]), op.outs[0]))


def add_bias(own: Ownership, op: Op, bias: int, dims: dict[int, tuple[int, int] | Tensor]) -> None:
    """What is added to a product: cut with its result, or added on one rank only to a partial sum."""
    out = op.outs[0]
    if out in own.partial:
        if own.owners(bias) is None:
            own.note(bias, "is added once, after the sum over the ranks")
            return own.want(bias, "once")
        return own.whole(bias, "is added to a sum over the ranks")
    o = own.owners(out)
    ob = own.owners(bias)
    if o is None:
        return own.whole(bias, "is added to a whole tensor")
    if ob is not None and not own.merge(o, _beside(ob, dims, o.ndim).expand(o.shape)):
        own.whole(bias, "is added to a tensor that is cut otherwise")
        return None
    w = own.open_weights(bias)
    if w is not None:
        shape = own.shape(bias)
        cut = any(
            isinstance(r, tuple) and varies(o, r[1]) and try_cut(own, w, d, _aligned(shape, o.ndim, d, r[1]), o)
            for d, r in dims.items()
        )
        if not cut:
            own.note(bias, "is shared by everything that is cut where it is used")
    own.want(bias, "as", dims)
    return None


def _beside(ob: Tensor, dims: dict[int, tuple[int, int] | Tensor], ndim: int) -> Tensor:
    """Owners of what is added, with its dims where they are in the result."""
    view = [1] * ndim
    for d, r in dims.items():
        assert isinstance(r, tuple)
        view[r[1]] = ob.shape[d]
    return ob.reshape(view)


def _aligned(shape: tuple[int, ...], ndim: int, dim: int, out_dim: int) -> tuple[int, ...]:
    """The shape under which dim ``dim`` broadcasts onto ``out_dim`` (a bias over channels has them first)."""
    return tuple(shape[dim] if i == 0 else 1 for i in range(ndim - out_dim)) if len(shape) == 1 else shape


def product(own: Ownership, op: Op, a: int, la: str, b: int, lb: str, lout: str) -> None:
    """Any product of two tensors, dims named by letters."""
    if own.disjoint(a) is not None or own.disjoint(b) is not None:
        from autotp.ownership import disjoint

        return disjoint.product(own, op, a, la, b, lb, lout)
    wa, wb = isinstance(own.states.get(a), Weights), isinstance(own.states.get(b), Weights)
    if wa and wb:
        return _weights_product(own, op, a, la, b, lb, lout)
    if wb:
        return _linear(own, op, a, la, b, lb, lout)
    if wa:
        return _linear(own, op, b, lb, a, la, lout)
    return _activations(own, op, a, la, b, lb, lout)


def _refs(op: Op, labels: str, lout: str) -> dict[int, tuple[int, int] | Tensor]:
    return {d: (op.outs[0], lout.index(c)) for d, c in enumerate(labels) if c in lout}


def _weights_product(own: Ownership, op: Op, a: int, la: str, b: int, lb: str, lout: str) -> None:
    vecs = []
    params: frozenset[int] = frozenset()
    from autotp.ownership.rules_pointwise import agreeing
    from autotp.ownership.state import Vec

    for t, labels in ((a, la), (b, lb)):
        s = own.states[t]
        assert isinstance(s, Weights)
        params |= s.params
        vecs += [Vec(v.param, v.param_dim, lout.index(labels[v.dim]), v.nodes) for v in s.vecs if labels[v.dim] in lout]
        own.want(t, "as", _refs(op, labels, lout))
    own.put(op, Weights(agreeing(own, vecs), params))


def _linear(own: Ownership, op: Op, x: int, lx: str, w: int, lw: str, lout: str) -> None:
    o = own.owners(x)
    state = own.states[w]
    assert isinstance(state, Weights)
    for d, c in enumerate(lw):
        inner = "expert" if c == "e" else "kernel"
        own.role(state, d, ("batch" if c in lx else "out") if c in lout else "in" if c in lx else inner)
    if own.by_tokens(o) and any(own.options(state, d) for d in range(len(lw))):
        own.whole(x, f"meets weights in {op.func.overloadpacket} that are cut, and so need all tokens")
    elif o is not None:
        summed = [c for c in lx if c in lw and c not in lout]
        lost = [d for d, c in enumerate(lx) if c not in lw and c not in lout]
        o = own.merge_along(o, lost)
        if o is not None and _row_or_batch(own, op, x, lx, w, lw, lout, o, summed):
            return
        own.whole(x, f"meets weights in {op.func.overloadpacket} that cannot be cut with it")
    _column(own, op, x, lx, w, lw, lout)


def _row_or_batch(
    own: Ownership, op: Op, x: int, lx: str, w: int, lw: str, lout: str, o: Tensor, summed: list[str]
) -> bool:
    """The activation is cut: along the summed dim (row cut), a shared batch dim, or a dim the weights do not have."""
    state = own.states[w]
    assert isinstance(state, Weights)
    others = [d for d, c in enumerate(lx) if c in lout and varies(o, d)]
    in_sum = [d for d, c in enumerate(lx) if c in summed and varies(o, d)]
    if others and in_sum:
        per_other = own.merge_along(o, in_sum)
        if per_other is None:
            per_sum = own.merge_along(o, others)
            if per_sum is None:
                return False
            o, others = per_sum, []
        else:
            o, in_sum = per_other, []
    if in_sum:
        return len(in_sum) == 1 and _row(own, op, x, lx, w, lw, o, in_sum[0])
    spread = own.trace.objects[w].stride()  # weights expanded along a batch dim are the same all along it
    shared = [d for d in others if lx[d] in lw and spread[lw.index(lx[d])]]
    for d in shared:
        flat = _only(o, d)
        if flat is None or not _cut_with(own, state, lw.index(lx[d]), flat):
            return False
    if not shared:
        own.note(w, "is shared by everything that is cut where it is used, so its gradient is summed over the ranks")
    own.want(x, "own")
    own.want(w, "as", {d: (op.outs[0], lout.index(c)) for d, c in enumerate(lw) if c in lout and c in lx})
    own.put(op, relabel(o, lx, lout, own.shape(op.outs[0])))
    return True


def _only(o: Tensor, dim: int) -> Tensor | None:
    """The owners along ``dim`` if they vary along nothing else."""
    c = core(o)
    return c.reshape(-1) if c.numel() == c.shape[dim] else None


def relabel(o: Tensor, lx: str, lout: str, shape: tuple[int, ...]) -> Tensor:
    """Owners of ``x`` as owners of the result: dims not in it dropped, new ones expanded."""
    for d in reversed(range(o.ndim)):
        if lx[d] not in lout:
            o = o.select(d, 0)
    kept = [c for c in lx if c in lout]
    for i, c in enumerate(lout):
        if c not in kept:
            o = o.unsqueeze(i)
            kept.insert(i, c)
    if kept != list(lout):
        o = o.permute([kept.index(c) for c in lout])
    return o.expand(shape)


def _row(own: Ownership, op: Op, x: int, lx: str, w: int, lw: str, o: Tensor, d: int) -> bool:
    state = own.states[w]
    assert isinstance(state, Weights)
    flat = _only(o, d)
    if flat is None or not _cut_with(own, state, lw.index(lx[d]), flat):
        return False
    own.want(x, "own")
    own.want(w, "own")
    own.partial[op.outs[0]] = -1
    own.put(op, None)
    return True


def _cut_with(own: Ownership, w: Weights, dim: int, owners: Tensor) -> bool:
    """Cut weights along a dim that meets these owners, if some way of cutting it agrees with them."""
    for choice in own.options(w, dim):
        if own.merge(owners, choice[0].nodes):
            own.settle(w, dim, choice)
            return True
    return False


def _column(own: Ownership, op: Op, x: int, lx: str, w: int, lw: str, lout: str) -> None:
    """The activation is whole: cut the weights along a dim of the result, a batch dim, or (input split) the sum."""
    state = own.states[w]
    assert isinstance(state, Weights)
    out, shape = op.outs[0], own.shape(op.outs[0])
    order = sorted(range(len(lw)), key=lambda d: (lw[d] not in lout, lw[d] in lx))
    for d in order:
        c = lw[d]
        if c not in lout and c not in lx:
            continue
        v = own.settle(state, d)
        if v is None:
            continue
        own.want(w, "own")
        if c in lout:
            own.want(x, "as", {lx.index(c): (out, lout.index(c))} if c in lx else {})
            view = [1] * len(shape)
            view[lout.index(c)] = -1
            own.put(op, v.nodes.view(view).expand(shape))
        else:
            own.want(x, "as", {lx.index(c): (w, d)})
            own.split_input |= state.params
            own.partial[out] = -1
            own.put(op, None)
        return
    sizes = [own.shape(w)[d] for d in range(len(lw))]
    own.whole(w, f"its dims {sizes} cannot be dealt to {own.tp} ranks")
    own.whole(x, "meets whole weights")
    own.put(op, None)


def _activations(own: Ownership, op: Op, a: int, la: str, b: int, lb: str, lout: str) -> None:
    """Two activations: nothing may be cut along what is summed; the rest meets in the result."""
    shape = own.shape(op.outs[0])
    met: list[tuple[int, Tensor]] = []
    for t, labels in ((a, la), (b, lb)):
        o = own.owners(t)
        if o is None:
            continue
        merged = own.merge_along(o, [d for d, c in enumerate(labels) if c not in lout])
        if merged is None:
            own.whole(t, f"{op.func.overloadpacket} sums over a dim of it, where it would be cut")
        else:
            met.append((t, relabel(merged, labels, lout, shape)))
    if len(met) == 2 and not own.merge(met[0][1], met[1][1]):
        smaller = met[0] if own.first_yields(met[0][1], met[1][1]) else met[1]
        own.whole(smaller[0], "meets a tensor that is cut otherwise")
        met.remove(smaller)
    for t, labels in ((a, la), (b, lb)):
        own.want(t, "as", _refs(op, labels, lout))
    if met and not own.by_tokens(met[0][1]):
        own.attended.append(own.nodes.distinct(met[0][1]))
    own.put(op, Owned(own.nodes.canonical(met[0][1])) if met else None)


@rule("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "conv2d", "conv1d")
def convolution(own: Ownership, op: Op) -> None:
    """A linear map over channels; the groups of a grouped one stay together."""
    x, w = op.args[0].tid, op.args[1].tid
    bias = op.args[2].tid if op.args[2] is not None else None
    transposed, groups = op.args[6], op.args[8]
    n = len(own.shape(x)) - 2
    if not isinstance(own.states.get(w), Weights):
        return no_rule(own, op)
    space, result, kernel = "xyz"[:n], "XYZ"[:n], "uvw"[:n]
    if groups == 1:
        product(own, op, x, "bc" + space, w, ("co" if transposed else "oc") + kernel, "bo" + result)
    else:
        _grouped(own, op, x, w, transposed, groups)
    if bias is not None:
        add_bias(own, op, bias, {0: (op.outs[0], 1)})
    return None


def _grouped(own: Ownership, op: Op, x: int, w: int, transposed: bool, groups: int) -> None:
    state = own.states[w]
    assert isinstance(state, Weights)
    vecs = [choice[0] for choice in own.options(state, 0)]
    own.role(state, 0, "out")
    out_shape, channels = own.shape(op.outs[0]), own.shape(x)[1]
    o = own.owners(x)
    if o is not None:
        o = own.merge_along(o, [d for d in range(o.ndim) if d != 1])
        o = _only(o, 1) if o is not None and varies(o, 1) else None
    nodes = None
    if vecs and groups >= own.tp and len(vecs[0].nodes) % groups == 0:
        per_group = vecs[0].nodes.view(groups, -1)
        joined = own.merge(per_group, per_group[:, :1])
        if joined and o is not None:
            joined = own.merge(o.view(groups, -1), per_group[:, :1])
        nodes = per_group[:, :1] if joined else None
    if nodes is None or own.settle(state, 0) is None:
        own.whole(x, "meets a grouped convolution that cannot be cut")
        own.whole(w, f"{groups} groups cannot be dealt to {own.tp} ranks")
        return own.put(op, None)
    own.scaled[op.call] = (Count(groups, 1),)
    of = {d: nodes.expand(groups, size // groups).reshape(-1) for d, size in ((0, channels), (1, out_shape[1]))}
    own.want(w, "own")
    own.want(x, "as", {1: of[0]})
    view = [1] * len(out_shape)
    view[1] = -1
    return own.put(op, of[1].view(view).expand(out_shape))


def carry_partial(own: Ownership, op: Op) -> None:
    """Inside one call a partial sum may still be reshaped, cast, scaled by constants and added to."""
    name = op.func.overloadpacket.__name__.rstrip("_")
    partial = [t for t in op.ins if t in own.partial]
    others = [t for t in dict.fromkeys(op.ins) if t not in own.partial]
    scale = own.partial[partial[0]]
    for t in others:
        if own.by_tokens(own.owners(t)):
            own.whole(t, "is added to a sum over the ranks")
            own.put(op, None)
            return None
    if any(own.owners(t) is not None for t in others):
        return _stop_partial(own, op)
    if name in ("add", "sub"):
        for t in others:
            own.note(t, "is added once, after the sum over the ranks")
            own.want(t, "once")
    elif name in ("mul", "div"):
        if any(own.trace.tensors[t].grad for t in others) or (name == "div" and op.args[0].tid not in own.partial):
            return _stop_partial(own, op)
    elif name not in _LINEAR:
        return _stop_partial(own, op)
    for t in op.outs:
        own.partial[t] = scale
        own.states[t] = None
    for t in partial:
        own.want(t, "own")
    return None


_LINEAR = {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "select", "slice",
           "expand", "split", "unbind", "split_with_sizes", *IDENTITY}  # fmt: skip


def _stop_partial(own: Ownership, op: Op) -> None:
    own.new_opaque[own.trace.ops[own.at].call] = f"{op.func.overloadpacket} works on a sum that is not complete"
    for t in op.outs:
        own.states[t] = None
