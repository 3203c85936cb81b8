"""Distributed checkpoints of index-cut parameters: one chunk per contiguous range of indices.

With this, `torch.distributed.checkpoint` stores the global tensor in its original order: it
loads into the unsharded model, another layout, or another number of ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from .index_ranges import Layout, LayoutError, Range, indices, shortest
from .torch_compat import chunk_of_spec, dtensor_spec, guard_checkpoints, local_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

_placement_type: type[Placement] | None = None


def install(placement_type: type[Placement]) -> None:
    """Teach DTensor's checkpoint protocol about the placement, once per process."""
    global _placement_type
    if _placement_type is None:
        _placement_type = placement_type
        guard_checkpoints(_concerns, _write_items, _chunk_list, _shard_at)


def _is_indexed(placement: Placement) -> bool:
    assert _placement_type is not None
    return isinstance(placement, _placement_type)


def _concerns(dtensor: DTensor) -> bool:
    return any(_is_indexed(p) for p in dtensor_spec(dtensor).placements)


def split_by_owner(layout: Layout, rank: int, ranges: Iterable[Range] | None = None) -> list[tuple[Range, bool]]:
    """`ranges` of `rank` (all, if not given), cut so that each is wholly owned by it or not at all.

    Of indices that several ranks hold, the lowest of these ranks is the owner.
    """
    lower = [piece for held in layout.pieces[:rank] for piece in held]
    split = []
    for start, stop in layout.pieces[rank] if ranges is None else ranges:
        cuts = sorted({start, stop, *(edge for piece in lower for edge in piece if start < edge < stop)})
        for low, high in pairwise(cuts):
            split.append(((low, high), not any(a <= low < b for a, b in lower)))
    return split


def _ranges_here(dtensor: DTensor) -> list[tuple[Range, bool]]:
    """The ranges along the cut dim that this rank holds, and whether it owns them."""
    spec = dtensor_spec(dtensor)
    axes = [i for i, p in enumerate(spec.placements) if _is_indexed(p)]
    cut: Layout = spec.placements[axes[-1]].cut  # type: ignore[attr-defined]
    rank = spec.mesh.get_local_rank(axes[-1])
    if len(axes) == 1:
        return split_by_owner(cut, rank)
    outer: Layout = spec.placements[axes[0]].layout  # type: ignore[attr-defined]
    inner: Layout = spec.placements[axes[1]].layout  # type: ignore[attr-defined]
    rows = indices(outer, spec.mesh.get_local_rank(axes[0]))
    held = [rows[position] for position in indices(inner, rank)]
    return split_by_owner(cut, rank, shortest(rank, [(i, i + 1) for i in held]))


def _box(dtensor: DTensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The cut dim, and this rank's size and offset in the other dims (FSDP may cut those)."""
    spec = dtensor_spec(dtensor)
    dim = next(p.dim for p in spec.placements if _is_indexed(p))  # type: ignore[attr-defined]
    others = tuple(Replicate() if _is_indexed(p) else p for p in spec.placements)
    sizes, offsets = chunk_of_spec(spec.shape, spec.mesh, others)
    if sizes[dim] != spec.shape[dim]:
        raise LayoutError(
            f"{spec.placements}: dim {dim} is cut twice in a way that has no chunks; "
            "call autotp.layouts.follow_fsdp(module) after fully_shard"
        )
    return dim, tuple(sizes), tuple(offsets)


def _chunks(dtensor: DTensor) -> list[tuple[ChunkStorageMetadata, bool]]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    dim, sizes, offsets = _box(dtensor)
    before, after = slice(0, dim), slice(dim + 1, None)
    return [
        (
            ChunkStorageMetadata(
                offsets=torch.Size((*offsets[before], start, *offsets[after])),
                sizes=torch.Size((*sizes[before], stop - start, *sizes[after])),
            ),
            owned,
        )
        for (start, stop), owned in _ranges_here(dtensor)
    ]


def _chunk_list(dtensor: DTensor) -> list[ChunkStorageMetadata]:
    return [chunk for chunk, _ in _chunks(dtensor)]


def _write_items(dtensor: DTensor, fqn: str) -> list[WriteItem]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local_of(dtensor))
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=dtensor.size()),
        )
        for chunk, owned in _chunks(dtensor)
        if owned
    ]


def _shard_at(dtensor: DTensor, index: Any) -> torch.Tensor:
    """The chunk at the global offset in `index`, as a view: loading writes into it."""
    dim, _, _ = _box(dtensor)
    if index.offset is None:
        raise LayoutError(f"{index.fqn}: a parameter cut into several chunks is looked up by its offset")
    position = 0
    for (start, stop), _ in _ranges_here(dtensor):
        if start == index.offset[dim]:
            return local_of(dtensor).detach().narrow(dim, position, stop - start)
        position += stop - start
    raise LayoutError(f"{index.fqn}: this rank holds no chunk at offset {tuple(index.offset)}")
