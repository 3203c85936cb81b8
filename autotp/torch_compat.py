"""The one door to private torch APIs.

Everything whose name starts with an underscore in torch, or that differs between torch
versions, is imported here and nowhere else, so that a new torch breaks one file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as _funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

# ---- layouts: specs, placements and the propagation of placements through operations ----
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "DTensorSpec",
    "OpSchema",
    "OutputSharding",
    "READ_BY_DDP",
    "StridedShard",
    "TensorMeta",
    "all_gather",
    "chunk_of_spec",
    "chunks_here",
    "default_store",
    "default_timeout",
    "dtensor_spec",
    "fsdp_params",
    "set_fsdp_spec",
    "traced_all_gather",
    "traced_all_reduce",
    "guard_checkpoints",
    "guard_propagation",
    "local_of",
    "reduce_scatter",
    "root_mesh",
    "wrap_local",
]

READ_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # an attribute of a model, read before anything else
Propagate = Callable[[OpSchema], OutputSharding]


def local_of(dtensor: DTensor) -> torch.Tensor:
    """The local tensor object itself: no autograd, no copy, no fresh alias."""
    return dtensor._local_tensor


def dtensor_spec(dtensor: DTensor) -> DTensorSpec:
    """Mesh, placements and global shape of a DTensor."""
    return dtensor._spec


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local` as it is: no check, no communication, no autograd."""
    return DTensor(local, spec, requires_grad=False)


_gather_op = getattr(_funcol, "all_gather_single", None) or _funcol.all_gather_tensor


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh was taken from; itself if it was taken from none."""
    root: DeviceMesh | None = getattr(mesh, "_root_mesh", None)
    return root or mesh


def default_store() -> dist.Store:
    """The key-value store that the processes of the default group met at."""
    return dist.distributed_c10d._get_default_store()


def default_timeout() -> float:
    """Seconds that a collective of the default group waits for the other ranks."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(group._device_types[0])
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit.total_seconds() if limit is not None else 600.0


def all_gather(local: torch.Tensor, dim: int, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Equal-sized locals of one mesh axis, concatenated along `dim` in rank order."""
    gathered = _gather_op(local.contiguous(), gather_dim=dim, group=(mesh, axis))
    return _funcol.wait_tensor(gathered)


def reduce_scatter(pieces: torch.Tensor, group: Any) -> torch.Tensor:
    """Of ``pieces``, one for each rank, this rank's, summed over the ranks."""
    mine = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(mine, pieces.contiguous().flatten(0, 1) if pieces.ndim > 1 else pieces.contiguous(), group=group)
    return mine


def traced_all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks of a group, in a form that the compiler knows; no gradient."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def traced_all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """All ranks' tensors, one after the other along the first dim, in a form that the compiler knows; no gradient."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    return torch.ops._c10d_functional.wait_tensor(gathered)


def traced_reduce_scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's piece, along the first dim, of the sum over the ranks, in a form that the compiler knows."""
    summed = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return torch.ops._c10d_functional.wait_tensor(summed)


def guard_propagation(
    concerns: Callable[[OpSchema], bool],
    rule: Callable[[OpSchema, Propagate], OutputSharding],
) -> None:
    """Let `rule` decide the output placements of every operation that `concerns` picks.

    Runs on a cache miss only. DTensor would otherwise rebuild an unknown placement as a
    stock one in some operations, which is silently wrong.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    stock: Propagate = propagator.propagate_op_sharding_non_cached

    def propagate(schema: OpSchema) -> OutputSharding:
        return rule(schema, stock) if concerns(schema) else stock(schema)

    propagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign, assignment]
    propagator.propagate_op_sharding = LocalLRUCache(propagate)


def chunk_of_spec(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offsets) of this rank under stock placements."""
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def chunks_here(dtensor: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes of the global tensor that this rank holds, in local order."""
    return [(tuple(c.offsets), tuple(c.sizes)) for c in dtensor.__create_chunk_list__()]


def guard_checkpoints(
    concerns: Callable[[DTensor], bool],
    write_items: Callable[[DTensor, str], list[Any]],
    chunk_list: Callable[[DTensor], list[Any]],
    shard_at: Callable[[DTensor, Any], torch.Tensor],
) -> None:
    """Replace the protocol of torch.distributed.checkpoint for the DTensors `concerns` picks.

    Stock DTensors are one contiguous chunk; ours may be several.
    """
    stock_write = DTensor.__create_write_items__
    stock_chunks = DTensor.__create_chunk_list__
    stock_shard = DTensor.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, obj: Any) -> Any:
        return write_items(self, fqn) if concerns(self) else stock_write(self, fqn, obj)

    def create_chunk_list(self: DTensor) -> Any:
        return chunk_list(self) if concerns(self) else stock_chunks(self)

    def get_tensor_shard(self: DTensor, index: Any) -> Any:
        return shard_at(self, index) if concerns(self) else stock_shard(self, index)

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign, assignment]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


# ---- FSDP2: the parameters it manages ----


def fsdp_params(module: torch.nn.Module) -> list[Any]:
    """torch's FSDPParam objects of every `fully_shard`ed module inside `module`."""
    found: list[Any] = []
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            found += [param for group in groups for param in group.fsdp_params]
    return found


def set_fsdp_spec(fsdp_param: Any, placements: tuple[Placement, ...]) -> None:
    """Describe a sharded parameter (and the gradients FSDP will make for it) by other placements."""
    old = fsdp_param._sharding_spec
    spec = DTensorSpec(old.mesh, placements, tensor_meta=old.tensor_meta)
    fsdp_param._sharding_spec = spec
    fsdp_param.sharded_param._spec = spec
