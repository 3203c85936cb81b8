"""Deal the groups out to the ranks, and say which part of every tensor a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import core

Sets = dict[int, tuple[Sequence[int], ...]]  # dim -> for each rank the indices it holds


class Tokens(tuple[Sequence[int], ...]):
    """Who holds which tokens of the sample. At run time there are others: ``stream`` says where to ask."""

    stream: int

    def __new__(cls, per_rank: Sequence[Sequence[int]], stream: int) -> Tokens:
        made = super().__new__(cls, per_rank)
        made.stream = stream
        return made

    def __getnewargs__(self) -> tuple[tuple[Sequence[int], ...], int]:  # for copies
        return tuple(self), self.stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.stream == other.stream and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.stream, tuple(self)))


class NotARectangle(Exception):
    """What a rank would hold of a tensor is not a product of index sets, so it is no tensor."""

    def __init__(self, tid: int) -> None:
        super().__init__(tid)
        self.tid = tid


class Dealing:
    """Which rank each group went to, and from that the local part of every tensor of the run."""

    def __init__(self, own: Ownership, uncut: bool = False) -> None:
        """With ``uncut``, what is cut by tokens counts as whole: the program of a call that has too few of them."""
        self.own, self.tp, self.uncut = own, own.tp, uncut
        self._sets: dict[int, Sets] = {}
        self.at_rest: set[int] = set()  # parameters that are kept in parts and used whole

    @cached_property
    def rank_of(self) -> np.ndarray:
        """For every group (by its name, a node) the rank it was dealt to; -1 where nothing is cut."""
        nodes, own = self.own.nodes, self.own
        rank_of = np.full(len(nodes.parent), -1)
        if nodes.rank is not None:
            rank_of = nodes.rank.copy()
        members = []
        for tid, dim in own.cut.items():
            base, n = own.base[tid, dim], own.shape(tid)[dim]
            roots = nodes.find(np.arange(base, base + n))
            members.append(roots[np.sort(np.unique(roots, return_index=True)[1])])
        # small ones first: a tensor joined from several cut ones is balanced if each of them is
        for groups in sorted(members, key=len):
            undealt = groups[rank_of[groups] < 0]
            rank_of[undealt] = deal(len(undealt), self.tp)
        for first, n in zip(own.streams.first, own.streams.length, strict=True):
            each = [m for _, m in shares(n, self.tp)]
            rank_of[nodes.find(np.arange(first, first + n))] = np.repeat(np.arange(self.tp), each)
        return rank_of

    def ranks(self, o: Tensor) -> np.ndarray:
        """The rank of every element of an owner tensor's core."""
        c = core(o)
        return self.rank_of[self.own.nodes.find(c.reshape(-1).numpy())].reshape(tuple(c.shape))

    def sets(self, tid: int) -> Sets:
        """The cut dims of a tensor and who holds which indices of them; empty for a whole tensor."""
        if tid not in self._sets:
            o = self.own.owners(tid)
            self._sets[tid] = {} if o is None or o.numel() == 0 else self.of_owners(o, tid)
        return self._sets[tid]

    def store(self, tid: int, sets: Sets) -> None:
        """Keep a parameter in parts, though all of it is used everywhere."""
        self._sets[tid] = sets
        self.at_rest.add(tid)

    def of_owners(self, o: Tensor, tid: int) -> Sets:
        """As :meth:`sets`, from an owner tensor."""
        stream = self.own.streams.of(o)
        if stream is not None and self.uncut:
            return {}
        ranks = self.ranks(o)
        out: Sets = {}
        per_rank: list[list[np.ndarray]] = []
        for r in range(self.tp):
            mine = ranks == r
            axes = [
                np.flatnonzero(mine.any(axis=tuple(i for i in range(mine.ndim) if i != d))) for d in range(mine.ndim)
            ]
            if not mine.any() or mine.sum() != np.prod([len(a) for a in axes]):
                raise NotARectangle(tid)
            per_rank.append(axes)
        for d in range(o.ndim):
            if ranks.shape[d] > 1 and any(len(axes[d]) < o.shape[d] for axes in per_rank):
                out[d] = tuple(indices(axes[d]) for axes in per_rank)
                if stream is not None and self.own.streams.dim(o) == d:
                    out[d] = Tokens(out[d], stream)
        return out

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are cut anywhere."""
        return bool(self.own.streams.first) and not self.uncut

    def token_parts(self, stream: int | None) -> dict[int, Tokens]:
        """Who holds which tokens of a stream, or of every stream."""
        out = {}
        for tid, o in self.own.scattered.items():
            here = self.own.streams.of(o)
            if stream is None or here == stream:
                out.update({s.stream: s for s in self.of_owners(o, tid).values() if isinstance(s, Tokens)})
        return out

    def of_nodes(self, nodes: Tensor) -> tuple[Sequence[int], ...]:
        """Who holds which index of a vector of nodes."""
        ranks = self.ranks(nodes)
        return tuple(indices(np.flatnonzero(ranks == r)) for r in range(self.tp))

    def local_shape(self, tid: int, rank: int) -> tuple[int, ...]:
        """The shape that a rank holds of a tensor."""
        return local_shape(self.own.shape(tid), self.sets(tid), rank)


def indices(a: np.ndarray) -> Sequence[int]:
    """Sorted indices in their shortest form: a range where they are contiguous."""
    n = len(a)
    return range(int(a[0]), int(a[-1]) + 1) if n and a[-1] - a[0] + 1 == n else tuple(a.tolist())


def shares(n: int, tp: int) -> tuple[tuple[int, int], ...]:
    """The tokens of each rank, of ``n`` in a row: its first and how many; as even as can be, the last rank has most.

    Plain numbers without a ``range``, whose bounds a compiler makes constants. It follows these for all lengths that
    divide, and for all that do not.
    """
    if n % tp == 0:
        return tuple((r * (n // tp), n // tp) for r in range(tp))
    return tuple((r * n // tp, (r + 1) * n // tp - r * n // tp) for r in range(tp))


def local_shape(shape: tuple[int, ...], sets: Sets, rank: int) -> tuple[int, ...]:
    """A global shape with the cut dims as long as on one rank."""
    return tuple(len(sets[d][rank]) if d in sets else n for d, n in enumerate(shape))


def deal(groups: int, tp: int) -> list[int]:
    """Contiguous shares as ``torch.chunk`` makes them, unless that leaves a rank empty: then as even as can be."""
    share = -(-groups // tp)
    if share * (tp - 1) < groups:
        return [g // share for g in range(groups)]
    return [r for r in range(tp) for _ in range(groups // tp + (r < groups % tp))]
