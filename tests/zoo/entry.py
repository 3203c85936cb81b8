"""One entry of the zoo: planned once per tensor-parallel size, then measured on forked ranks."""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp import sharding, structures
from autotp.errors import AutotpError, VerifyError
from autotp.measuring import Inputs, Run, Settings, measure, quieten, run
from autotp.mesh import as_mesh_axes
from autotp.planning import Prepared, prepare
from autotp.promotion import widen, widen_model
from autotp.ranks import RankError, RankPool
from tests.harness.tasks import mesh_of, summary

WHOLE_ROWS = 12  # reasons kept per record
LARGE = 150_000_000  # parameters; copies of more than that are too much for many machines


def build(zoo: str, name: str) -> tuple[nn.Module, Inputs]:
    """The model and its inputs, from a folder with a `zoo.py` that has `build(name)`."""
    if zoo not in sys.path:
        sys.path.insert(0, zoo)
    torch.manual_seed(0)
    model, args, kwargs = importlib.import_module("zoo").build(name)
    return model, (args, kwargs)


def records(zoo: str, name: str, sizes: tuple[int, ...], seconds: float, *, step: bool = True) -> list[dict[str, Any]]:
    """One record per size: status exact, wrong, refused, broken (does not run unsharded), crashed or hung."""
    try:
        model, inputs = build(zoo, name)
    except Exception as error:
        return [{"name": name, "tp": tp, "status": "broken", "text": str(error)} for tp in sizes]
    found = []
    for tp in sizes:
        start = time.perf_counter()
        record: dict[str, Any] = {"name": name, "tp": tp, "step": step}
        try:
            record.update(_measured(model, inputs, tp, seconds, Settings(step=step)))
        except VerifyError as error:
            record.update(status="broken", text=str(error))
        except RankError as error:
            record.update(status="hung" if error.hung else "crashed", text=str(error)[-3000:])
        except AutotpError as error:
            record.update(status="refused", text=f"{type(error).__name__}: {error}")
        record["seconds"] = round(time.perf_counter() - start, 2)
        found.append(record)
    return found


def _measured(model: nn.Module, inputs: Inputs, tp: int, seconds: float, settings: Settings) -> dict[str, Any]:
    start = time.perf_counter()
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return _measured_large(model, inputs, tp, seconds)
    prepared = _planned(widen_model(copy.deepcopy(model), Settings().dtype), inputs, tp)
    planned = time.perf_counter()
    payload = (copy.deepcopy(model), inputs, tp, prepared, settings)
    with RankPool(tp, timeout=seconds) as pool:
        numbers = pool.run_forked(_on_rank, payload)[0]
    numbers.update(status="exact" if numbers.pop("ok") else "wrong", plan_seconds=round(planned - start, 2))
    return {**numbers, **_of_plan(prepared)}


def _measured_large(model: nn.Module, inputs: Inputs, tp: int, seconds: float) -> dict[str, Any]:
    """With the model in memory once, and the unsharded gradients in a file that all ranks map."""
    widen_model(model, Settings().dtype)
    quieten(model)
    start = time.perf_counter()
    prepared = _planned(model, inputs, tp)
    planned = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "unsharded.pt"
        with RankPool(1, timeout=seconds) as pool:
            pool.run_forked(_write_unsharded, (model, inputs, path))
        with RankPool(tp, timeout=seconds) as pool:
            numbers = pool.run_forked(_on_large_rank, (model, inputs, tp, prepared, path))[0]
    numbers.update(status="exact" if numbers.pop("ok") else "wrong", plan_seconds=round(planned - start, 2))
    return {**numbers, **_of_plan(prepared)}


def _write_unsharded(payload: tuple[nn.Module, Inputs, Path]) -> None:
    model, inputs, path = payload
    found = run(model, inputs, Settings())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    leaves = {name: (leaf.detach(), leaf.grad) for name, leaf in found.leaves.items()}
    torch.save(
        {"outputs": {n: t.detach() for n, t in found.outputs.items()}, "gradients": gradients, "leaves": leaves}, path
    )
    torch.save(found.kind, path.with_suffix(".kind"))


def _on_large_rank(payload: tuple[nn.Module, Inputs, int, Prepared, Path]) -> dict[str, Any]:
    model, inputs, tp, prepared, path = payload
    tensors = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    reference = copy.deepcopy(model, {**tensors, **{id(b): b for b in model.buffers()}})
    saved = torch.load(path, mmap=True)
    for name, parameter in reference.named_parameters():
        parameter.grad = saved["gradients"].get(name)
    leaves = {}
    for name, (leaf, gradient) in saved["leaves"].items():
        leaves[name] = leaf.requires_grad_()
        leaf.grad = gradient
    kind = torch.load(path.with_suffix(".kind"), weights_only=False)
    unsharded = Run(outputs=saved["outputs"], kind=kind, leaves=leaves)

    def apply(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> nn.Module:
        return sharding.apply(model, mesh, prepared)

    return summary(measure(model, inputs, mesh_of(tp), apply, Settings(), known=(reference, unsharded)))


def _planned(wide: nn.Module, inputs: Inputs, tp: int) -> Prepared:
    """As every rank would plan it: on the model in float64, in the mode that it is measured in."""
    settings = Settings()
    with settings.mode():
        sample = structures.map_tensors(inputs, lambda t: widen(t.detach(), settings.dtype))
        return prepare(wide, as_mesh_axes(tp), sample=sample)


def _on_rank(payload: tuple[nn.Module, Inputs, int, Prepared, Settings]) -> dict[str, Any]:
    model, inputs, tp, prepared, settings = payload

    def apply(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> nn.Module:
        dtype = next(model.parameters()).dtype
        if dtype != settings.dtype:  # it does not run in float64
            return sharding.shard(model, mesh, sample=inputs)
        return sharding.apply(model, mesh, prepared)

    return summary(measure(model, inputs, mesh_of(tp), apply, settings))


def _of_plan(prepared: Prepared) -> dict[str, Any]:
    plan, analysis = prepared.plan, prepared.analysis
    whole = [r for r in plan.parameters if len(r.shape) >= 2 and not r.is_cut and r.tied_to is None]
    whole.sort(key=lambda r: -torch.Size(r.shape).numel())
    edits = analysis.edits.values() if analysis is not None else ()
    return {
        "fixups": sum(any(e.numbers.values()) for e in edits),
        "collectives": dict(Counter(c.kind for c in plan.collectives)),
        "collective_bytes": sum(c.bytes for c in plan.collectives),
        "parameters": len(plan.parameters),
        "whole": [{"name": r.name, "shape": list(r.shape), "reason": r.reason} for r in whole[:WHOLE_ROWS]],
        "whole_count": len(whole),
    }
