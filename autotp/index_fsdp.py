"""FSDP2 over index-cut parameters whose first dim both of them cut.

FSDP deals the rows that a tensor-parallel rank holds out once more, over its own axis, and
describes the result by a stock placement that supposes even, contiguous blocks. `follow_fsdp`
replaces that description: first the rows of one FSDP rank over all tensor-parallel ranks
(`_Outer`), then, within these, those of each tensor-parallel rank (`_Inner`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .index_ranges import Layout, indices
from .index_shard import IndexShard
from .torch_compat import dtensor_spec, fsdp_params, set_fsdp_spec


class _Outer(IndexShard):
    """Rows of one FSDP rank, one tensor-parallel rank after the other."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _outer, (self.layout, self.cut)


class _Inner(IndexShard):
    """Of the rows of this FSDP rank, those of each tensor-parallel rank."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _inner, (self.layout, self.cut)

    def _logical_size(self, logical_shape: Any) -> int:
        return self.layout.size  # torch does not know how much the outer placement leaves


def _outer(layout: Layout, cut: Layout) -> _Outer:
    return _Outer(layout, cut=cut)


def _inner(layout: Layout, cut: Layout) -> _Inner:
    return _Inner(layout, cut=cut)


def follow_fsdp(module: nn.Module) -> int:
    """Describe FSDP's shards of index-cut parameters rightly. Call after the last `fully_shard`.

    Returns how many parameters it concerned. Without it, full_tensor() and checkpoints of
    these parameters raise (training itself is right either way).
    """
    count = 0
    for fsdp_param in fsdp_params(module):
        spec = dtensor_spec(fsdp_param.sharded_param)
        fsdp, tp = spec.placements[-2:]
        if type(tp) is not IndexShard or getattr(fsdp, "dim", None) != tp.dim:
            continue
        num_shards = spec.mesh.size(-2)
        parts = fsdp_parts(tp.layout, num_shards)
        here = parts[spec.mesh.get_local_rank(spec.mesh.ndim - 2)]
        outer = Layout(tp.dim, tuple(_ranges([i for part in each for i in part]) for each in parts), repeats=True)
        inner = Layout.from_indices(tp.dim, _positions(here))
        placements = (*spec.placements[:-2], _Outer(outer, cut=tp.layout), _Inner(inner, cut=tp.layout))
        set_fsdp_spec(fsdp_param, placements)
        count += 1
    return count


def fsdp_parts(cut: Layout, num_shards: int) -> list[list[list[int]]]:
    """Global indices held by [FSDP rank][tensor-parallel rank]: FSDP cuts locals as torch.chunk."""
    parts: list[list[list[int]]] = []
    for shard in range(num_shards):
        parts.append([])
        for rank in range(cut.num_ranks):
            held = indices(cut, rank)
            block = -(-len(held) // num_shards)
            parts[-1].append(held[shard * block : (shard + 1) * block])
    return parts


def _positions(parts: list[list[int]]) -> list[range]:
    ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
    return [range(end - len(part), end) for end, part in zip(ends, parts, strict=True)]


def _ranges(held: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((i, i + 1) for i in held)
