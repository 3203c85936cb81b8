"""What the ranks run for tests/exact/test_checkpoints.py."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.errors import AutotpError
from tests.exact.loading_tasks import empty, original
from tests.harness.tasks import grid_of, mesh_of
from tests.harness.two_axes import _loss, _varied
from tests.models.common import Built

SHAPES: dict[str, tuple[int, ...]] = {"tp=4": (4,), "tp=2": (2,), "tp=1": (1,), "2x2": (2, 2), "unsharded": ()}


def built(name: str, *, other: bool = False) -> Built:
    """A model in evaluation mode (its statistics stay) with two different examples; `other` has other values."""
    model, args, kwargs = original(name)
    args, kwargs = _varied(args), dict(zip(kwargs, _varied(tuple(kwargs.values())), strict=True))
    if other:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(0.5).add_(0.1)
    return model.eval(), args, kwargs


def mesh_for(shape: str) -> DeviceMesh | None:
    """The ranks of a shape; None where there are none, or this rank has no part."""
    sizes = SHAPES[shape]
    if not sizes:
        return None
    return mesh_of(sizes[0]) if len(sizes) == 1 else grid_of(sizes, ("dp", "tp"))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=3e-3, amsgrad=True)


def train(model: nn.Module, optimizer: Any, scheduler: Any, given: Any, steps: int, mesh: Any = None) -> list[float]:
    """The losses over the whole batch before each step."""
    args, kwargs = given
    data = mesh is not None and mesh.ndim == 2
    part = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1) if data else slice(None)
    losses = []
    for _ in range(steps):
        loss = _loss(model(*(a[part] for a in args), **{k: v[part] for k, v in kwargs.items()}))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if data:
            dist.all_reduce(whole, group=mesh["dp"].get_group())
            whole /= mesh["dp"].size()
        losses.append(float(whole))
    return losses


def set_up(name: str, mesh: Any, *, other: bool = False, meta: str = "") -> tuple[Any, ...]:
    """(model, optimizer, scheduler, inputs); `meta` is how a model without values is built."""
    model, args, kwargs = built(name, other=other)
    if meta:
        model = empty(name, meta)
    if mesh is not None:
        autotp.shard(model, mesh, sample=(args, kwargs))
    optimizer = optimizer_of(model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), (args, kwargs)


def resumed(payload: dict[str, Any]) -> dict[str, Any]:
    """Two steps and a checkpoint on four ranks, then two steps of each shape; losses beside the uninterrupted ones."""
    name, folder = payload["model"], payload["folder"]
    model, optimizer, scheduler, given = set_up(name, None)
    expected = train(model, optimizer, scheduler, given, 4)
    first = mesh_for(payload["saved"])
    model, optimizer, scheduler, given = set_up(name, first)
    saved = train(model, optimizer, scheduler, given, 2, first)
    torch.manual_seed(5)
    saving = autotp.save(
        model,
        folder,
        optimizer=optimizer,
        extra={"scheduler": scheduler, "step": 2},
        asynchronous=payload["asynchronous"],
    )
    drawn = torch.rand(1)
    on = train(model, optimizer, scheduler, given, 2, first)  # while it is written
    path = saving.wait()
    found: dict[str, Any] = {"expected": expected, "saved": saved + on, "path": str(path)}
    for shape in payload["shapes"]:
        kind, _, meta = shape.partition(" ")
        mesh = mesh_for(kind)
        size = mesh.size() if mesh is not None else 1
        if dist.get_rank() >= size:
            continue
        model, optimizer, scheduler, given = set_up(name, mesh, other=True, meta=meta)
        assert not meta or any(p.is_meta for p in model.parameters())
        alone = mesh if mesh is not None else mesh_of(1)
        torch.manual_seed(6)
        extra = autotp.resume(model, folder, optimizer=optimizer, extra={"scheduler": scheduler}, mesh=alone)
        again = torch.rand(1)
        losses = train(model, optimizer, scheduler, given, 2, mesh)
        same_draw = bool(torch.equal(again, drawn)) or (kind == "2x2" and dist.get_rank() >= 2)
        found[shape] = {"losses": losses, "step": extra["step"], "draw": same_draw}
    dist.barrier()
    return found


# ---- what goes wrong


class Pair(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """An MLP."""
        return self.down(torch.relu(self.up(x)))


def pair(mesh: DeviceMesh, value: float) -> nn.Module:
    """The two layers with every value the same, cut."""
    model = Pair().double()
    for p in model.parameters():
        nn.init.constant_(p, value)
    return autotp.shard(model, mesh, sample=torch.randn(4, 16).double())


def refused(action: Callable[[], Any]) -> dict[str, Any]:
    """What was raised, and after how many seconds."""
    start = time.monotonic()
    try:
        action()
    except AutotpError as error:
        return {"error": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - start}
    return {"error": "", "kind": "", "seconds": time.monotonic() - start}


def value_in(model: nn.Module, folder: str) -> float:
    """The value of the newest checkpoint."""
    autotp.resume(model, folder)
    return float(model.up.weight.to_local().flatten()[0])


def full_disk(*_: Any, **__: Any) -> Any:
    """A write that fails as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def faults(folder: str) -> dict[str, Any]:
    """One checkpoint, then every kind of failure; what each rank was told, and what can be resumed afterwards."""
    mesh, rank = mesh_of(4), dist.get_rank()
    model, found = pair(mesh, 1.0), {}
    autotp.save(model, folder)
    nn.init.constant_(model.up.weight, 2.0)

    only = refused(lambda: autotp.save(model, folder, timeout=3)) if rank == 2 else {}
    dist.barrier()
    found["one rank"] = only
    found["another folder"] = refused(lambda: autotp.save(model, folder + ("x" if rank == 3 else ""), timeout=60))
    patched = mock.patch.object(FileSystemWriter, "write_data", full_disk)
    if rank != 1:
        patched = mock.patch.dict({})
    with patched:
        found["full disk"] = refused(lambda: autotp.save(model, folder))
        saving = autotp.save(model, folder, asynchronous=True)
        found["full disk later"] = refused(lambda: autotp.save(model, folder))
        found["said once"] = refused(saving.wait)
    found["after"] = value_in(pair(mesh, 0.0), folder)
    found["left"] = sorted(p.name for p in Path(folder).iterdir())

    autotp.save(model, folder)  # a second one, with the value 2
    found["second"] = value_in(pair(mesh, 0.0), folder)
    dist.barrier()
    newest = sorted(Path(folder).glob("[0-9]*"))[-1]
    if rank == 0:
        (newest / "__2_0.distcp").write_bytes((newest / "__2_0.distcp").read_bytes()[:-7])
    dist.barrier()
    target = pair(mesh, 0.0)
    found["truncated"] = refused(lambda: autotp.resume(target, folder))
    dist.barrier()
    if rank == 0:
        (newest / "__2_0.distcp").unlink()
    dist.barrier()
    found["missing"] = refused(lambda: autotp.resume(target, folder))
    found["untouched"] = float(target.up.weight.to_local().abs().max())
    autotp.resume(target, newest.parent / "00000001")
    found["older"] = float(target.up.weight.to_local().flatten()[0])
    return found


