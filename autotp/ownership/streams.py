"""Token positions as nodes of their own, for sequence parallelism.

A *stream* is a tensor whose token dim is cut: one node per position. Nodes of positions only ever merge with those of
the same position of another stream, all of them at once (a residual add). Everything else that would join them mixes
tokens, and is refused: whatever asked for it then gets the whole tensor, as with any merge that cannot be had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from autotp.ownership.nodes import core

if TYPE_CHECKING:
    from autotp.ownership.nodes import Nodes


@dataclass
class Streams:
    """All streams of one pass: ``first[k]`` is the node of position 0 of stream k, which has ``length[k]`` tokens."""

    nodes: Nodes
    first: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)  # (node, operation) of merges that were refused

    def open(self, n: int) -> Tensor:
        """The nodes of a new stream of ``n`` tokens."""
        first = self.nodes.allocate(n)
        self.first.append(first)
        self.length.append(n)
        return torch.arange(first, first + n)

    def of(self, o: Tensor) -> int | None:
        """The stream (by the node of its first token) that an owner tensor belongs to; None if to none."""
        if not self.first or not o.numel():
            return None
        k = self._number(core(o).reshape(-1)[:1].numpy())[0]
        return None if k < 0 else self.root(self.first[k])

    def root(self, node: int) -> int:
        """The stream of a node that is a stream's first."""
        return int(self.nodes.find(np.array([node]))[0])

    def tokens(self, o: Tensor) -> int:
        """How many tokens the stream of an owner tensor has."""
        return self.length[int(self._number(core(o).reshape(-1)[:1].numpy())[0])]

    def dim(self, o: Tensor) -> int | None:
        """The dim along which an owner tensor holds each token once, in order; None if there is no such dim."""
        c = core(o)
        dims = [d for d in range(c.ndim) if c.shape[d] > 1]
        if len(dims) != 1 or not np.array_equal(self._place(c.reshape(-1).numpy()), np.arange(self.tokens(o))):
            return None
        return dims[0]

    def sound(self, o: Tensor) -> bool:
        """Whether all tokens are there, in order, along one dim, or along one that they were joined into with another.

        Only then is a rank's part the same piece of code at every length.
        """
        c = core(o)
        n = self.tokens(o)
        if sum(s > 1 for s in c.shape) != 1 or c.numel() % n:
            return False
        place, times = self._place(c.reshape(-1).numpy()), c.numel() // n
        return bool((place == np.tile(np.arange(n), times)).all() or (place == np.repeat(np.arange(n), times)).all())

    def may_merge(self, x: np.ndarray, y: np.ndarray, at: int) -> bool:
        """Whether the groups of ``x[i]`` and ``y[i]`` may be merged: token positions only each with its like."""
        if not self.first:
            return True
        kx, ky = self._number(x), self._number(y)
        if (kx < 0).all() and (ky < 0).all():
            return True
        if (kx >= 0).all() and (ky >= 0).all():
            lengths = {self.length[k] for k in np.unique(np.concatenate([kx, ky]))}
            px, py = self._place(x), self._place(y)
            if len(lengths) == 1 and np.array_equal(px, py) and len(np.unique(px)) == lengths.pop():
                return True
        roots = np.array([*(self.root(f) for f in self.first), -1])  # the last is that of parameters
        rx, ry = roots[kx], roots[ky]
        mixed = (rx == ry) | (kx < 0) | (ky < 0)  # otherwise two streams meet, which says nothing of either
        self.refused += [(int(r), at) for r in np.unique(np.concatenate([rx[mixed], ry[mixed]])) if r >= 0]
        return False

    def _number(self, nodes: np.ndarray) -> np.ndarray:
        """The stream that each node belongs to; -1 for nodes of parameters."""
        first, length = np.array(self.first), np.array(self.length)
        k = np.searchsorted(first, nodes, side="right") - 1
        inside = (k >= 0) & (nodes < first[k] + length[k])
        return np.where(inside, k, -1)

    def _place(self, nodes: np.ndarray) -> np.ndarray:
        """The position of each node in its stream."""
        return nodes - np.array(self.first)[self._number(nodes)]
