"""Training loops as people write them around a parallelised model, beside the unsharded one in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import autotp
from autotp.comparing import gathered
from tests.exact.around_tasks import double, errors_of, held
from tests.exact.compile_tasks import step
from tests.harness.tasks import grid_of, mesh_of
from tests.models import registry
from tests.models.common import tokens

STEPS, MICRO = 4, 2


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan calls it: a model on meta, a mesh of all axes."""
    return autotp.shard(model, mesh, sample=tokens())


def initialise(model: nn.Module) -> None:
    """Starting values drawn on the parameters that a rank has."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.trunc_normal_(p, std=0.05)
        else:
            (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(p)


class Loop:
    """AdamW, warm-up, clipping, gradients of several batches added up."""

    def __init__(self, model: nn.Module, part: int = 0, parts: int = 1) -> None:
        self.model, self.part, self.parts = model, part, parts
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def run(self, steps: range) -> list[tuple[float, float]]:
        """Loss and norm of each step, of the whole batch."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> tuple[float, float]:
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(MICRO):
            ids = tokens(batch=4, seed=10 * step + micro).chunk(self.parts)[self.part]
            out = self.model(ids)
            logits = out[0] if isinstance(out, tuple) else out
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) / MICRO
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
        self.optimizer.step()
        self.scheduler.step()
        return float(total), float(gathered(norm))


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: gathered(p.detach()).clone() for n, p in model.named_parameters()}


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def _made(payload: dict[str, Any], mesh: DeviceMesh) -> nn.Module:
    build = registry.ENTRIES[payload["name"]].build
    if payload["draws"]:
        model = autotp.on_meta(lambda: build()[0]).double()
    else:
        with torch.device("meta"):
            model = build()[0].double()
    model = parallelize(model, mesh)
    if payload["draws"]:
        autotp.materialize(model, seed=3)
    else:
        buffers = dict(registry.build(payload["name"])[0].named_buffers())
        model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())  # torch draws for each part of a DTensor from the rank's own generator
        initialise(model)
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    return model


def titan(payload: dict[str, Any]) -> dict[str, Any]:
    """Built on meta, parallelised, given values, trained; saved by DCP in the middle, and gone on with by a new one."""
    mesh = grid_of((2, 2), ("dp_shard", "tp"))
    place, folder = mesh["dp_shard"].get_local_rank(), payload["folder"]
    try:
        model = _made(payload, mesh)
    except (autotp.AutotpError, NotImplementedError) as error:
        return {"refused": str(error)}
    reference = registry.build(payload["name"])[0].double()
    start = _whole(model)
    reference.load_state_dict(start, strict=False)
    expected, loop = Loop(reference), Loop(model, place, 2)
    wanted = expected.run(range(STEPS))
    found = loop.run(range(2))
    parts = get_state_dict(model, loop.optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1], "step": loop.scheduler.state_dict()}, checkpoint_id=folder)
    found += loop.run(range(2, STEPS))
    again = Loop(_made(payload, mesh), place, 2)
    model_state, optimizer_state = get_state_dict(again.model, again.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": again.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(again.model, again.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    again.scheduler.load_state_dict(state["step"])
    resumed = again.run(range(2, STEPS))
    sums = torch.tensor([[loss for loss, _ in found], [loss for loss, _ in resumed + resumed]], dtype=torch.float64)
    dist.all_reduce(sums, group=mesh["dp_shard"].get_group())
    norms, again_norms = ([norm for _, norm in run] for run in (found, resumed))
    expected_norms = [norm for _, norm in wanted]
    matrices = {n: p for n, p in start.items() if p.ndim > 1}
    return {
        "start": {n: (*_drawn(p), len(p.unique()) / p.numel()) for n, p in matrices.items()},
        "losses": max(abs(a - b[0]) for a, b in zip((sums[0] / 2).tolist(), wanted, strict=True)),
        "norms": max(abs(a - b) for a, b in zip(norms + again_norms, expected_norms + expected_norms[2:], strict=True)),
        "trained": _apart(_whole(model), _whole(reference)),
        "resumed": _apart(_whole(again.model), _whole(reference)),
        "held": held(model),
    }


def _drawn(p: Tensor) -> tuple[float, float]:
    """How far the mean is from zero, in standard errors; the standard deviation."""
    return float(p.mean().abs() * p.numel() ** 0.5 / p.std()), float(p.std())


def ddp(payload: dict[str, Any]) -> dict[str, Any] | None:
    """What DistributedDataParallel says of a sharded model, and whether that still computes the same."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double(payload["name"])
    expected = step(copy.deepcopy(model), args, kwargs)
    autotp.shard(model, mesh, sample=(args, kwargs))
    try:
        DistributedDataParallel(model, process_group=mesh.get_group())
    except autotp.AutotpError as refusal:
        found = errors_of(expected, step(model, args, kwargs))
        return {"refused": str(refusal), "error": max(found["forward"], found["gradient"])}
    return {"refused": ""}
