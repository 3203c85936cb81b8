"""The few collectives of tensor parallelism, with their gradients.

==========  =======================  ===========================================
            forward                  backward
==========  =======================  ===========================================
enter       identity                 sum over the ranks
leave       sum over the ranks       identity
gather      all parts, in order      this rank's part
once        first rank's value       identity
==========  =======================  ===========================================

A whole tensor has the same gradient, complete, on all ranks; a cut one has its part. (Megatron-LM, arXiv 1909.08053,
calls enter and leave *f* and *g*.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autotp.call_edits import Cuts, Indices
from autotp.lost_ranks import Calls, calls_of
from autotp.torch_compat import reduce_scatter, traced_all_gather, traced_all_reduce, traced_reduce_scatter
from autotp.torch_dynamo import at_trace


@dataclass(frozen=True)
class Ranks:
    """The ranks of one tensor-parallel group as one of them sees it."""

    group: Any
    rank: int
    size: int
    alone: bool = True  # not one group of a mesh that has several
    at: str = field(default="", compare=False)  # the module whose collectives these are
    name: str = field(init=False, compare=False)  # the group's, by which the compiler knows it
    calls: Calls = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", getattr(self.group, "group_name", ""))
        object.__setattr__(self, "calls", calls_of(self.group))

    @cached_property
    def first(self) -> int:
        """Global rank of the group's first member."""
        return dist.get_global_rank(self.group, 0)

    def sum_(self, x: Tensor) -> Tensor:
        """Sum in place over the ranks (while compiling, into a new tensor)."""
        if torch.compiler.is_compiling():
            return traced_all_reduce(x, self.name)
        self.calls.run("all_reduce", self.at, x, dist.all_reduce, x)
        return x

    def sum_pieces(self, pieces: Tensor) -> Tensor:
        """Of ``pieces``, one for each rank, this rank's, summed over the ranks."""
        if torch.compiler.is_compiling():
            return traced_reduce_scatter(pieces.flatten(0, 1), self.size, self.name)
        summed: Tensor = self.calls.run("reduce_scatter", self.at, pieces, reduce_scatter, pieces)
        return summed

    def all_parts(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor; all must have the same shape."""
        if torch.compiler.is_compiling():
            return list(traced_all_gather(x.unsqueeze(0), self.size, self.name).unbind(0))
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.calls.run("all_gather", self.at, x, dist.all_gather, parts, x)
        return parts

    def broadcast_(self, x: Tensor) -> Tensor:
        """The first rank's tensor, in place."""
        self.calls.run("broadcast", self.at, x, dist.broadcast, x, self.first)
        return x


def differentiated() -> bool:
    """Whether a backward is itself differentiated. Compiled ones never are."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if differentiated():  # create_graph: the sum is differentiated too
            return leave(grad, ctx.ranks), None
        return ctx.ranks.sum_(grad.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        if not torch.compiler.is_compiling():
            ctx.mark_dirty(x)
        return ranks.sum_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (enter(grad, ctx.ranks) if differentiated() else grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, indices: Indices, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.mine, ctx.ranks = dim, indices[ranks.rank], ranks
        sizes = [len(i) for i in indices]
        parts = ranks.all_parts(padded(x, dim, max(sizes)).contiguous())
        whole = torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)
        places = _places(indices)
        return whole if places is None else whole.index_select(dim, places.to(x.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = enter(grad, ctx.ranks) if differentiated() else grad
        return part(grad, ctx.dim, ctx.mine), None, None, None


class _GatherTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cuts: Cuts, ranks: Ranks) -> Tensor:
        ctx.cuts, ctx.ranks = cuts, ranks
        shape = list(x.shape)
        for dim, indices in cuts:
            x = padded(x, dim, max(map(len, indices)))
            shape[dim] = 1 + max(max(i) for i in indices if len(i))
        whole = x.new_empty(shape)
        for rank, tile in enumerate(ranks.all_parts(x.contiguous())):
            for dim, indices in cuts:
                tile = tile.narrow(dim, 0, len(indices[rank]))
            _put(whole, tile, [(dim, indices[rank]) for dim, indices in cuts])
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = enter(grad, ctx.ranks) if differentiated() else grad
        for dim, indices in ctx.cuts:
            grad = part(grad, dim, indices[ctx.ranks.rank])
        return grad, None, None


def _put(whole: Tensor, tile: Tensor, cuts: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Write a tile to where it belongs."""
    for i, (dim, mine) in enumerate(cuts):
        if not isinstance(mine, range):
            for j, at in enumerate(mine):
                _put(whole.narrow(dim, at, 1), tile.narrow(dim, j, 1), cuts[i + 1 :])
            return
        whole = whole.narrow(dim, mine.start, len(mine))
    whole.copy_(tile)


@at_trace
def _places(indices: Indices) -> Tensor | None:
    return _cached_places(indices)


@lru_cache(maxsize=4096)
def _cached_places(indices: Indices) -> Tensor | None:
    """Where in the concatenated parts each element of the whole is; None if it is in order already."""
    runs = [i for i in indices if isinstance(i, range)]
    if len(runs) == len(indices) and all(a.stop == b.start for a, b in pairwise(runs)):
        return None
    order = torch.cat([torch.tensor(i, dtype=torch.int64) for i in indices])
    places = torch.empty(int(order.max()) + 1, dtype=torch.int64)
    places[order] = torch.arange(len(order))
    return places


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return x.view_as(x) if first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if differentiated():
            grad = _OnceGrad.apply(grad, ctx.first)
        return grad, None


class _OnceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Once.apply(grad, ctx.first), None


def enter(x: Tensor, ranks: Ranks) -> Tensor:
    """A whole tensor into a cut region: its gradient is summed, once for all who read this tensor."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if torch.compiler.is_compiling():
        return _Enter.apply(x, ranks)
    known = getattr(x, "_autotp_entered", None)
    if known is not None and known[0] == x._version and known[1] is ranks.group:
        entered: Tensor | None = known[2]()
        if entered is not None:
            return entered
    y: Tensor = _Enter.apply(x, ranks)
    # Weakly, as y is a view of x and the two would never be freed. Whoever has read y keeps it.
    x._autotp_entered = (x._version, ranks.group, TensorWeakRef(y))  # type: ignore[attr-defined]
    return y


def leave(x: Tensor, ranks: Ranks) -> Tensor:
    """A partial sum out of a cut region: summed over the ranks."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _Leave.apply(x, ranks)
    if x._is_view() or x.is_leaf:
        x = x.clone()
    if not (x.requires_grad and torch.is_grad_enabled()):
        return ranks.sum_(x)
    return _Leave.apply(x, ranks)


def gather(x: Tensor, cuts: Cuts, ranks: Ranks) -> Tensor:
    """The parts of all ranks as the whole tensor; ``indices[rank]`` of a cut dim say where a part's elements belong.

    Parts that are cut along several dims are tiles: dims cannot be joined one after the other, as ranks that have the
    same indices of one dim have others of another.
    """
    if len(cuts) > 1:
        return _GatherTiles.apply(x, cuts, ranks)
    for dim, indices in cuts:
        x = _Gather.apply(x, dim, indices, ranks)
    return x


def once(x: Tensor, ranks: Ranks) -> Tensor:
    """Something added to a partial sum: only the first rank adds it."""
    return _Once.apply(x, ranks.rank == 0)


def part(x: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    """The elements of a whole tensor at ``indices`` along ``dim``: a view where they are contiguous."""
    if isinstance(indices, range):
        return x.narrow(dim, indices.start, len(indices))
    return x.index_select(dim, torch.tensor(indices, dtype=torch.int64, device=x.device))


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros at the end of a dim up to ``size``."""
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