def killed(folder: str) -> dict[str, Any]:
    """Rank 1 is killed while it writes; what rank 0 is told."""
    import autotp.crew

    mesh = mesh_of(2)
    model = pair(mesh, 1.0)
    autotp.save(model, folder)
    nn.init.constant_(model.up.weight, 2.0)
    autotp.crew.SILENT_SECONDS = 3.0
    if dist.get_rank() == 1:
        with mock.patch.object(FileSystemWriter, "write_data", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            autotp.save(model, folder)
    Path(folder, "told").write_text(repr(refused(lambda: autotp.save(model, folder))))
    return {}


# ---- ordinary files


def exported(payload: dict[str, Any]) -> dict[str, Any]:
    """Export a sharded model in several files; a folder that is in use, and a full disk."""
    from autotp import weight_export

    name, folder = payload["model"], Path(payload["folder"])
    mesh = mesh_for(payload["shape"])
    model, args, kwargs = built(name)
    largest: list[int] = [0]
    whole = weight_export._whole

    def watched(tensor: Tensor) -> Tensor:
        full = whole(tensor)
        largest[0] = max(largest[0], full.numel() * full.dtype.itemsize)
        return full

    autotp.shard(model, mesh, sample=(args, kwargs))
    with mock.patch.object(weight_export, "_whole", watched):
        autotp.export(model, folder / "out", max_file_bytes=payload["bytes"])
    again = refused(lambda: autotp.export(model, folder / "out"))
    with mock.patch.object(weight_export._Files, "_next", full_disk):
        disk = refused(lambda: autotp.export(model, folder / "full"))
    dist.barrier()  # rank 0 takes away what it had written, while the others have their error already
    return {"again": again, "disk": disk, "largest": largest[0], "left": sorted(p.name for p in folder.iterdir())}
