"""Operations along some dims that leave all others alone: transforms, linear algebra, distances, windows, look-ups."""

from __future__ import annotations

import math

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import core
from autotp.ownership.registry import no_rule, rule
from autotp.ownership.rules_dims import Operand, Places, aligned, argument, by_dims
from autotp.ownership.rules_pointwise import pointwise
from autotp.ownership.state import Owned, Weights
from autotp.record import Op
from autotp.trees import Ref


def _except(n: int, touched: set[int]) -> tuple[int | None, ...]:
    return tuple(None if d in touched else d for d in range(n))


def _along(own: Ownership, op: Op, touched: set[int]) -> None:
    """One operand; the result has the same dims, the untouched ones equally long."""
    tid = op.ins[0]
    n = len(own.shape(tid))
    places = _except(n, touched)
    by_dims(own, op, [Operand(tid, places)], [d for d in places if d is not None], [places] * len(op.outs))


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def fft(own: Ownership, op: Op) -> None:
    """Fourier transforms."""
    n = len(own.shape(op.ins[0]))
    _along(own, op, {d % n for d in argument(op, "dim")})


@rule("renorm")
def renorm(own: Ownership, op: Op) -> None:
    """Every index of one dim is scaled on its own."""
    n = len(own.shape(op.ins[0]))
    _along(own, op, set(range(n)) - {argument(op, "dim") % n})


@rule("linalg_cross")
def cross(own: Ownership, op: Op) -> None:
    """Cross products along one dim."""
    shape = own.shape(op.outs[0])
    dim = argument(op, "dim") % len(shape)
    free = [d for d in range(len(shape)) if d != dim]
    by_dims(own, op, [aligned(own, a.tid, shape) for a in op.args[:2]], free)


rule("complex", "polar")(pointwise)


@rule("glu")
def glu(own: Ownership, op: Op) -> None:
    """The first half of a dim meets the second."""
    tid, dim = op.ins[0], argument(op, "dim")
    o = own.owners(tid)
    if o is None or isinstance(own.states.get(tid), Weights):
        return no_rule(own, op)
    first, second = o.chunk(2, dim)
    if not own.merge(first, second, o):
        return own.all_whole(op, f"the halves of its dim {dim % o.ndim} would be on different ranks")
    own.want(tid, "own")
    return own.put(op, Owned(own.nodes.canonical(first)))


@rule("_cdist_forward", "_euclidean_dist")
def distances(own: Ownership, op: Op) -> None:
    """Distances of the rows of two matrices, for every matrix of a batch."""
    shape = own.shape(op.outs[0])
    batch = len(shape) - 2
    operands = []
    for tid, rows in ((op.args[0].tid, batch), (op.args[1].tid, batch + 1)):
        outer = own.shape(tid)[:-2]
        shift = batch - len(outer)
        same = [d + shift if n == shape[d + shift] else None for d, n in enumerate(outer)]
        operands.append(Operand(tid, (*same, rows, None)))
    by_dims(own, op, operands, range(len(shape)))


@rule("_trilinear")
def trilinear(own: Ownership, op: Op) -> None:
    """A product of three tensors (``nn.Bilinear``); a cut begins at a dim that only the weights have."""
    n = len(own.shape(op.args[0].tid)) + len(op.args[3])
    summed = {d % n for d in argument(op, "sumdim")}
    kept = [d for d in range(n) if d not in summed]
    operands = []
    for x, expanded in zip(op.args[:3], op.args[3:6], strict=True):
        dims = [d for d in range(n) if d not in {e % n for e in expanded}]
        operands.append(Operand(x.tid, tuple(kept.index(d) if d in kept else None for d in dims)))
    by_dims(own, op, operands, range(len(kept)))


@rule("_weight_norm_interface")
def weight_norm(own: Ownership, op: Op) -> None:
    """Directions scaled to given lengths: every index of one dim on its own."""
    n, dim = len(own.shape(op.args[0].tid)), argument(op, "dim")
    one = tuple(d if d == dim else None for d in range(n))
    operands = [Operand(a.tid, one) for a in op.args[:2]]
    by_dims(own, op, operands, [dim] if dim >= 0 else [], [range(n), one])


@rule("diag_embed")
def diag_embed(own: Ownership, op: Op) -> None:
    """The last dim becomes the diagonal of two new ones."""
    n = len(own.shape(op.outs[0]))
    touched = {argument(op, "dim1") % n, argument(op, "dim2") % n}
    free = [d for d in range(n) if d not in touched]
    by_dims(own, op, [Operand(op.ins[0], (*free, None))], free)


@rule("searchsorted", "bucketize")
def searchsorted(own: Ownership, op: Op) -> None:
    """Places in sorted rows: the dims of several rows, or all of them if there is one row for all."""
    rows, x = argument(op, "sorted_sequence") or argument(op, "boundaries"), argument(op, "self")
    if not isinstance(x, Ref) or len(op.ins) > 2:
        return no_rule(own, op)
    n, several = len(own.shape(x.tid)), len(own.shape(rows.tid)) > 1
    free = list(range(n - 1 if several else n))
    sequence = Operand(rows.tid, (*free, None) if several else (None,))
    return by_dims(own, op, [Operand(x.tid, tuple(range(n))), sequence], free)


# ---------------------------------------------------------------- images


