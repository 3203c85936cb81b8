"""Reductions, softmax, scans and ranking along dims."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.ownership.registry import rule
from autotp.ownership.state import Owned, Vec, Weights
from autotp.record import Op


def reduced_dims(op: Op, ndim: int) -> list[int]:
    """The dims an operation works along; all of them where it names none."""
    names = [a.name for a in op.func._schema.arguments]
    for name in ("dim", "dims", "axis"):
        if name in names:
            at = names.index(name)
            value: Any = op.args[at] if at < len(op.args) else op.kwargs.get(name, _default(op, at))
            if value is None or (isinstance(value, (list, tuple)) and not value):
                return list(range(ndim))
            dims = value if isinstance(value, (list, tuple)) else [value]
            return sorted(d % ndim for d in dims) if ndim else []
    return list(range(ndim))


def _default(op: Op, at: int) -> Any:
    a = op.func._schema.arguments[at]
    return a.default_value if a.has_default_value() else None


def result_dim(d: int, dims: list[int], keep: bool) -> int | None:
    """Where dim ``d`` of the operand is in the result."""
    if d in dims:
        return d if keep else None
    return d if keep else d - sum(x < d for x in dims)


@rule(
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "logsumexp",
    "prod",
    "any",
    "all",
    "argmax",
    "argmin",
    "linalg_vector_norm",
    "norm",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "cummax",
    "cummin",
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "softmax",
    "log_softmax",
    "sort",
    "argsort",
    "topk",
    "median",
    "nanmedian",
    "kthvalue",
    "mode",
    "nansum",
    "count_nonzero",
    "aminmax",
    "cumsum_",
)
def reduce(own: Ownership, op: Op) -> None:
    """Merge owners along the dims worked along; a sum or mean may instead be completed over the ranks."""
    tid = op.ins[0]
    shape = own.shape(tid)
    name = op.func.overloadpacket.__name__
    if len(op.ins) > 1:
        return own.all_whole(op, f"op {op.func} has no rule")
    dims = reduced_dims(op, len(shape))
    state = own.states.get(tid)
    if isinstance(state, Weights) and own.trace.tensors[tid].dtype.is_floating_point:
        return _reduce_weights(own, op, tid, state, dims)
    o = own.owners(tid)
    if o is None:
        return own.all_whole(op, f"goes through {name} with other whole tensors")
    merged = own.merge_along(o, dims)
    if merged is not None:
        return _spread_result(own, op, tid, merged, dims)
    varied = any(varies(o, d) for d in range(o.ndim) if d not in dims)
    if name in ("sum", "mean") and not varied and not own.by_tokens(o):
        own.want(tid, "own")
        own.partial[op.outs[0]] = tid if name == "mean" else -1
        own.put(op, None)
        return None
    return own.all_whole(op, f"{name} runs over dim {dims} of it, where it would be cut")


def _spread_result(own: Ownership, op: Op, tid: int, merged: Tensor, dims: list[int]) -> None:
    own.want(tid, "own")
    for i, t in enumerate(op.outs):
        if t < 0:
            continue
        o, shape = merged, own.shape(t)
        if len(shape) == o.ndim:
            for d in dims:
                o = o.narrow(d, 0, 1)
        else:
            for d in sorted(dims, reverse=True):
                o = o.select(d, 0)
        o = o.expand(shape)
        own.put(op, Owned(o) if any(varies(o, d) for d in range(o.ndim)) else None, i)


def _reduce_weights(own: Ownership, op: Op, tid: int, state: Weights, dims: list[int]) -> None:
    n = len(own.shape(tid))
    out = op.outs[0]
    keep = len(own.shape(out)) == n
    places = {d: result_dim(d, dims, keep) for d in range(n) if d not in dims}
    own.want(tid, "as", {d: (out, r) for d, r in places.items() if r is not None})
    for i, t in enumerate(op.outs):
        vecs = [Vec(v.param, v.param_dim, places[v.dim] or 0, v.nodes) for v in state.vecs if v.dim not in dims]
        own.put(op, Weights(tuple(vecs), state.params) if t >= 0 else None, i)


@rule("_local_scalar_dense")
def number(own: Ownership, op: Op) -> None:
    """A tensor that becomes a number of Python's: the same on all ranks, so the tensor is needed whole."""
    own.all_whole(op, "its value is read by Python code")
