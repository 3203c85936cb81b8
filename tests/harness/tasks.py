"""What the ranks of the test pool run."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autotp.measuring import Apply, Figures, Inputs, Settings, measure

_MADE: Counter[int] = Counter()


@functools.cache
def mesh_of(tp: int) -> DeviceMesh:
    """The first `tp` ranks as a mesh with one axis, `tp`; the same object at every call.

    torch names a group by how many a rank has made. Ranks that make this one in a task in which the others have no
    part would be one ahead of those, and wait forever for them at the next group: so it is not counted.
    """
    if dist.get_rank() >= tp:
        return DeviceMesh("cpu", list(range(tp)), mesh_dim_names=("tp",), _init_backend=False)
    world = dist.distributed_c10d._world
    count, world.group_count = world.group_count, 1000 * (1 + _MADE[tp]) + tp
    _MADE[tp] += 1
    group = dist.new_group(list(range(tp)), use_local_synchronization=True)
    world.group_count = count
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


@functools.cache
def grid_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a mesh of several axes; the same object at every call, as each new group is a chance to stall."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def find(path: str) -> Any:
    """The object at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def autotp_shard(model: nn.Module, mesh: DeviceMesh, inputs: Inputs, **options: Any) -> nn.Module:
    """The product, planned on one rank for all."""
    from autotp.sharding import shard
    from tests.harness.planned import planned_once

    with planned_once(mesh):
        return shard(model, mesh, sample=inputs, **options)


def identity(model: nn.Module, mesh: DeviceMesh, inputs: Inputs, **options: Any) -> nn.Module:
    """A stand-in that cuts nothing."""
    return model


def build(name: str, zoo: str | None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of tests/models, or of a zoo folder that has a `zoo.build(name)`."""
    if zoo is not None:
        if zoo not in sys.path:
            sys.path.insert(0, zoo)
        return importlib.import_module("zoo").build(name)  # type: ignore[no-any-return]
    from tests.models import registry

    return registry.build(name)


def measure_model(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Build a model, shard it, compare it; plain numbers. None on ranks that are not in the mesh."""
    torch.manual_seed(0)
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    start = time.perf_counter()
    builder = payload.get("builder")
    model, args, kwargs = find(builder)(payload["name"]) if builder else build(payload["name"], payload.get("zoo"))
    built = time.perf_counter()
    apply = functools.partial(
        find(payload.get("apply", "tests.harness.tasks:autotp_shard")), **payload.get("options", {})
    )
    times: dict[str, float] = {}
    settings = Settings(**payload.get("settings", {}))
    try:
        figures = measure(model, (args, kwargs), mesh, timed(apply, times), settings)
    except BaseException:
        mesh_of.cache_clear()  # its group may be out of step
        raise
    numbers = summary(figures)
    numbers.update(build_seconds=built - start, seconds=time.perf_counter() - start, **times)
    return numbers


def timed(apply: Apply, times: dict[str, float]) -> Apply:
    """The same, with its seconds noted."""

    def wrapped(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> nn.Module:
        start = time.perf_counter()
        try:
            return apply(model, mesh, inputs)
        finally:
            times["shard_seconds"] = time.perf_counter() - start

    return wrapped


def summary(figures: Figures) -> dict[str, Any]:
    """Plain numbers and texts, with the worst names first."""
    gradients = {**figures.gradients, **figures.input_gradients}
    worst = sorted(gradients.items(), key=lambda item: -item[1])
    limit = figures.settings.gradient_limit
    return {
        "ok": figures.ok,
        "promoted": figures.settings.promote,
        "forward_error": figures.forward_error,
        "gradient_error": figures.gradient_error,
        "optimizer_error": figures.optimizer_error,
        "spread": figures.spread,
        "cut_share": figures.cut_share,
        "problems": figures.problems[:10],
        "notes": figures.notes,
        "obstacle": figures.settings.obstacle,
        "first_bad": figures.first_bad,
        "wrong_gradients": [f"{name} {error:.2g}" for name, error in worst[:8] if error > limit],
    }
