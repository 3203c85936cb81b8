"""Tasks about training: clipping, optimizers, dropout, recomputation, different starts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from autotp import comparing, structures
from autotp.errors import AutotpError
from autotp.measuring import Settings, run
from autotp.promotion import widen_model
from tests.cases.tasks import built, seeded
from tests.harness.tasks import autotp_shard, mesh_of

WRAPPED = "_checkpoint_wrapped_module."


def train(payload: dict[str, Any]) -> dict[str, float] | None:
    """Two steps of clipping and AdamW beside the unsharded model: errors of the norm and of the parameters."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    model, args, kwargs = built(payload["recipe"], train=True)
    widen_model(model)
    reference = copy.deepcopy(model)
    inputs = structures.map_tensors((args, kwargs), lambda t: t.double() if t.is_floating_point() else t)
    with Settings().mode():
        model = autotp_shard(model, mesh, inputs)
    norm_error = 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, **payload.get("adamw", {})) for m in (reference, model)]
    for _ in range(2):
        norms = []
        for which, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            run(which, inputs, Settings())
            norm = clip_grad_norm_(which.parameters(), 1.0, foreach=payload.get("foreach"))
            norms.append(float(comparing.gathered(norm)))
            optimizer.step()
        norm_error = max(norm_error, abs(norms[0] - norms[1]) / norms[0])
    old, new = dict(reference.named_parameters()), dict(model.named_parameters())
    errors, problems = comparing.errors(old, new, mesh.get_group())
    assert not problems, problems
    return {"norm_error": norm_error, "parameter_error": max(errors.values())}


def dropout(payload: dict[str, Any]) -> dict[str, Any]:
    """Masks, outputs and whole gradients of the dropout model in training mode, as this rank sees them."""
    names = ("dp", "tp") if payload["dp"] > 1 else ("tp",)
    sizes = (payload["dp"], 4 // payload["dp"]) if payload["dp"] > 1 else (4,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model, args, kwargs = built("K15", train=True)
    model = autotp_shard(model, mesh, (args, kwargs), fsdp=False)
    seen: dict[str, bytes] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(name, (output == 0).numpy().tobytes())

    handles = [getattr(model, name).register_forward_hook(keep(name)) for name in ("inner", "outer")]
    outputs = []
    for _ in range(2):
        seeded(mesh, by_rank=payload["by_rank"])
        model.zero_grad()
        output = model(*args, **kwargs)
        loss = structures.weighted_sum(output)
        assert loss is not None
        loss.backward()
        outputs.append(output.detach().tolist())
    for handle in handles:
        handle.remove()
    whole = {n: p.grad for n, p in model.named_parameters() if comparing.whole(p) and p.grad is not None}
    gradients = {name: comparing.gathered(gradient).tolist() for name, gradient in whole.items()}
    return {"seen": seen, "outputs": outputs, "gradients": gradients, "coordinate": mesh.get_coordinate()}


def different_start(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Each rank builds with another seed: afterwards all must have rank 0's values, or be told."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    group = mesh.get_group()
    _, args, kwargs = built("K16")
    from tests.cases.modules_whole import StartsDifferent

    torch.manual_seed(100 + dist.get_rank())
    model = StartsDifferent()
    firsts: list[Any] = [None] * payload["tp"]
    dist.all_gather_object(firsts, comparing.snapshot(model), group=group)
    try:
        model = autotp_shard(model, mesh, (args, kwargs))
    except AutotpError as error:
        return {"refused": str(error)}
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {name: comparing.gathered(value.detach()) for name, value in values.items() if comparing.whole(value)}
    wrong = [name for name, value in whole.items() if not torch.equal(value, firsts[0][name])]
    output = model(*args, **kwargs)
    return {"wrong": wrong, "spread": comparing.spread([{"output": output}], group)}


def recompute_after(payload: dict[str, Any]) -> dict[str, float] | None:
    """Wrappers are put around blocks of the sharded model: the gradients stay those of the unsharded one."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    model, args, kwargs = built("K42 plain", train=True)
    widen_model(model)
    reference = copy.deepcopy(model)
    inputs = structures.map_tensors((args, kwargs), Tensor.double)
    with Settings().mode():
        model = autotp_shard(model, mesh, inputs)
    for name in payload["blocks"]:
        setattr(model, name, checkpoint_wrapper(getattr(model, name)))
    expected, actual = run(reference, inputs, Settings()), run(model, inputs, Settings())
    group = mesh.get_group()
    outputs, _ = comparing.errors(expected.outputs, actual.outputs, group)
    gradients, _ = comparing.errors(_gradients(reference), _gradients(model), group)
    return {"forward_error": max(outputs.values()), "gradient_error": max(gradients.values())}


def recompute_dropout(payload: dict[str, Any]) -> dict[str, float] | None:
    """With dropout: recomputed or not, the same seed gives the same gradients."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    model, args, kwargs = built("K42 dropout", train=True)
    widen_model(model)
    inputs = structures.map_tensors((args, kwargs), Tensor.double)
    model = autotp_shard(model, mesh, inputs)
    settings = Settings(dropout=True)
    found: list[dict[str, Tensor | None]] = []
    for recompute in (True, True, False):
        model.recompute = recompute
        model.zero_grad()
        run(model, inputs, settings)
        found.append({n: None if g is None else comparing.gathered(g).clone() for n, g in _gradients(model).items()})
    group = mesh.get_group()
    again, _ = comparing.errors(found[0], found[1], group)
    plain, _ = comparing.errors(found[0], found[2], group)
    return {"again": max(again.values()), "plain": max(plain.values())}


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name.replace(WRAPPED, ""): parameter.grad for name, parameter in model.named_parameters()}
