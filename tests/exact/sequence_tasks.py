"""What ranks run to test sequence parallelism."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotp import comparing, structures
from autotp.errors import AutotpError
from autotp.measuring import Settings, measure, run
from autotp.promotion import widen_model
from tests.harness.planned import planned_once
from tests.harness.tasks import autotp_shard, mesh_of, summary
from tests.models import registry
from tests.models.common import tokens

SP = {"sequence_parallel": True}
Ways = dict[str, Any]


def exact(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Figures of a model of tests/models, and what its plan says of tokens."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    model, args, kwargs = registry.build(payload["name"])
    with planned_once(mesh) as made:
        apply = functools.partial(autotp_shard, **SP)
        found = summary(measure(model, (args, kwargs), mesh, apply, Settings(step=False)))
    plan = made[0].plan
    scattered = sum(c.kind == "reduce_scatter" and c.when == "forward" for c in plan.collectives)
    norms = sum(row.style == "sequence_parallel" for row in plan.parameters)
    told = [f.message for f in plan.findings if f.code == "TP-TOKENS"]
    return {**found, "scattered": scattered, "norms": norms, "told": told}


def _pair(name: str, tp: int, train: bool = False) -> tuple[nn.Module, nn.Module, Any]:
    """A model and the same sharded, both in float64."""
    model, args, kwargs = registry.build(name)
    widen_model(model.train(train))
    sharded = copy.deepcopy(model)
    with Settings().mode():
        return model, autotp_shard(sharded, mesh_of(tp), (args, kwargs), **SP), (args, kwargs)


def _input(name: str, length: int, other: int | None = None) -> Any:
    ids = tokens(length=length)
    if name.startswith("user:"):
        return (ids,), {}
    if other is not None:
        return (), {"input_ids": ids, "decoder_input_ids": tokens(length=other, seed=8)}
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def lengths(payload: dict[str, Any]) -> list[dict[str, Any]] | None:
    """One sharded model on inputs of several lengths: errors, the length of the output, notices."""
    tp = payload["tp"]
    mesh_of(tp)
    if dist.get_rank() >= tp:
        return None
    model, sharded, _ = _pair(payload["name"], tp)
    answers = []
    for length in payload["lengths"]:
        pair = (length,) if isinstance(length, int) else length
        inputs = _input(payload["name"], *pair)
        for m in (model, sharded):
            m.zero_grad()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            runs = [run(m, inputs, Settings()) for m in (model, sharded)]
        group = mesh_of(tp).get_group()
        forward, problems = comparing.errors(runs[0].outputs, runs[1].outputs, group)
        gradients, more = comparing.errors(_gradients(model), _gradients(sharded), group)
        notices = [str(w.message) for w in told if "sequence parallel" in str(w.message)]
        errors = {"forward": max(forward.values()), "gradient": max(gradients.values())}
        answers.append({**errors, "problems": problems + more, "notices": notices})
    return answers


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


class Recomputing(nn.Module):
    """Blocks that are recomputed in the backward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        m = self.model
        x = m.token(ids) + m.position(torch.arange(ids.shape[1]))
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return m.head(m.norm(x))


def recompute(payload: dict[str, Any]) -> dict[str, float] | None:
    """Two forwards of different lengths, then their backwards: every block is recomputed with its own length."""
    tp = payload["tp"]
    mesh = mesh_of(tp)
    if dist.get_rank() >= tp:
        return None
    model = Recomputing(widen_model(registry.build("user:nanogpt")[0]))
    sharded = copy.deepcopy(model)
    sharded = autotp_shard(sharded, mesh, ((tokens(),), {}), **SP)
    for m in (model, sharded):
        first, second = (m(tokens(length=n)) for n in payload["lengths"])
        losses = [structures.weighted_sum(out) for out in (first, second)]
        if payload["together"]:
            (losses[0] + losses[1]).backward()  # type: ignore[operator, union-attr]
        else:
            for loss in losses:
                loss.backward()  # type: ignore[union-attr]
    errors, problems = comparing.errors(_gradients(model), _gradients(sharded), mesh.get_group())
    assert not problems, problems
    return {"gradient": max(errors.values())}


