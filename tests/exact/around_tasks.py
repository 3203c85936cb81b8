"""What people put around a model, on a sharded one and on an unsharded one, in float64 unless it is about precision."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import autotp
from autotp import structures
from autotp.comparing import gathered, local
from autotp.errors import AutotpError
from tests.exact import around_models
from tests.exact.compile_tasks import error, step
from tests.harness.tasks import mesh_of
from tests.models import registry

Change = Callable[[nn.Module], Any]


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the registry or of around_models, with the same values on every rank."""
    torch.manual_seed(0)
    return registry.build(name) if ":" in name else around_models.MODELS[name]()


def double(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same in float64."""
    model, args, kwargs = build(name)
    return model.double(), *structures.map_tensors((args, kwargs), lambda t: t.double() if t.is_floating_point() else t)


# ---------------------------------------------------------------- changes of a model, before or after sharding


def _nothing(model: nn.Module) -> None:
    pass


def _freeze(model: nn.Module) -> None:
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 != 0)


def _checkpoint(model: Any, **options: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, **options)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    heavy = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if heavy else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(model: Any) -> None:
    _checkpoint(model, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy))


def _gradient_checkpointing(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable()


def _adapt(*names: str) -> Change:
    def change(model: nn.Module) -> None:
        torch.manual_seed(3)
        for name in names:
            setattr(model, name, around_models.Adapted(getattr(model, name)).double())

    return change


CHANGES: dict[str, Change] = {
    "": _nothing,
    "freeze": _freeze,
    "checkpoint": _checkpoint,
    "selective": _selective,
    "gradient_checkpointing": _gradient_checkpointing,
    "adapt head": _adapt("head"),
    "adapt up": _adapt("up"),
    "adapt down": _adapt("down"),
    "adapt v": _adapt("v"),
    "adapt q": _adapt("q"),
}


def changed(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A model that is changed before and after it is sharded, against one that is changed and not sharded."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    before, after = CHANGES[payload.get("before", "")], CHANGES[payload.get("after", "")]
    model, args, kwargs = double(payload["name"])
    before(model)
    reference = copy.deepcopy(model)
    after(reference)
    expected = step(reference, args, kwargs)
    try:
        autotp.shard(model, mesh, sample=(args, kwargs))
        after(model)
        found = step(model, args, kwargs)
    except AutotpError as e:
        return {"refused": str(e)}
    same = [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    return {**errors_of(expected, found), "names": same, "held": held(model)}


def served(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A model that is sharded and run in inference mode; then trained outside of it."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double(payload["name"])
    reference = copy.deepcopy(model)
    with torch.inference_mode():
        expected = dict(structures.named_tensors(reference(*args, **kwargs)))
        autotp.shard(model, mesh, sample=(args, kwargs))
        found = dict(structures.named_tensors(model(*args, **kwargs)))
    apart = max(float((expected[n] - t).abs().max()) for n, t in found.items() if t.is_floating_point())
    return {"apart": apart, **errors_of(step(reference, args, kwargs), step(model, args, kwargs)), "held": held(model)}


def errors_of(expected: Any, found: Any) -> dict[str, Any]:
    """Differences of forward and gradients, and whether the same parameters have one."""
    return {
        "forward": error(expected[0], found[0]),
        "gradient": error(expected[1], found[1]),
        "same_gradients": set(expected[1]) == set(found[1]),
    }


def held(model: nn.Module) -> float:
    """The share of the parameters that this rank has."""
    return sum(local(p).numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- training loops


def accumulate(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Gradients of three backwards, added up."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double(payload["name"])
    reference = copy.deepcopy(model)
    autotp.shard(model, mesh, sample=(args, kwargs))
    sums = []
    for which in (reference, model):
        for scale in (1.0, 0.5, 2.0):
            scaled = structures.map_tensors(args, lambda t, s=scale: t * s if t.is_floating_point() else t)
            (structures.weighted_sum(which(*scaled, **kwargs)) / 3).backward()
        sums.append({n: gathered(p.grad) for n, p in which.named_parameters() if p.grad is not None})
    return {"gradient": error(*sums)}


def copies(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A copy of a sharded model is a sharded model of its own; so is a moving average of it."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double(payload["name"])
    reference = copy.deepcopy(model)
    autotp.shard(model, mesh, sample=(args, kwargs))
    twin = copy.deepcopy(model)
    expected = step(reference, args, kwargs)
    errors = errors_of(expected, step(twin, args, kwargs))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    apart = errors_of(expected, step(model, args, kwargs))
    averages = [
        AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=payload.get("buffers", False))
        for m in (reference, model)
    ]
    for which, average in zip((reference, model), averages, strict=True):
        optimizer = torch.optim.AdamW(which.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(3):
            step(which, args, kwargs)
            optimizer.step()
            average.update_parameters(which)
    mean = [{n: gathered(p.detach()) for n, p in a.named_parameters()} for a in averages]
    outputs = [step(a, args, kwargs)[0] for a in averages]
    return {
        "copy": max(errors["forward"], errors["gradient"]),
        "apart": max(apart["forward"], apart["gradient"]),
        "average": max(error(*mean), error(*outputs)),
    }


def precision(payload: dict[str, Any]) -> dict[str, Any] | None:
    """How far bfloat16 is from float64, unsharded and sharded: as weights, or by autocast."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    exact = step(*double(payload["name"]))
    model, args, kwargs = build(payload["name"])
    if payload["how"] == "weights":
        model = model.bfloat16()
        args, kwargs = structures.map_tensors((args, kwargs), lambda t: t.bfloat16() if t.is_floating_point() else t)
    reference, found = copy.deepcopy(model), []
    autotp.shard(model, mesh, sample=(args, kwargs))
    for which in (reference, model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=payload["how"] == "autocast"):
            found.append(step(which, args, kwargs))
    as_exact = [[{n: t.double() for n, t in part.items()} for part in one] for one in found]
    kinds = [{n: t.dtype for part in one for n, t in part.items()} for one in found]
    return {
        "forward": [error(exact[0], one[0]) for one in as_exact],
        "gradient": [error(exact[1], one[1]) for one in as_exact],
        "same_types": kinds[0] == kinds[1],
    }


# ---------------------------------------------------------------- files


def pickled(payload: dict[str, Any]) -> dict[str, Any] | None:
    """What pickling a sharded model says, and whether its state comes back from a file."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double(payload["name"])
    autotp.shard(model, mesh, sample=(args, kwargs))
    said = []
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        try:
            save(model)
        except AutotpError as e:
            said.append(str(e))
    expected = step(model, args, kwargs)[0]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(torch.load(file, weights_only=False))
    return {"said": said, "error": error(expected, step(model, args, kwargs)[0])}
