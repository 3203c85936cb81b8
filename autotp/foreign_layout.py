"""The layout that a foreign plan states: the rank of each index, and where indices that belong together are torn."""

from __future__ import annotations

import numpy as np

from autotp.ownership.dealing import Dealing
from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import Nodes

NOWHERE, TORN = -1, -2  # in place of a rank: a group that is on none, and one that is on several (told once)


class Grouped(Nodes):
    """Nodes of which some lie on a stated rank; notes each merge of groups that lie on different ones."""

    def __init__(self, own: Ownership, stated: np.ndarray) -> None:
        self.parent, self.used, self.own, self.stated = own.nodes.parent, own.nodes.used, own, stated
        self.rank = own.nodes.rank
        self.label = stated.copy()
        self.bases = np.array(sorted(own.base.values()))
        self.torn: list[tuple[int, int, int]] = []  # operation, and two nodes that are apart

    def allocate(self, n: int) -> int:
        """Nodes of a buffer: on no stated rank."""
        base = super().allocate(n)
        more = np.full(len(self.parent) - len(self.label), NOWHERE)
        self.stated, self.label = np.concatenate([self.stated, more]), np.concatenate([self.label, more])
        return base

    def union(self, a: np.ndarray, b: np.ndarray) -> None:
        """Merge, and compare the ranks of what is merged."""
        before = np.unique(np.concatenate([self.find(a), self.find(b)]))
        super().union(a, b)
        before = before[self.label[before] != NOWHERE]
        labels = self.label[before]
        roots, place = np.unique(self.find(before.copy()), return_inverse=True)
        low, high = np.full(len(roots), np.iinfo(np.int64).max), np.full(len(roots), NOWHERE)
        np.minimum.at(low, place, labels)
        np.maximum.at(high, place, labels)
        self.label[roots] = np.where(low < high, TORN, low)
        for root in roots[(low < high) & (low != TORN)][:1]:
            self.torn.append((self.own.at, *self._pair(int(root))))

    def _pair(self, root: int) -> tuple[int, int]:
        """Two nodes of one group on different ranks, of one parameter dim if there are such."""
        members = np.flatnonzero((self.find(np.arange(len(self.parent))) == root) & (self.stated >= 0))
        ranks, dims = self.stated[members], np.searchsorted(self.bases, members, side="right")
        first = np.unique(dims, return_index=True)[1][np.unique(dims, return_inverse=True)[1]]
        apart = np.flatnonzero(ranks != ranks[first])
        if len(apart):
            return int(members[first[apart[0]]]), int(members[apart[0]])
        return int(members[0]), int(members[np.flatnonzero(ranks != ranks[0])[0]])


class Stated(Dealing):
    """The layout that a plan states, in place of one that is worked out."""

    def __init__(self, own: Ownership, tp: int, ranks: np.ndarray) -> None:
        super().__init__(own)
        self.tp = tp
        self.__dict__["rank_of"] = ranks
