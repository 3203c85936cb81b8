"""IndexShard: the DTensor placement for layouts that stock `Shard` cannot express.

It derives from torch's `_StridedShard`, whose redistributions always pass through the full
tensor and are therefore right for any index list. Two things keep a wrong number from
slipping through: `split_factor` is 0, so a stock placement that some operation rebuilds from
ours cannot be redistributed; and `index_rules` lets only operations through whose result is
known to be right.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from . import index_checkpoint, index_rules
from .index_ranges import Layout, LayoutError, indices, local_size
from .torch_compat import StridedShard, all_gather

_POISON = 0  # a split factor with which every stock redistribution raises


class IndexShard(StridedShard):
    """Dim `layout.dim` is dealt out over one mesh axis by lists of index ranges."""

    layout: Layout
    cut: Layout  # the tensor-parallel layout; differs from `layout` where FSDP cuts the same dim

    def __init__(self, layout: Layout, *, cut: Layout | None = None) -> None:
        super().__init__(layout.dim, split_factor=_POISON)
        self.layout = layout
        self.cut = cut or layout
        self.has_copies = layout.has_copies
        self._hash = hash((type(self), self.layout, self.cut))
        index_rules.install(IndexShard)
        index_checkpoint.install(IndexShard)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and (self.layout, self.cut) == (other.layout, other.cut)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return placement_for, (self.layout,)

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexShard:
        return self

    def __repr__(self) -> str:
        return f"IndexShard({self.layout})"

    def __str__(self) -> str:
        return f"I({self.layout})"

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        source = f"placement_for(Layout({self.layout.dim}, {self.layout.pieces}))"
        return source, {"placement_for": placement_for, "Layout": Layout}

    # -- what torch's redistribution calls --

    def _split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> tuple[list[torch.Tensor], list[int]]:
        self._check(num_chunks, tensor.size(self.dim), "full tensor")
        shards = [local_slice(tensor, self.layout, rank) for rank in range(num_chunks)]
        if not with_padding:
            return shards, []
        longest = self._longest
        pads = [longest - shard.size(self.dim) for shard in shards]
        return [_pad(s, self.dim, n) for s, n in zip(shards, pads, strict=True)], pads

    def _select_split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        index: Any,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
        clone: bool = True,
    ) -> torch.Tensor:
        self._check(num_chunks, tensor.size(self.dim), "full tensor")
        shard = local_slice(tensor, self.layout, int(index))
        return _pad(shard, self.dim, self._longest - shard.size(self.dim)) if with_padding else shard

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Any
    ) -> torch.Tensor:
        self._check(mesh.size(mesh_dim), self._logical_size(current_logical_shape), "full tensor")
        own, expected = local_tensor.size(self.dim), self._own_size(mesh, mesh_dim)
        if own != expected:
            raise LayoutError(
                f"{self!r}: this rank holds {own} indices of dim {self.dim} instead of {expected}; "
                "another mesh axis cuts the same dim, which this placement does not follow"
            )
        padded = _pad(local_tensor, self.dim, self._longest - own)
        gathered = all_gather(padded, self.dim, mesh, mesh_dim)
        return gathered.index_select(self.dim, _positions(self.layout, gathered.device))

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any, offset_mode: Any = 0
    ) -> tuple[int, Any]:
        return self.local_shard_size_and_offset(curr_local_size, num_chunks, rank, offset_mode)

    def local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: Any, offset_mode: Any = 0
    ) -> tuple[int, Any]:
        """Local size, and offsets as torch asks for them (0: first, 1: all, 2: none)."""
        self._check(num_chunks, curr_local_size, "full tensor")
        size = local_size(self.layout, int(rank))
        if int(offset_mode) == 2:
            return size, None
        if len(self.layout.pieces[int(rank)]) > 1:
            # The callers take the first offset and assume one contiguous chunk.
            raise LayoutError(
                f"{self!r}: rank {rank} holds several chunks, so it has no single global offset; "
                "use full_tensor(), or autotp.layouts.local_slice on the full tensor"
            )
        offsets = indices(self.layout, int(rank))
        return size, offsets if int(offset_mode) == 1 else (offsets[0] if offsets else 0)

    def _to_new_shard_dim(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise LayoutError(f"{self!r} cannot move to another dim directly: go through Replicate")

    def _logical_size(self, logical_shape: Any) -> int:
        return int(logical_shape[self.dim])

    @property
    def _longest(self) -> int:
        return max(local_size(self.layout, rank) for rank in range(self.layout.num_ranks))

    def _own_size(self, mesh: DeviceMesh, axis: int) -> int:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise LayoutError(f"this rank is not part of mesh {mesh}")
        return local_size(self.layout, coordinate[axis])

    def _check(self, num_ranks: int, size: int, what: str) -> None:
        layout = self.layout
        if num_ranks != layout.num_ranks:
            raise LayoutError(f"{self!r} is for {layout.num_ranks} ranks, the mesh has {num_ranks}")
        if size != layout.size:
            raise LayoutError(f"{self!r} covers {layout.size} indices, the {what} has {size}")


@cache
def placement_for(layout: Layout, size: int | None = None) -> Placement:
    """`Shard(dim)` where torch.chunk cuts the dim exactly like this, else an `IndexShard`.

    `size`, if given, is the global size of the dim and must be what the layout covers.
    """
    if size is not None and size != layout.size:
        raise LayoutError(f"layout ({layout}) covers {layout.size} indices, the dim has {size}")
    return Shard(layout.dim) if layout.is_chunked else IndexShard(layout)


def local_slice(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The part of `full` that `rank` holds, as a new contiguous tensor."""
    if full.dim() <= layout.dim or full.size(layout.dim) != layout.size:
        raise LayoutError(f"layout ({layout}) does not fit a tensor of shape {tuple(full.shape)}")
    pieces = [full.narrow(layout.dim, a, b - a) for a, b in layout.pieces[rank]]
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    if not pieces:
        return full.narrow(layout.dim, 0, 0).clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces, dim=layout.dim).contiguous()


def _pad(tensor: torch.Tensor, dim: int, amount: int) -> torch.Tensor:
    if amount == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = amount
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


@cache
def _positions(layout: Layout, device: torch.device) -> torch.Tensor:
    """Where in the padded, gathered tensor each global index is (its first copy)."""
    longest = max(local_size(layout, rank) for rank in range(layout.num_ranks))
    where: dict[int, int] = {}
    for rank in range(layout.num_ranks):
        for position, index in enumerate(indices(layout, rank)):
            where.setdefault(index, rank * longest + position)
    return torch.tensor([where[i] for i in range(layout.size)], device=device)
