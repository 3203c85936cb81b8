"""``autotp.load``: fill a model that is on meta from weight files, every rank reading only what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp import construction, torch_hooks
from autotp.data_parallel import Fsdp
from autotp.errors import PlanError, WeightsError
from autotp.mesh import resolve_mesh
from autotp.parts import fill, held, slots
from autotp.plan_types import Plan
from autotp.sharding import shard
from autotp.stored import Stored
from autotp.together import same_everywhere, together
from autotp.weight_files import open_weights
from autotp.weight_names import Allow, Assigned, Rename, assign


def load(
    model: nn.Module,
    path: str | Path | Sequence[str | Path],
    mesh: DeviceMesh,
    *,
    rename: Rename | None = None,
    allow_missing: Allow = False,
    allow_unexpected: Allow = False,
    cast: bool = False,
    plan: Plan | str | Path | None = None,
    sample: Any = None,
    rules: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    fsdp: Fsdp = True,
    min_bytes: int = 0,
    strict: bool = False,
) -> nn.Module:
    """Fill ``model``, which is on meta, from files; shard it over ``mesh`` first if it is not. Returns the same object.

    All ranks call it. Each reads only the slices that it holds, straight into its own parameters; files are checked
    before the model is changed. Buffers that are not in the files get the values that their constructor gives them.

    Args:
        path: a safetensors file, a folder with one, a folder with several (with or without an index), an index, or
            a list of files. ``.bin``, ``.pt`` and ``.pth`` files are read where there are no safetensors files, by
            ``torch.load`` with ``weights_only=True`` and ``mmap=True``. Names and packing of transformers' models
            follow its own tables.
        rename: from a key in the files to the name in the model, or to None to leave it out.
        allow_missing: ``True``, or globs of parameters that may be missing in the files. They stay on meta, for
            :func:`autotp.materialize`.
        allow_unexpected: ``True``, or globs of keys that the model has no place for.
        cast: convert where a file has another dtype than the model.
        plan, sample, rules, sequence_parallel, fsdp, min_bytes, strict: as in :func:`autotp.shard`, which is called
            with them; not for a model that is sharded already.

    Raises:
        AutotpError: on all ranks, and before the model is changed: a file that is truncated, corrupted or not there;
            keys that are missing or unexpected; another shape or dtype. The text names key and file. Also what
            :func:`autotp.shard` raises; and a buffer that is neither in the files nor known from a constructor.
    """
    resolve_mesh(mesh)
    given = {"plan": plan, "sample": sample, "rules": rules}
    sharded = any(torch_hooks.is_dtensor(p) for p in model.parameters())
    device = mesh.device_type
    with together(mesh):
        if sharded and (told := [name for name, value in given.items() if value is not None]):
            raise PlanError(f"the model is sharded already, so {told[0]}= comes too late: pass it to autotp.shard")
        stored = open_weights(path)
        sources = assign(
            model, stored, rename=rename, allow_missing=allow_missing, allow_unexpected=allow_unexpected, cast=cast
        )
        # Integers in buffers decide how a model is planned, so these are there first.
        first = [] if sharded else _read([a for a in sources if not a.slot.parameter], device)
        buffers = construction.buffers_of(model, {id(a.slot.tensor) for a in sources})
    same_everywhere(mesh, _digest(stored), f"the files in {path}")
    construction.put_buffers(model, buffers, device)
    for a, value in first:
        fill(a.slot, value, device)
    if not sharded:
        shard(
            model, mesh, plan=plan, sample=sample, rules=rules, sequence_parallel=sequence_parallel, fsdp=fsdp,
            min_bytes=min_bytes, strict=strict,
        )  # fmt: skip
    with together(mesh):
        values = _read(_again(model, sources), device)
    for a, value in values:
        fill(a.slot, value, device)
    return model


def _again(model: nn.Module, sources: Sequence[Assigned]) -> list[Assigned]:
    """The same sources for a model whose tensors have become others by sharding."""
    now = {slot.name: slot for slot in slots(model)}
    return [Assigned(slot=now[a.slot.name], source=a.source, others=a.others) for a in sources]


def _read(sources: Sequence[Assigned], device: str) -> list[tuple[Assigned, Tensor]]:
    """What this rank holds of each, in the order in which it lies in the files."""
    by_place = sorted(sources, key=lambda a: (str(a.source.file), getattr(a.source, "start", 0)))
    return [(a, _part(a).to(device)) for a in by_place]


def _part(assigned: Assigned) -> Tensor:
    want = held(assigned.slot.tensor)
    part = assigned.source.read(want)
    for other in assigned.others:
        if not torch.equal(_bits(part), _bits(other.read(want))):
            raise WeightsError(
                f"{' and '.join(assigned.slot.names)} are one tensor in the model, but {assigned.source.key} in "
                f"{assigned.source.file} and {other.key} in {other.file} differ: untie "
                "them, or leave one out with rename="
            )
    return part.to(assigned.slot.tensor.dtype)


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _digest(stored: Mapping[str, Stored]) -> str:
    described = [(key, s.file.name, s.shape, str(s.dtype), getattr(s, "start", 0)) for key, s in stored.items()]
    return hashlib.sha256(repr(described).encode()).hexdigest()
