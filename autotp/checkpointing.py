"""``autotp.save`` and ``autotp.resume``: checkpoints that do not depend on how many ranks wrote them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from autotp import checkpoint_files, checkpoint_state, construction, torch_hooks
from autotp.checkpoint_state import VALUES, Optimizers
from autotp.crew import Crew, crew_of
from autotp.errors import CheckpointError
from autotp.mesh import of_one_model
from autotp.parts import Slot, fill
from autotp.torch_compat import dtensor_spec, local_of, root_mesh

_SHOWN = 4
_running: dict[tuple[int, ...], Saving] = {}


class Saving:
    """A checkpoint that is being written, or has been: ``wait()`` returns its path."""

    def __init__(self, crew: Crew, state: dict[str, Any], folder: Path, keep: int) -> None:
        self._work = (crew, state, folder, keep)
        self._path: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="autotp.save")

    def _write(self) -> None:
        try:
            self._path = checkpoint_files.write(*self._work)
        except Exception as error:
            self._error = error
        del self._work

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._path is not None or self._error is not None

    def wait(self) -> Path:
        """Wait until it is written; the path of this checkpoint.

        Raises:
            AutotpError: it could not be written. Raised once, on every rank; the earlier checkpoints are as they were.
        """
        if self._thread.is_alive():
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._path is None:
            raise CheckpointError("this checkpoint was not written; its error was raised before")
        return self._path


def save(
    model: nn.Module,
    path: str | Path,
    *,
    optimizer: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    keep: int = 2,
    asynchronous: bool = False,
    timeout: float | None = None,
) -> Saving:
    """Save a model and what belongs to it as a new checkpoint in the folder ``path``. All ranks call it.

    Each rank writes its own part, through torch.distributed.checkpoint. The checkpoint appears under its number by one
    rename when it is complete: whatever ends a program, the previous ones stay. Random generators are saved too.

    Args:
        optimizer: one, or several in a fixed order.
        extra: anything with a ``state_dict`` (a scheduler), and plain values (a step); equal on all ranks.
        mesh: the ranks that save; left out, those that the model was sharded over.
        keep: how many checkpoints stay in the folder; 0 keeps all.
        asynchronous: copy this rank's part to CPU memory and return; a thread writes it while training goes on. An
            error is raised by ``wait()`` of what is returned, or else by the next ``save`` of these ranks.
        timeout: seconds that ranks wait for each other; left out, those of the process group, at most 600. A rank that
            is at work is waited for, and one that has died is missed after 30 s.

    Raises:
        AutotpError: on all ranks that called, naming the rank: one did not call, died, or could not write (a full
            disk). What the folder held before is still there.
    """
    if keep < 0:
        raise CheckpointError(f"keep={keep}: the number of checkpoints that stay, or 0 for all")
    mesh = mesh_of_model(model, mesh)
    folder = Path(path).expanduser().absolute()
    crew = crew_of(mesh, timeout, CheckpointError)
    finish_saving(crew)
    crew = crew.begin(f"autotp.save({str(folder)!r})")

    def gather() -> dict[str, Any]:
        state = checkpoint_state.collect(model, mesh, optimizer, extra)
        return checkpoint_state.staged(state) if asynchronous else state

    with crew.alive():
        state = crew.together("what is saved", gather)
    saving = Saving(crew, state, folder, keep)
    if asynchronous:
        _running[crew.ranks] = saving
        saving._thread.start()
    else:
        saving._write()
        saving.wait()
    return saving


def finish_saving(crew: Crew) -> None:
    """Wait for what these ranks are still writing; its error is raised here if nobody has seen it."""
    before = _running.pop(crew.ranks, None)
    if before is not None:
        before._thread.join()
        if before._error is not None:
            before.wait()


@torch.no_grad()
def resume(
    model: nn.Module,
    path: str | Path,
    *,
    optimizer: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Fill a model and what belongs to it from the newest checkpoint in ``path``, or from the one that it is.

    The model may be sharded over another mesh than the one that saved, not sharded at all, or on meta. All ranks of its
    mesh call it; each reads its own part.

    Args:
        optimizer: as saved; new ones from the parameters of the model. Their state and options are replaced.
        extra: objects with ``load_state_dict``, by the names that they were saved under.
        mesh, timeout: as in :func:`autotp.save`.

    Returns:
        All of ``extra`` as it was saved.

    Raises:
        AutotpError: on all ranks, and before anything is changed: no checkpoint, a file that is missing or truncated,
            other parameters, shapes or dtypes than the model's, other groups than the optimizer's.
    """
    mesh = mesh_of_model(model, mesh)
    folder = Path(path).expanduser().absolute()
    crew = crew_of(mesh, timeout, CheckpointError)
    finish_saving(crew)
    crew = crew.begin(f"autotp.resume({str(folder)!r})")
    with crew.alive():
        found = crew.step("find", lambda: None, lambda ranks: dict.fromkeys(ranks, checkpoint_files.newest(folder)))

        def look() -> tuple[Metadata, dict[str, Any], list[Slot]]:
            metadata = checkpoint_files.describe(found)
            if VALUES not in metadata.state_dict_metadata:
                raise CheckpointError(
                    f"{found} was not written by autotp.save: load it with torch.distributed.checkpoint"
                )
            values = checkpoint_files.read(found, metadata, {}, [VALUES])[VALUES]
            slots = checkpoint_state.settled(model)
            _check(found, metadata, values, slots, optimizer, extra)
            return metadata, values, slots

        metadata, values, slots = crew.together("look", look)
        crew.together("read", lambda: _fill(model, mesh, found, metadata, slots, optimizer, values))
        crew.together("extra", lambda: [o.load_state_dict(values["extra"][k]) for k, o in (extra or {}).items()])
    return dict(values["extra"])


