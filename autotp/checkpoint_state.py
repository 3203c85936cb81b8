"""What a checkpoint holds, by key: tensors of the model and of its optimizers, and plain values beside them.

Keys are those of the unsharded model, so nothing depends on how many ranks wrote it:

    model.<name>                    a parameter or persistent buffer
    optimizer.<i>.<name>.<entry>    what an optimizer keeps for a parameter, as `exp_avg`
    random.<place>.<device>         the generator of a tensor-parallel group
    autotp                          everything that is no tensor
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from autotp import structures, torch_hooks
from autotp.errors import CheckpointError
from autotp.mesh import resolve_mesh
from autotp.parts import Slot, slots
from autotp.torch_compat import dtensor_spec, local_of, wrap_local

VALUES = "autotp"
Optimizers = Optimizer | Sequence[Optimizer] | None


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    """One optimizer, several, or none."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def settled(model: nn.Module) -> list[Slot]:
    """The parameters and buffers of a model, FSDP2's as each rank keeps them between steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return slots(model)


def collect(
    model: nn.Module, mesh: DeviceMesh | None, optimizer: Optimizers, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Everything that is to be saved, as this rank holds it; nothing is copied.

    Raises:
        CheckpointError: a parameter on meta, or of an optimizer but not of the model; a value that cannot be read back.
    """
    found = settled(model)
    state: dict[str, Any] = {}
    for slot in found:
        if slot.tensor.is_meta:
            raise CheckpointError(
                f"{slot.name} is on meta: there are no values to save. Load or materialize them first"
            )
        state[f"model.{slot.name}"] = slot.tensor.detach()
    values = {
        "format": 1,
        "ties": {slot.name: slot.names[1:] for slot in found if len(slot.names) > 1},
        "modules": extra_states(model),
        "optimizers": [_optimizer(i, o, found, state) for i, o in enumerate(as_list(optimizer))],
        "extra": {key: _state_of(value) for key, value in (extra or {}).items()},
    }
    for name, generator in generators(mesh):
        if first_of_group(mesh):
            state[name] = generator.get_rng_state()
    state[VALUES] = _checked(values)
    return state


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules add to a state dict by `get_extra_state`, by path."""
    custom = [(p, m) for p, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    return {path: module.get_extra_state() for path, module in custom}


def _optimizer(number: int, optimizer: Optimizer, found: Iterable[Slot], state: dict[str, Any]) -> dict[str, Any]:
    """Add the tensors of an optimizer to `state`; its groups, and the plain values that it keeps."""
    names = parameter_names(number, optimizer, found)
    entries: dict[str, dict[str, Any]] = {}
    for parameter, kept in optimizer.state.items():
        name = names[id(parameter)]
        plain = {key: value for key, value in kept.items() if not isinstance(value, Tensor)}
        entries[name] = {"tensors": [key for key in kept if key not in plain], "values": plain}
        for key, value in kept.items():
            if isinstance(value, Tensor):
                _check_entry(f"{name}: {key}", parameter, value)
                state[entry_key(number, name, key)] = value
    groups = [
        {"names": [names[id(p)] for p in g["params"]], "options": {k: v for k, v in g.items() if k != "params"}}
        for g in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups, "entries": entries}


def entry_key(number: int, name: str, key: str) -> str:
    """The key of a tensor that an optimizer keeps for a parameter."""
    return f"optimizer.{number}.{name}.{key}"


def parameter_names(number: int, optimizer: Optimizer, found: Iterable[Slot]) -> dict[int, str]:
    """The names of an optimizer's parameters by their identity.

    Raises:
        CheckpointError: one that is none of the model's, as when the optimizer was made before sharding.
    """
    names = {id(slot.tensor): slot.name for slot in found}
    for place, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in names:
                raise CheckpointError(
                    f"parameter {i} of group {place} of optimizer {number} (shape {list(p.shape)}) is no parameter of "
                    "the model: make the optimizer from model.parameters() after autotp.shard"
                )
    return names


def _check_entry(where: str, parameter: Tensor, value: Tensor) -> None:
    """What an optimizer keeps for a cut parameter must say which part of a whole it is."""
    if not torch_hooks.is_dtensor(parameter) or value.numel() <= 1:
        return
    if not torch_hooks.is_dtensor(value) or value.shape != parameter.shape:
        whole = list(parameter.shape)
        raise CheckpointError(
            f"{where} has shape {list(value.shape)}, for a cut parameter of shape {whole}: which part of a whole it is "
            "cannot be told. Use an optimizer that keeps DTensors of the parameter's shape, as those of torch.optim do"
        )


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """A copy of values that can be written, and read back without running any code."""
    cut = [x for _, x in structures.named_tensors(values) if torch_hooks.is_dtensor(x)]
    if cut:
        raise CheckpointError(
            f"extra or an optimizer option holds a DTensor (shape {list(cut[0].shape)}): only what is equal on all "
            "ranks can be kept there"
        )
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
        copied: dict[str, Any] = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"extra, an optimizer option or an extra state of a module cannot be kept: {str(error).splitlines()[0]}. "
            "Keep plain values, tensors, and containers of them"
        ) from error
    return copied


def staged(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy on the CPU of this rank's part, for writing it while training goes on."""
    return {key: _copied(value) for key, value in state.items()}


def _copied(value: Any) -> Any:
    if torch_hooks.is_dtensor(value):
        return wrap_local(local_of(value).detach().to("cpu", copy=True), dtensor_spec(value))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value


# ---- random numbers: each tensor-parallel group has a place of its own


def first_of_group(mesh: DeviceMesh | None) -> bool:
    """Whether this rank speaks for its tensor-parallel group."""
    if mesh is None:
        return True
    axis, coordinate = _tp_axis(mesh), mesh.get_coordinate()
    return coordinate is None or axis is None or coordinate[axis] == 0


def generators(mesh: DeviceMesh | None) -> list[tuple[str, Any]]:
    """The default generators of this rank, by key."""
    place = 0
    if mesh is not None:
        axis = _tp_axis(mesh)
        for i, at in enumerate(mesh.get_coordinate() or ()):
            place = place if i == axis else place * mesh.size(i) + at
    found: list[tuple[str, Any]] = [(f"random.{place}.cpu", torch.random)]
    kind = mesh.device_type if mesh is not None else "cpu"
    if kind != "cpu" and hasattr(torch.get_device_module(kind), "get_rng_state"):
        found.append((f"random.{place}.{kind}", torch.get_device_module(kind)))
    return found


def _tp_axis(mesh: DeviceMesh) -> int | None:
    name = resolve_mesh(mesh).tp_name
    if name is None:
        return None
    return 0 if mesh.ndim == 1 else (mesh.mesh_dim_names or ()).index(name)
