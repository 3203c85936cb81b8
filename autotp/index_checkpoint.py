"""Distributed checkpoints of index-cut parameters: one chunk per contiguous range of indices.

With this, `torch.distributed.checkpoint` stores the global tensor in its original order: it
loads into the unsharded model, another layout, or another number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from .index_ranges import Layout, LayoutError, Range
from .torch_compat import chunk_of_spec, dtensor_spec, guard_checkpoints, local_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

_placement_type: type[Placement] | None = None


def install(placement_type: type[Placement]) -> None:
    """Teach DTensor's checkpoint protocol about the placement, once per process."""
    global _placement_type
    if _placement_type is None:
        _placement_type = placement_type
        guard_checkpoints(_concerns, _write_items, _chunk_list, _shard_at)


def _concerns(dtensor: DTensor) -> bool:
    assert _placement_type is not None
    return any(isinstance(p, _placement_type) for p in dtensor_spec(dtensor).placements)


def split_by_owner(layout: Layout, rank: int) -> list[tuple[Range, bool]]:
    """The ranges of `rank` in local order, cut so that each is wholly owned by it or not at all.

    Of indices that several ranks hold, the lowest of these ranks is the owner.
    """
    lower = [piece for ranges in layout.pieces[:rank] for piece in ranges]
    split = []
    for start, stop in layout.pieces[rank]:
        cuts = sorted({start, stop, *(edge for piece in lower for edge in piece if start < edge < stop)})
        for low, high in zip(cuts, cuts[1:], strict=False):
            split.append(((low, high), not any(a <= low < b for a, b in lower)))
    return split


def _here(dtensor: DTensor) -> tuple[Layout, int, tuple[int, ...], tuple[int, ...]]:
    """Layout, rank on its axis, and size and offset in the other dims (FSDP may cut those)."""
    assert _placement_type is not None
    spec = dtensor_spec(dtensor)
    axis = next(i for i, p in enumerate(spec.placements) if isinstance(p, _placement_type))
    layout: Layout = spec.placements[axis].layout  # type: ignore[attr-defined]
    others = tuple(Replicate() if i == axis else p for i, p in enumerate(spec.placements))
    sizes, offsets = chunk_of_spec(spec.shape, spec.mesh, others)
    if sizes[layout.dim] != layout.size:
        raise LayoutError(f"{spec.placements}: dim {layout.dim} is cut twice, which cannot be saved in chunks")
    return layout, spec.mesh.get_local_rank(axis), tuple(sizes), tuple(offsets)


def _chunks(dtensor: DTensor) -> list[tuple[ChunkStorageMetadata, bool]]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    layout, rank, sizes, offsets = _here(dtensor)
    before, after = slice(0, layout.dim), slice(layout.dim + 1, None)
    return [
        (
            ChunkStorageMetadata(
                offsets=torch.Size((*offsets[before], start, *offsets[after])),
                sizes=torch.Size((*sizes[before], stop - start, *sizes[after])),
            ),
            owned,
        )
        for (start, stop), owned in split_by_owner(layout, rank)
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
    layout, rank, _, _ = _here(dtensor)
    if index.offset is None:
        raise LayoutError(f"{index.fqn}: a parameter cut into several chunks is looked up by its offset")
    position = 0
    for (start, stop), _ in split_by_owner(layout, rank):
        if start == index.offset[layout.dim]:
            return local_of(dtensor).detach().narrow(layout.dim, position, stop - start)
        position += stop - start
    raise LayoutError(f"{index.fqn}: this rank holds no chunk at offset {tuple(index.offset)}")
