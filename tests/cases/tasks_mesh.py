"""Tasks about meshes, wrong orders of calls, and rules."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autotp.comparing import local
from autotp.errors import AutotpError
from autotp.measuring import Inputs, Settings, measure
from tests.cases.tasks import built, compare_on
from tests.harness.tasks import autotp_shard, mesh_of, summary


def on_mesh(payload: dict[str, Any]) -> dict[str, Any] | None:
    """The pair of linear layers on a mesh of the given shape and names, made of the first ranks."""
    shape, names = payload["shape"], payload["names"]
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    ranks = list(range(count))
    layout = ranks if len(shape) == 1 else [ranks[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
    mesh = DeviceMesh("cpu", layout, mesh_dim_names=names)
    if dist.get_rank() >= count:
        return None
    if payload.get("part"):
        mesh = mesh[payload["part"]]
    if names is None and len(shape) > 1:
        return _refusal(mesh)
    found = compare_on(mesh, {"recipe": "pair", "options": payload.get("options", {})})
    return {**found, "coordinate": mesh.get_coordinate()}


def _refusal(mesh: DeviceMesh) -> dict[str, Any]:
    model, args, kwargs = built("pair")
    try:
        autotp_shard(model, mesh, (args, kwargs))
    except AutotpError as error:
        return {"refused": str(error)}
    return {"cut": [name for name, p in model.named_parameters() if isinstance(p, DTensor)]}


def size_one(payload: object) -> dict[str, Any] | None:
    """A mesh with a single rank: nothing is to be done."""
    mesh = mesh_of(1)
    if dist.get_rank() > 0:
        return None
    model, args, kwargs = built("pair")
    before = dict(model.named_parameters())
    model = autotp_shard(model, mesh, (args, kwargs))
    same = all(parameter is before[name] for name, parameter in model.named_parameters())
    return {"same": same, "output": model(*args, **kwargs).tolist(), "expected": built("pair")[0](*args).tolist()}


def fsdp_first(payload: object) -> dict[str, Any]:
    """`fully_shard` before `shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, args, kwargs = built("pair")
    fully_shard(model, mesh=mesh["dp"])
    try:
        autotp_shard(model, mesh["tp"], (args, kwargs))
    except AutotpError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def twice(payload: dict[str, Any]) -> dict[str, Any] | None:
    """`shard` on a model that is sharded already: nothing more is cut, or it is refused."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    model, args, kwargs = built("pair")
    locals_: list[list[int]] = []
    refused: list[str] = []

    def apply(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> nn.Module:
        for _ in range(2):
            try:
                model = autotp_shard(model, mesh, inputs)
            except AutotpError as error:
                refused.append(str(error))
            locals_.append([local(p).numel() for p in model.parameters()])
        return model

    figures = measure(model, (args, kwargs), mesh, apply, Settings())
    return {**summary(figures), "once": locals_[0], "twice": locals_[1], "refusals": refused}


def other_device(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A model on the CPU, a mesh of GPUs (that need not exist: nothing may be sent before the check)."""
    mesh = DeviceMesh("cuda", [0, 1], mesh_dim_names=("tp",), _init_backend=False)
    if dist.get_rank() >= 2:
        return None
    return _refusal(mesh)


def plan_with_rules(payload: dict[str, Any]) -> dict[str, Any]:
    """What a rule changes in the plan, and what the plan says about it."""
    from autotp.planning import plan

    model, args, kwargs = built(payload["recipe"])
    free = plan(model, tp=payload["tp"], sample=(args, kwargs))
    try:
        ruled = plan(model, tp=payload["tp"], sample=(args, kwargs), rules=payload["rules"])
    except AutotpError as error:
        return {"refused": str(error)}
    pairs = zip(free.parameters, ruled.parameters, strict=True)
    changed = [a.name for a, b in pairs if a.local_shape != b.local_shape or a.style != b.style]
    return {"changed": changed, "findings": [str(finding) for finding in ruled.findings]}