def mesh_of_model(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh whose ranks act together; None for this process alone."""
    if mesh is not None:
        return of_one_model(root_mesh(mesh)) if mesh.size() > 1 else None
    for p in model.parameters():
        if torch_hooks.is_dtensor(p):
            return of_one_model(root_mesh(dtensor_spec(p).mesh))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(
            f"the model is not sharded, and there are {dist.get_world_size()} processes: pass mesh=, the ranks that "
            "hold it (a mesh of one rank if it is this one alone)"
        )
    return None


def _check(
    found: Path, metadata: Metadata, values: dict[str, Any], slots: list[Slot], optimizer: Optimizers, extra: Any
) -> None:
    """Whether everything that is there fits, before anything is changed."""
    stored = metadata.state_dict_metadata
    problems = [text for slot in slots if (text := _misfit(slot.tensor, stored.get(f"model.{slot.name}"), slot.name))]
    names = {f"model.{slot.name}" for slot in slots}
    problems += [f"{k[6:]} has no place in the model" for k in stored if k.startswith("model.") and k not in names]
    optimizers = checkpoint_state.as_list(optimizer)
    if len(optimizers) > len(values["optimizers"]):
        problems.append(f"{len(values['optimizers'])} optimizers were saved, {len(optimizers)} are given")
    for i, (given, saved) in enumerate(zip(optimizers, values["optimizers"], strict=False)):
        problems += _group_problems(i, given, saved, slots)
    problems += [f"extra {key!r} was not saved" for key in extra or {} if key not in values["extra"]]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{found} does not fit: {'; '.join(problems[:_SHOWN])}{more}")


def _misfit(tensor: Tensor, stored: Any, name: str) -> str:
    if not isinstance(stored, TensorStorageMetadata):
        return f"{name} is not in it"
    if tuple(stored.size) != tuple(tensor.shape):
        return f"{name} has shape {list(stored.size)}, {list(tensor.shape)} in the model"
    if stored.properties.dtype != tensor.dtype:
        return f"{name} is {stored.properties.dtype}, {tensor.dtype} in the model"
    return ""


def _group_problems(number: int, optimizer: Optimizer, saved: dict[str, Any], slots: list[Slot]) -> list[str]:
    kind = type(optimizer).__name__
    if kind != saved["class"]:
        return [f"optimizer {number} is a {kind}, saved was a {saved['class']}"]
    names = checkpoint_state.parameter_names(number, optimizer, slots)
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if len(groups) != len(saved["groups"]):
        return [f"optimizer {number} has {len(groups)} groups of parameters, saved were {len(saved['groups'])}"]
    for i, (here, there) in enumerate(zip(groups, saved["groups"], strict=True)):
        if other := sorted(set(here) ^ set(there["names"])):
            return [f"group {i} of optimizer {number} differs from the saved one in {other[0]}"]
    return []


def _fill(
    model: nn.Module,
    mesh: DeviceMesh | None,
    found: Path,
    metadata: Metadata,
    slots: list[Slot],
    optimizer: Optimizers,
    values: dict[str, Any],
) -> None:
    slots = _on_device(model, mesh, slots)
    state: dict[str, Any] = {f"model.{slot.name}": slot.tensor.detach() for slot in slots}
    kept: list[tuple[Optimizer, dict[Any, dict[str, Any]], dict[str, Any]]] = []
    for i, (given, saved) in enumerate(zip(checkpoint_state.as_list(optimizer), values["optimizers"], strict=False)):
        kept.append((given, _empty_entries(i, given, saved, metadata, slots, state), saved))
    rng = {name: generator for name, generator in checkpoint_state.generators(mesh) if _holds(metadata, name)}
    state |= {name: torch.empty(_size(metadata, name), dtype=torch.uint8) for name in rng}
    checkpoint_files.read(found, metadata, state)
    for name, generator in rng.items():
        generator.set_rng_state(state[name])
    for given, entries, saved in kept:
        given.state.clear()
        given.state.update(entries)
        for group, there in zip(given.param_groups, saved["groups"], strict=True):
            group.update(there["options"])
    modules = dict(model.named_modules())
    for path, value in values["modules"].items():
        modules[path].set_extra_state(value)


def _on_device(model: nn.Module, mesh: DeviceMesh | None, slots: list[Slot]) -> list[Slot]:
    """The same model with memory for what is on meta, and with the buffers that no checkpoint holds."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return slots
    device = mesh.device_type if mesh is not None else "cpu"
    construction.put_buffers(model, construction.buffers_of(model, {id(s.tensor) for s in slots}), device)
    for slot in slots:
        local = local_of(slot.tensor) if torch_hooks.is_dtensor(slot.tensor) else slot.tensor
        if local.is_meta:
            fill(slot, torch.empty_like(local, device=device), device)
    return checkpoint_state.settled(model)


def _empty_entries(
    number: int,
    optimizer: Optimizer,
    saved: dict[str, Any],
    metadata: Metadata,
    slots: list[Slot],
    state: dict[str, Any],
) -> dict[Any, dict[str, Any]]:
    """What the optimizer keeps for each parameter, with tensors that are to be filled; these are added to `state`."""
    names = checkpoint_state.parameter_names(number, optimizer, slots)
    entries: dict[Any, dict[str, Any]] = {}
    groups = list(zip(optimizer.param_groups, saved["groups"], strict=True))
    on_device = {id(p): _counts_there(there["options"]) for group, there in groups for p in group["params"]}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        there = saved["entries"].get(names[id(p)])
        if there is None:
            continue
        entries[p] = dict(there["values"])
        for key in there["tensors"]:
            name = checkpoint_state.entry_key(number, names[id(p)], key)
            described: Any = metadata.state_dict_metadata[name]
            size, dtype = described.size, described.properties.dtype
            if tuple(size) == tuple(p.shape) and key != "step":
                made = torch.zeros_like(p, dtype=dtype)
            else:
                made = torch.zeros(size, dtype=dtype, device=p.device if on_device[id(p)] else "cpu")
            entries[p][key] = state[name] = made.detach()
    return entries


def _counts_there(options: Mapping[str, Any]) -> bool:
    """Whether an optimizer counts its steps on the parameters' device."""
    return bool(options.get("fused") or options.get("capturable"))


def _holds(metadata: Metadata, name: str) -> bool:
    return name in metadata.state_dict_metadata


def _size(metadata: Metadata, name: str) -> torch.Size:
    described: Any = metadata.state_dict_metadata[name]
    size: torch.Size = described.size
    return size
