"""FSDP2 beside tensor parallelism, block by block and the root last; ``DistributedDataParallel`` is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from autotp.errors import MeshError
from autotp.layouts import follow_fsdp
from autotp.mesh import MeshAxes
from autotp.torch_compat import READ_BY_DDP


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: members of list-like containers of which one class occurs at least twice.

    Of containers inside each other the outermost counts; a module that is used in two places is left to the root.
    """
    found: dict[int, nn.Module] = {}
    places: dict[int, int] = {}
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        children = [c for c in container.children() if any(True for _ in c.parameters())]
        kinds = [type(c) for c in children]
        for c in children:
            places[id(c)] = places.get(id(c), 0) + 1
            if kinds.count(type(c)) > 1 and any(True for _ in c.children()):
                found[id(c)] = c
    inner = {id(m) for b in found.values() for m in b.modules() if m is not b}
    return [b for key, b in found.items() if key not in inner and places[key] == 1]


Fsdp = bool | Mapping[str, Any]  # whether to apply fully_shard, or with which of its options
_GIVEN = {"module", "mesh"}


def check_fsdp(model: nn.Module, fsdp: Fsdp) -> None:
    """Raise for what ``fully_shard`` would refuse, before anything is changed."""
    known = [n for n in inspect.signature(fully_shard).parameters if n not in _GIVEN]
    unknown = [n for n in fsdp if n not in known] if isinstance(fsdp, Mapping) else []
    if unknown:
        raise MeshError(f"fsdp={{{unknown[0]!r}: ...}}: fully_shard has no such option; it has {', '.join(known)}")
    scalars = [n for n, p in model.named_parameters() if p.ndim == 0]
    if scalars:
        raise MeshError(
            f"{scalars[0]} is a scalar parameter, which fully_shard refuses: make it a tensor of one element, or pass "
            "fsdp=False and apply fully_shard yourself"
        )


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, axes: MeshAxes, fsdp: Fsdp = True) -> nn.Module:
    """Share parameters, gradients and optimizer state over the data-parallel axes, in place.

    With ``dp_replicate`` beside ``dp_shard`` this is HSDP: shared within, copied across.
    """
    options = dict(fsdp) if isinstance(fsdp, Mapping) else {}
    names = tuple(n for n in (axes.replicate_name, axes.fsdp_name) if n)
    data = mesh[names if len(names) > 1 else names[0]]
    for block in blocks(model):
        fully_shard(block, mesh=data, **options)
    fully_shard(model, mesh=data, **options)
    follow_fsdp(model)
    return model


class _NotForDdp:
    """What is in the place of the names that ``DistributedDataParallel`` reads of a model first of all."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise MeshError(
            "DistributedDataParallel does not go around a sharded model: its parameters are DTensors, of which a rank "
            "has a part. Shard it on a mesh with an axis dp beside tp, as in init_device_mesh(device, (dp, tp), "
            "mesh_dim_names=('dp', 'tp')): parameters and gradients are then shared over dp by FSDP2 "
            "(copied with dp_replicate beside dp_shard)"
        )


def refuse_ddp(model: nn.Module) -> None:
    """Let ``DistributedDataParallel(model)`` raise a :class:`MeshError`, before it changes anything."""
    setattr(model, READ_BY_DDP, _NotForDdp())
