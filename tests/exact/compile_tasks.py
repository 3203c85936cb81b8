"""Sharded models under torch.compile against unsharded ones without it, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import autotp
from autotp import structures
from autotp.comparing import gathered, local
from autotp.data_parallel import blocks
from autotp.errors import AutotpError
from autotp.styles import traced
from tests.exact import compile_models
from tests.harness.tasks import grid_of, mesh_of
from tests.models import registry


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the registry or of compile_models, in float64."""
    torch.manual_seed(0)
    model, args, kwargs = registry.build(name) if ":" in name else compile_models.MODELS[name]()
    return model.double(), *structures.map_tensors((args, kwargs), _float64)


def _float64(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def step(model: Any, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gathered gradients of a forward and backward."""
    for p in model.parameters():
        p.grad = None
    out = model(*args, **kwargs)
    structures.weighted_sum(out).backward()
    found = {n.replace("_orig_mod.", ""): gathered(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {n: t.detach() for n, t in structures.named_tensors(out)}, found


def error(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest value of all."""
    scale = max(float(t.abs().max()) for t in expected.values()) or 1.0
    if set(expected) - {n for n, t in expected.items() if not t.any()} - set(found):
        return float("inf")
    return max(structures.difference(expected[n], found[n]) for n in expected if n in found) / scale


class _Called:
    """A compiled function around a model, with the model's parameters."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        self.parameters, self.named_parameters, self.call = model.parameters, model.named_parameters, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def compiled(model: nn.Module, how: str, counter: CompileCounterWithBackend, fullgraph: bool) -> Any:
    """The model compiled as a whole, block by block, or children like its second one."""
    torch._dynamo.reset()
    if how == "blocks":
        for block in blocks(model):
            block.compile(backend=counter, fullgraph=fullgraph)
        return model
    if how == "alike":
        second = list(model.children())[1]
        for child in (c for c in model.children() if type(c) is type(second)):
            child.compile(backend=counter, fullgraph=fullgraph)
        return model
    if how == "module":
        model.compile(backend=counter, fullgraph=fullgraph)
        return model
    if how == "function":
        return _Called(model, torch.compile(lambda *a, **k: model(*a, **k), backend=counter, fullgraph=fullgraph))
    return torch.compile(model, backend=counter, fullgraph=fullgraph)


@contextmanager
def hiding(name: str) -> Iterator[None]:
    """A compiler that does not show calls of one function."""
    find = traced.Places.find

    def blind(self: traced.Places, places: Any, func: Any) -> str:
        return traced.PASS if getattr(func, "__name__", "") == name else find(self, places, func)

    traced.Places.find = blind  # type: ignore[method-assign]
    try:
        yield
    finally:
        traced.Places.find = find  # type: ignore[method-assign]


def compare(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A step compiled and sharded against one that is neither; errors relative to the largest value.

    With ``dp`` there is FSDP2 beside it, and all data-parallel ranks have the same batch.
    """
    mesh = grid_of((2, 2), ("dp", "tp")) if payload.get("dp") else mesh_of(2)
    if mesh.get_coordinate() is None:
        return None
    model, args, kwargs = build(payload["name"])
    model.train(payload.get("train", model.training))
    expected = step(copy.deepcopy(model), args, kwargs)
    counter = CompileCounterWithBackend(payload.get("backend", "aot_eager"))
    hidden = payload.get("hide", "")
    try:
        autotp.shard(model, mesh, sample=(args, kwargs), sequence_parallel=payload.get("sp", False))
        with hiding(hidden):
            step(compiled(model, payload.get("how", "whole"), counter, True), args, kwargs) if hidden else None
        run = compiled(model, payload.get("how", "whole"), counter, payload.get("fullgraph", True))
        found = step(run, args, kwargs)
    except AutotpError as e:
        return {"refused": str(e)}
    graphs = counter.frame_count
    again = step(run, args, kwargs)
    held = sum(local(p).numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    return {
        "forward": max(error(expected[0], x[0]) for x in (found, again)),
        "gradient": max(error(expected[1], x[1]) for x in (found, again)),
        "graphs": graphs,
        "recompiled": counter.frame_count - graphs,
        "held": held,
    }


def draws(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Two compiled steps from equal seeds (which differ from rank to rank), and one from another seed."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = build(payload["name"])
    autotp.shard(model.train(), mesh, sample=(args, kwargs))
    run = compiled(model, payload.get("how", "whole"), CompileCounterWithBackend(payload["backend"]), True)
    steps = []
    for seed in (0, 0, 1):
        torch.manual_seed(10 * seed + dist.get_rank())
        steps.append(step(run, args, kwargs))
    (first, gradients), again, other = steps
    mine = next(local(p.grad) for n, p in model.named_parameters() if n.endswith("down.weight"))
    kept: list[Any] = [None] * 2
    dist.all_gather_object(kept, (mine.any(0).tolist(), [t.tolist() for t in first.values()]), group=mesh.get_group())
    return {
        "again": max(error(first, again[0]), error(gradients, again[1])),
        "other": error(first, other[0]),
        "masks": [k[0] for k in kept],
        "outputs_agree": kept[0][1] == kept[1][1],
    }


def _of_length(x: Tensor, n: int) -> Tensor:
    """A tensor (batch, length, ...) over and over up to another length."""
    return x.repeat(1, -(-n // x.shape[1]), *[1] * (x.ndim - 2))[:, :n].contiguous()


def shapes(payload: dict[str, Any]) -> dict[str, Any] | None:
    """How often each rank has compiled the unsharded and the sharded model after inputs of each of the lengths."""
    mesh = mesh_of(payload.get("tp", 2))
    if mesh.get_coordinate() is None:
        return None
    model, args, kwargs = build(payload["name"])
    reference, counts, errors = copy.deepcopy(model), [], []
    autotp.shard(model, mesh, sample=(args, kwargs), sequence_parallel=payload.get("sp", False))
    for which in (reference, model):
        counter = CompileCounterWithBackend(payload.get("backend", "aot_eager"))
        run = compiled(which, payload.get("how", "whole"), counter, True)
        after = []
        for length in payload["lengths"]:
            given = structures.map_tensors((args, kwargs), partial(_of_length, n=length))
            found = step(run, *given)
            after.append(counter.frame_count)
            if which is model:
                with torch.compiler.set_stance("force_eager"):
                    expected = step(reference, *given)
                errors += [error(*x) for x in zip(expected, found, strict=True)]
        counts.append(after)
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, counts, group=mesh.get_group())
    return {"counts": every, "error": max(errors)}


def generates(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens of a model that is compiled, has run compiled, and then generates; and a step after that."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = build(payload["name"])
    ids, options = args[0] if args else kwargs["input_ids"], {"max_new_tokens": 4, "do_sample": False}
    reference = copy.deepcopy(model)
    expected = reference.generate(ids, **options)  # type: ignore[operator]
    autotp.shard(model, mesh, sample=(args, kwargs))
    counter = CompileCounterWithBackend("eager")
    run = compiled(model, "module", counter, True)
    before = step(run, args, kwargs)
    found = [model.generate(ids, **options).tolist() for _ in range(2)]  # type: ignore[operator]
    graphs = counter.frame_count
    after = step(run, args, kwargs)
    errors = [max(error(a, b) for a, b in zip(before, x, strict=True)) for x in (step(reference, args, kwargs), after)]
    return {
        "tokens": [t == expected.tolist() for t in found],
        "error": max(errors),
        "graphs": [graphs, counter.frame_count],
    }
