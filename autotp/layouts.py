"""Parameters that are cut over the tensor-parallel axis, as DTensors.

    weight = distribute(full, mesh, Layout.from_indices(0, rows_of_each_rank))
    y = F.linear(x, to_local(weight))     # weight.grad is a DTensor of the same placements
    weight.full_tensor()                  # the original tensor, bit for bit

Where ranks hold copies of the same indices, the backward of `to_local` sums the copies'
gradients, because each rank has computed a part of it; the copies then stay equal.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .index_fsdp import follow_fsdp
from .index_ranges import Layout, LayoutError, indices, local_size
from .index_shard import IndexShard, local_slice, placement_for
from .lost_ranks import calls_of
from .torch_compat import (
    DTensorSpec,
    TensorMeta,
    dtensor_spec,
    local_of,
    wrap_local,
)

__all__ = [
    "IndexShard",
    "Layout",
    "LayoutError",
    "distribute",
    "follow_fsdp",
    "indices",
    "layout_of",
    "load_full_",
    "local_size",
    "local_slice",
    "placement_for",
    "to_local",
]


def distribute(full: torch.Tensor, mesh: DeviceMesh, layout: Layout | None) -> DTensor:
    """This rank's part of `full` as a DTensor on the 1-D `mesh`; `None` keeps it whole.

    No communication: every rank must call this with the same values. Works on meta tensors.
    """
    if mesh.ndim != 1:
        raise LayoutError(f"distribute needs a 1-D mesh, got {mesh}: slice it, as in mesh['tp']")
    placement: Placement = Replicate()
    local = full = full.detach()
    stride = full.stride()
    if layout is not None:
        if layout.num_ranks != mesh.size():
            raise LayoutError(f"layout ({layout}) does not fit a mesh of {mesh.size()} ranks")
        placement = placement_for(layout)
        local = local_slice(full, layout, mesh.get_local_rank())
        stride = _strides_like(local, full.shape)
    meta = TensorMeta(full.shape, tuple(stride), full.dtype)
    return wrap_local(local, DTensorSpec(mesh, (placement,), tensor_meta=meta))


def _strides_like(local: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Global strides with the same order of dims in memory as `local` (which is dense)."""
    order = sorted(range(local.dim()), key=lambda d: (local.stride(d), -d))
    strides, step = [0] * local.dim(), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def layout_of(dtensor: DTensor) -> Layout | None:
    """The layout over a DTensor's last mesh axis (tensor parallel); None if it is whole there."""
    spec = dtensor_spec(dtensor)
    placement = spec.placements[-1]
    if isinstance(placement, IndexShard):
        return placement.cut
    if placement.is_shard():
        dim: int = placement.dim  # type: ignore[attr-defined]
        return Layout.even(dim, spec.shape[dim], spec.mesh.size(-1))
    return None


@torch.no_grad()
def load_full_(dtensor: DTensor, full: torch.Tensor) -> None:
    """Overwrite a DTensor with this rank's part of `full`, which every rank has. No communication."""
    spec = dtensor_spec(dtensor)
    if full.shape != spec.shape:
        raise LayoutError(f"expected a tensor of shape {tuple(spec.shape)}, got {tuple(full.shape)}")
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    whole = wrap_local(full.detach(), DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=meta))
    local_of(dtensor).copy_(local_of(whole.redistribute(placements=spec.placements)))


def to_local(dtensor: DTensor) -> torch.Tensor:
    """This rank's part as a plain tensor, for use in a forward.

    Its gradient becomes a DTensor with the placements of `dtensor`; gradients of copies are
    summed over the ranks that hold them.
    """
    if torch.compiler.is_compiling():  # the compiler knows DTensor's own
        local: torch.Tensor = dtensor.to_local()
    elif not (dtensor.requires_grad and torch.is_grad_enabled()):
        return dtensor._local_tensor
    else:
        local = _ToLocal.apply(dtensor)
    placement = dtensor._spec.placements[-1]
    if type(placement) is IndexShard and placement.has_copies:
        local = _SumCopies.apply(local, placement.layout, dtensor._spec.mesh)
    return local


class _ToLocal(torch.autograd.Function):
    """As DTensor.to_local, without its general checks."""

    @staticmethod
    def forward(ctx: Any, dtensor: Any) -> torch.Tensor:
        ctx.spec = dtensor._spec
        local: torch.Tensor = dtensor._local_tensor
        ctx.stride = local.stride()
        # A new tensor object: autograd writes into what a Function returns.
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        spec = ctx.spec
        if torch.is_grad_enabled():  # create_graph: stay differentiable
            return DTensor.from_local(grad, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)
        if grad.stride() != ctx.stride:
            # The spec promises the parameter's memory order; fused optimizers rely on it.
            grad = torch.empty_strided(grad.shape, ctx.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return wrap_local(grad, spec)


class _SumCopies(torch.autograd.Function):
    """Identity; the gradient of every index that several ranks hold is summed over them."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        return local.view_as(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, mesh = ctx.layout, ctx.mesh
        axis = mesh.ndim - 1
        slots, here, there = _copies(layout, mesh.get_local_rank(axis), grad.device)
        shape = list(grad.shape)
        shape[layout.dim] = slots
        shared = grad.new_zeros(shape)
        shared.index_copy_(layout.dim, there, grad.index_select(layout.dim, here))
        calls_of(mesh.get_group(axis)).run("all_reduce", "", shared, dist.all_reduce, shared)
        own = shared.index_select(layout.dim, there)
        return grad.index_copy(layout.dim, here, own), None, None


@cache
def _copies(layout: Layout, rank: int, device: torch.device) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Number of indices with copies, and for this rank's: local position and slot."""
    holders: dict[int, int] = {}
    for other in range(layout.num_ranks):
        for index in indices(layout, other):
            holders[index] = holders.get(index, 0) + 1
    slot = {index: n for n, index in enumerate(sorted(i for i, c in holders.items() if c > 1))}
    pairs = [(p, slot[i]) for p, i in enumerate(indices(layout, rank)) if i in slot]
    here = torch.tensor([p for p, _ in pairs], dtype=torch.long, device=device)
    there = torch.tensor([s for _, s in pairs], dtype=torch.long, device=device)
    return len(slot), here, there