def refused(payload: dict[str, Any]) -> str | None:
    """The words of the refusal of lengths that were equal in the sample and are not."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    from tests.models.sequence import TwoStreams

    model = autotp_shard(TwoStreams(), mesh, ((torch.randn(2, 8, 16), torch.randn(2, 8, 16)), {}), **SP)
    try:
        model(torch.randn(2, 8, 16), torch.randn(2, 1, 16))
    except AutotpError as error:
        return str(error)
    return ""


def masks(payload: object) -> dict[str, Any]:
    """Dropout on slices of the tokens: which elements each rank dropped, and what came out."""
    from tests.models.sequence import DroppingBlocks

    mesh = mesh_of(4)
    torch.manual_seed(3)
    model = autotp_shard(DroppingBlocks().train(), mesh, ((torch.randn(2, 8, 16),), {}), **SP)
    seen: list[Tensor] = []
    handle = model.drops[0].register_forward_hook(lambda m, args, out: seen.append(out == 0))
    outputs, x = [], torch.ones(2, 8, 16)
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(model(x).tolist())
    short = model(torch.ones(2, 2, 16)).tolist()
    handle.remove()
    return {"mask": seen[0].tolist(), "short": seen[2].tolist(), "outputs": outputs, "short_output": short}


def saved(payload: dict[str, Any]) -> dict[str, float] | None:
    """Bytes kept for the backward outside of the cut layers, and handed on between blocks, against without sp."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    found = {}
    for way in (False, True):
        model, args, kwargs = registry.build(payload["name"])
        sharded = autotp_shard(model, mesh, (args, kwargs), sequence_parallel=way)
        found[way] = _kept(sharded, payload["blocks"], payload["norms"], args, kwargs)
    return {key: found[True][key] / found[False][key] for key in found[True]}


def _kept(model: nn.Module, blocks: str, norms: list[str], args: Any, kwargs: Any) -> dict[str, int]:
    """Bytes of what blocks hand on, and of what norms (and what else is between cut layers) save."""
    handed = 0
    stored: dict[tuple[int, int], int] = {}
    inside: list[bool] = []

    def hand_on(module: nn.Module, given: Any, out: Any) -> None:
        nonlocal handed
        x = out if isinstance(out, Tensor) else out[0]
        handed += x.numel() * x.element_size()

    for block in list(model.get_submodule(blocks).children())[:-1]:
        block.register_forward_hook(hand_on)
    for name, module in model.named_modules():
        if any(name.endswith(end) for end in norms):
            module.register_forward_pre_hook(lambda *a: inside.append(True), prepend=True)
            module.register_forward_hook(lambda *a: inside.clear())
    parameters = {p.untyped_storage().data_ptr() for p in map(comparing.local, model.parameters())}

    def pack(t: Tensor) -> Tensor:
        if inside and t.untyped_storage().data_ptr() not in parameters:
            stored[t.data_ptr(), t._version] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*args, **kwargs)
    del out
    return {"handed on": handed, "saved by norms": sum(stored.values())}


def odd(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Something done to tokens, at the sample's length and at others: errors by length, and what was cut."""
    from tests.models.sequence import ODD, Odd

    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    torch.manual_seed(0)
    model = Odd(ODD[payload["name"]]).double()
    sharded = copy.deepcopy(model)
    sample = ((torch.randn(2, payload["lengths"][0], 16, dtype=torch.float64),), {})
    with planned_once(mesh) as made:
        autotp_shard(sharded, mesh, sample, **SP)
    scattered = sum(c.kind == "reduce_scatter" and c.when == "forward" for c in made[0].plan.collectives)
    errors = {}
    for n in payload["lengths"]:
        x = torch.randn(3, n, 16, dtype=torch.float64)
        for m in (model, sharded):
            m.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = [run(m, ((x,), {}), Settings()) for m in (model, sharded)]
        group = mesh.get_group()
        forward, problems = comparing.errors(runs[0].outputs, runs[1].outputs, group)
        gradients, more = comparing.errors(_gradients(model), _gradients(sharded), group)
        inputs, _ = comparing.errors(runs[0].input_gradients(), runs[1].input_gradients(), group)
        assert not problems + more, problems + more
        errors[n] = max(*forward.values(), *gradients.values(), *inputs.values())
    return {"errors": errors, "scattered": scattered}