@rule("im2col")
def im2col(own: Ownership, op: Op) -> None:
    """Windows: all elements that a channel has in a window belong to it."""
    x = op.ins[0]
    o, size = own.owners(x), math.prod(argument(op, "kernel_size"))
    merged = own.merge_along(o, [o.ndim - 2, o.ndim - 1]) if o is not None else None
    if merged is None or isinstance(own.states.get(x), Weights):
        return own.all_whole(op, "is taken apart into windows")
    own.want(x, "own")
    channels = merged[..., :1, :1].squeeze(-1).repeat_interleave(size, -2)
    return own.put(op, Owned(channels.expand(own.shape(op.outs[0]))))


@rule("col2im")
def col2im(own: Ownership, op: Op) -> None:
    """Windows put together: what a channel has in them stays together."""
    x = op.ins[0]
    o, size = own.owners(x), math.prod(argument(op, "kernel_size"))
    merged = own.merge_along(o, [o.ndim - 1]) if o is not None else None
    if merged is None or isinstance(own.states.get(x), Weights):
        return own.all_whole(op, "is put together from windows")
    channels = core(merged[..., :1].expand(*merged.shape[:-1], 1)).expand(*merged.shape[:-1], 1)
    channels = channels.reshape(*merged.shape[:-2], -1, size)
    if not own.merge(channels, channels[..., :1], merged):
        return own.all_whole(op, f"{size} elements of a window would be on different ranks")
    own.want(x, "own")
    one = own.nodes.canonical(channels)[..., :1].unsqueeze(-1)
    return own.put(op, Owned(one.expand(own.shape(op.outs[0]))))


@rule("max_unpool2d", "max_unpool3d")
def max_unpool(own: Ownership, op: Op) -> None:
    """Every channel by its own indices."""
    n = len(own.shape(op.outs[0]))
    space = 3 if op.func.overloadpacket.__name__.endswith("3d") else 2
    places = _except(n, set(range(n - space, n)))
    operands = [Operand(a.tid, places) for a in op.args[:2]]
    by_dims(own, op, operands, range(n - space))


# ---------------------------------------------------------------- look-ups


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(own: Ownership, op: Op) -> None:
    """Sums, means or maxima of rows: every feature on its own."""
    table = op.args[0].tid
    if argument(op, "sparse"):
        return own.all_whole(op, "its gradient is sparse")
    w = own.open_weights(table)
    if w is not None:
        own.role(w, 0, "rows")
        own.role(w, 1, "features")
    maximum = (0, 1) if argument(op, "mode") == 2 else None
    return by_dims(own, op, [Operand(table, (None, 1))], [1], [(0, 1), None, None, maximum])


# ---------------------------------------------------------------- linear algebra


def _matrices(own: Ownership, op: Op, operands: list[Operand], batch: tuple[int, ...]) -> None:
    """Every matrix of a batch on its own: all results begin with the dims of the batch."""
    n = len(batch)
    results: list[Places | None] = []
    for t in op.outs:
        size = own.shape(t) if t >= 0 else ()
        results.append((*range(n), *[None] * (len(size) - n)) if size[:n] == batch else None)
    by_dims(own, op, operands, range(n), results, batch)


def _batched(own: Ownership, tid: int, batch: tuple[int, ...], inner: int) -> Operand:
    shape = own.shape(tid)
    outer = shape[: len(shape) - inner]
    shift = len(batch) - len(outer)
    return Operand(tid, (*(d + shift if m == batch[d + shift] else None for d, m in enumerate(outer)), *[None] * inner))


@rule("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals",
      "linalg_qr", "_linalg_det", "_linalg_slogdet", "linalg_matrix_exp", "linalg_lu", "linalg_lu_factor_ex",
      "linalg_ldl_factor_ex", "cholesky_inverse")  # fmt: skip
def of_one_matrix(own: Ownership, op: Op) -> None:
    """A decomposition or function of a matrix."""
    batch = own.shape(op.args[0].tid)[:-2]
    _matrices(own, op, [_batched(own, op.args[0].tid, batch, 2)], batch)


@rule("linalg_pinv")
def pseudo_inverse(own: Ownership, op: Op) -> None:
    """The inverse that there is always, up to tolerances per matrix."""
    batch = own.shape(op.args[0].tid)[:-2]
    inner = {t: 2 if t == op.args[0].tid else 0 for t in dict.fromkeys(op.ins)}
    _matrices(own, op, [_batched(own, t, batch, k) for t, k in inner.items()], batch)


@rule("_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "cholesky_solve")
def solve(own: Ownership, op: Op) -> None:
    """Linear equations: a matrix, and a matrix or a vector of right sides."""
    first, second = op.args[0].tid, op.args[1].tid
    a, b = own.shape(first), own.shape(second)
    vector = op.func.overloadpacket.__name__ == "_linalg_solve_ex" and (len(b) == 1 or b == a[:-1])
    inner = 1 if vector else 2
    batch = own.shape(op.outs[0])[: len(own.shape(op.outs[0])) - inner]
    _matrices(own, op, [_batched(own, first, batch, 2), _batched(own, second, batch, inner)], batch)


@rule("_linalg_check_errors")
def check_errors(own: Ownership, op: Op) -> None:
    """Raises for any matrix of a batch: each rank looks at its own."""
    own.want(op.ins[0], "own")
