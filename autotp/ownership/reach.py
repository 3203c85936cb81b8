"""What becomes of a tensor: whether it pays to leave it cut."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property

from autotp.ownership.engine import Ownership
from autotp.ownership.registry import find_rule
from autotp.ownership.rules_movement import cat, movement
from autotp.ownership.rules_pointwise import pointwise
from autotp.ownership.state import Owned
from autotp.record import Op, Trace

_PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "matmul",
    "mv",
    "addmv",
    "convolution",
    "_convolution",
    "conv1d",
    "conv2d",
}


class Reach:
    """Follows tensors forward through the record of a run."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last operation that reads each tensor."""
        return {t: i for i, op in enumerate(self.trace.ops) for t in op.ins}

    @cached_property
    def weights(self) -> set[int]:
        """Tensors computed from parameters and constants alone."""
        tensors = self.trace.tensors
        found = {t for t in self.trace.leaves.values() if tensors[t].parameter}
        for op in self.trace.ops:
            if any(t in found for t in op.ins) and all(t in found or not tensors[t].grad for t in op.ins):
                found.update(t for t in op.outs if t >= 0)
        return found

    def pays(self, own: Ownership, tid: int, at: int) -> bool:
        """Whether a tensor made at operation ``at`` is better left cut along its features than put together.

        It is if everything that reads it (past operations that move elements or take them one by one) sums over the
        features or meets other cut tensors, and the sums are no larger than the tensor is. What meets a whole tensor
        on its way, as a residual stream does, would have to be put together anyhow.
        """
        reached, sums, ends = {tid}, 0, 0
        until = self.last_use.get(tid, -1)
        while (at := at + 1) <= until:
            op = self.trace.ops[at]
            if reached.isdisjoint(op.ins):
                continue
            if op.func.overloadpacket.__name__ in _PRODUCTS and not _by_groups(op):
                ends += 1
                others = [t for t in op.ins if t not in reached]
                sums += self._numel(op.outs[0]) if any(t in self.weights for t in others) else 0
                continue
            if not _by_groups(op) and not self._passes(own, op, reached):
                return False
            reached.update(t for t in op.outs if t >= 0)
            until = max([until, *(self.last_use.get(t, -1) for t in op.outs)])
        return ends > 0 and sums <= self._numel(tid) and reached.isdisjoint(self.trace.outputs)

    def ends_in(self, tid: int, at: int, names: Collection[str]) -> bool:
        """Whether all that becomes of a tensor made at operation ``at`` are operations of these names.

        Past those that move elements or take them one by one.
        """
        reached, ends = {tid}, 0
        until = self.last_use.get(tid, -1)
        while (at := at + 1) <= until:
            op = self.trace.ops[at]
            if reached.isdisjoint(op.ins):
                continue
            if op.func.overloadpacket.__name__ in names:
                ends += 1
                continue
            if find_rule(op) not in (movement, cat, pointwise) or not reached.issuperset(op.writes):
                return False
            reached.update(t for t in op.outs if t >= 0)
            until = max([until, *(self.last_use.get(t, -1) for t in op.outs)])
        return ends > 0 and reached.isdisjoint(self.trace.outputs)

    def _passes(self, own: Ownership, op: Op, reached: set[int]) -> bool:
        """Whether an operation keeps the cut, and what it meets is cut as well."""
        if find_rule(op) not in (movement, cat, pointwise) or not reached.issuperset(op.writes):
            return False
        tensors = self.trace.tensors
        others = [t for t in op.ins if t not in reached and t not in self.weights and tensors[t].grad]
        return all(isinstance(own.states.get(t), Owned) for t in others)

    def _numel(self, tid: int) -> int:
        return math.prod(self.trace.tensors[tid].shape)


def _by_groups(op: Op) -> bool:
    """A convolution that treats groups of channels apart."""
    return op.func.overloadpacket.__name__.endswith("convolution") and op.args[8] > 1
