"""``autotp.check_inputs``: an opt-in check that all ranks of a tensor-parallel group call the model alike."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from autotp import torch_hooks
from autotp.errors import InputError
from autotp.lost_ranks import calls_of
from autotp.mesh import FSDP_NAMES, REPLICATE_NAMES
from autotp.structures import named_tensors
from autotp.torch_compat import dtensor_spec

_PLAIN = (bool, int, float, str, type(None))


def check_inputs(model: nn.Module) -> RemovableHandle:
    """From now on, compare the inputs of every call of a sharded model over its tensor-parallel group.

    Each call reads all of its inputs and exchanges one small tensor: meant for the first steps, or for finding out why
    a run goes wrong. ``remove()`` of what is returned ends it.

    Raises:
        InputError: the model is not cut over a tensor-parallel group. At a call that differs, the same on all ranks of
            the group, before anything is computed: names two ranks and the first input that they do not share.
    """
    mesh = _tp_mesh(model)
    if mesh is None:
        raise InputError("the model is not tensor-parallel: call autotp.shard first, on more than one rank")
    axis = mesh.ndim - 1
    group = mesh.get_group(axis)
    calls, ranks = calls_of(group), dist.get_process_group_ranks(group)
    device = mesh.device_type if dist.get_backend(group) == "nccl" else "cpu"

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        described = _described(args, kwargs)
        digest = hashlib.sha256(repr(described).encode()).digest()
        mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
        all_of = [torch.empty_like(mine) for _ in ranks]
        calls.run("all_gather", "autotp.check_inputs", mine, dist.all_gather, all_of, mine)
        if all(torch.equal(one, all_of[0]) for one in all_of):
            return
        told: list[Any] = [None] * len(ranks)
        calls.run("all_gather_object", "autotp.check_inputs", None, dist.all_gather_object, told, described)
        other = next(i for i, one in enumerate(told) if one != told[0])
        raise InputError(
            f"inputs differ between the ranks of a tensor-parallel group: rank {ranks[0]} and rank {ranks[other]}, "
            f"{_first(told[0], told[other])}. Give all of them the same batch; each data-parallel rank has its own"
        )

    return model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)


def _tp_mesh(model: nn.Module) -> DeviceMesh | None:
    """A mesh whose last axis is the tensor-parallel one."""
    for p in model.parameters():
        if torch_hooks.is_dtensor(p):
            mesh = dtensor_spec(p).mesh
            names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
            return None if names[-1] in (*FSDP_NAMES, *REPLICATE_NAMES) else mesh
    return None


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(where, shape or value, digest) of each tensor and each plain argument."""
    given = {**{f"argument {i}": value for i, value in enumerate(args)}, **dict(sorted(kwargs.items()))}
    found = [(name, repr(value), "") for name, value in given.items() if isinstance(value, _PLAIN)]
    for name, tensor in named_tensors(given):
        found.append((name, f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}", _digest(tensor)))
    return found


def _digest(tensor: Tensor) -> str:
    here = tensor.detach().to("cpu").contiguous()
    size = here.numel() * here.dtype.itemsize
    return hashlib.sha256((ctypes.c_ubyte * size).from_address(here.data_ptr()) if size else b"").hexdigest()


def _first(mine: list[tuple[str, str, str]], theirs: list[tuple[str, str, str]]) -> str:
    for (name, what, digest), (other_name, other_what, other_digest) in zip(mine, theirs, strict=False):
        if name != other_name:
            return f"{name} on the one, {other_name} on the other"
        if what != other_what:
            return f"{name} is {what} on the one, {other_what} on the other"
        if digest != other_digest:
            return f"the values of {name}, {what}"
    return f"{len(mine)} inputs on the one, {len(theirs)} on the other"
