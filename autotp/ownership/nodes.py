"""Nodes (one per index of every parameter dim) and their merging into groups that must stay on one rank.

An *owner tensor* has the shape of an activation and holds, for every element, the node that owns it. Dims along which
owners do not vary are kept expanded (stride 0), so that its cost does not grow with batch or length.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Nodes:
    """A union-find over arrays. Node 0 is never handed out, and those at the end not yet."""

    def __init__(self) -> None:
        self.parent = np.zeros(1, dtype=np.int64)
        self.used = 1
        self.rank: np.ndarray | None = None  # of every group the rank that has it already, where a layout is given

    def allocate(self, n: int) -> int:
        """Make ``n`` new nodes and return the first."""
        base, size = self.used, len(self.parent)
        self.used += n
        if self.used > size:
            self.parent = np.concatenate([self.parent, np.arange(size, 2 * self.used)])
            if self.rank is not None:
                self.rank = np.concatenate([self.rank, np.full(2 * self.used - size, -1)])
        return base

    def give(self, nodes: np.ndarray, rank: int) -> None:
        """A rank has these already."""
        if self.rank is None:
            self.rank = np.full(len(self.parent), -1)
        self.rank[self.find(nodes)] = rank

    def parts_ranks(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Whether merging ``a`` and ``b`` pairwise would join groups that two ranks have already."""
        if self.rank is None:
            return False
        names, inverse = np.unique(np.concatenate([self.find(a), self.find(b)]), return_inverse=True)
        joined = _joined(len(names), inverse[: len(a)], inverse[len(a) :])
        mine = self.rank[names]
        groups, mine = joined[mine >= 0], mine[mine >= 0]
        low, high = np.full(len(names), len(names) + mine.max(initial=0)), np.full(len(names), -1)
        np.minimum.at(low, groups, mine)
        np.maximum.at(high, groups, mine)
        return bool((high > low).any())

    def find(self, a: np.ndarray) -> np.ndarray:
        """The group that each node of ``a`` belongs to, named by its smallest node."""
        root = self.parent[a]
        while True:
            up = self.parent[root]
            if np.array_equal(up, root):
                self.parent[a] = root
                return root
            root = up

    def canonical(self, o: Tensor) -> Tensor:
        """The owner tensor with every node replaced by its group, expanded dims kept expanded."""
        c = core(o)
        return compress(torch.from_numpy(self.find(c.numpy().reshape(-1)).reshape(tuple(c.shape))).expand(o.shape))

    def distinct(self, o: Tensor) -> np.ndarray:
        """The different groups in an owner tensor."""
        return np.unique(self.find(core(o).numpy().reshape(-1)))

    def union(self, a: np.ndarray, b: np.ndarray) -> None:
        """Merge the group of ``a[i]`` with that of ``b[i]`` for every i."""
        ra, rb = self.find(a), self.find(b)
        _union(self.parent, ra, rb)
        if self.rank is not None:
            old = np.unique(np.concatenate([ra, rb]))
            np.maximum.at(self.rank, self.find(old), self.rank[old])

    def groups_after(self, a: np.ndarray, b: np.ndarray, *watched: np.ndarray) -> list[int]:
        """How many groups each ``watched`` node array would have, were ``a`` and ``b`` merged pairwise."""
        ra, rb = self.find(a), self.find(b)
        watch = [np.unique(self.find(w)) for w in watched]
        names, inverse = np.unique(np.concatenate([ra, rb, *watch]), return_inverse=True)
        parent = _joined(len(names), inverse[: len(ra)], inverse[len(ra) : len(ra) + len(rb)])
        out, at = [], len(ra) + len(rb)
        for w in watch:
            out.append(len(np.unique(parent[inverse[at : at + len(w)]])))
            at += len(w)
        return out


def _joined(n: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The group of each of ``n`` things, merged pairwise."""
    parent = np.arange(n)
    _union(parent, a, b)
    while not np.array_equal(parent, parent[parent]):
        parent = parent[parent]
    return parent


def _union(parent: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    while True:
        differ = a != b
        if not differ.any():
            return
        a, b = a[differ], b[differ]
        low, high = np.minimum(a, b), np.maximum(a, b)
        np.minimum.at(parent, high, low)
        a, b = _roots(parent, low), _roots(parent, high)


def _roots(parent: np.ndarray, a: np.ndarray) -> np.ndarray:
    while True:
        up = parent[a]
        if np.array_equal(up, a):
            return a
        a = up


def core(o: Tensor) -> Tensor:
    """The owner tensor without its expanded extent: size 1 where owners do not vary."""
    for d in range(o.ndim):
        if o.shape[d] > 1 and o.stride(d) == 0:
            o = o.narrow(d, 0, 1)
    return o


def compress(o: Tensor) -> Tensor:
    """Expand every dim along which the owners turn out not to vary."""
    shape = o.shape
    o = core(o)
    for d in range(o.ndim):
        if o.shape[d] > 1:
            first = o.narrow(d, 0, 1)
            if bool((o == first).all()):
                o = first
    if o.untyped_storage().nbytes() > 4 * o.numel() * o.itemsize:
        o = o.clone()  # else the few numbers kept would hold all the memory they were found in
    return o.expand(shape)


def varies(o: Tensor, dim: int) -> bool:
    """Whether owners differ along a dim (the tensor must be compressed)."""
    return o.shape[dim] > 1 and o.stride(dim) != 0


def pairs(a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Two owner tensors, broadcast against each other, as arrays of the node pairs that meet."""
    a, b = torch.broadcast_tensors(a, b)
    for d in range(a.ndim):
        if a.shape[d] > 1 and a.stride(d) == 0 and b.stride(d) == 0:
            a, b = a.narrow(d, 0, 1), b.narrow(d, 0, 1)
    return a.reshape(-1).numpy(), b.reshape(-1).numpy()


def along(o: Tensor, dims: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The node pairs to merge so that owners no longer vary along ``dims``."""
    first = o
    for d in dims:
        first = first.narrow(d, 0, 1)
    return pairs(o, first.expand(o.shape))
