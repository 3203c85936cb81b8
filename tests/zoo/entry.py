"""One entry of the zoo: planned once per tensor-parallel size, then measured on forked ranks."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp import sharding, structures
from autotp.errors import AutotpError, VerifyError
from autotp.measuring import Inputs, Settings, measure
from autotp.mesh import as_mesh_axes
from autotp.planning import Prepared, prepare
from autotp.promotion import widen
from autotp.ranks import RankError, RankPool
from tests.harness.tasks import mesh_of, summary
from tests.zoo import unsharded

WHOLE_ROWS = 12  # reasons kept per record
LARGE = 150_000_000  # parameters; copies of more than that are too much for many machines


def build(zoo: str, name: str) -> tuple[nn.Module, Inputs]:
    """The model and its inputs, from a folder with a `zoo.py` that has `build(name)`."""
    if zoo not in sys.path:
        sys.path.insert(0, zoo)
    torch.manual_seed(0)
    model, args, kwargs = importlib.import_module("zoo").build(name)
    return model, (args, kwargs)


def records(zoo: str, name: str, sizes: tuple[int, ...], seconds: float, *, step: bool = False) -> list[dict[str, Any]]:
    """One record per size: status exact, wrong, refused, broken (does not run unsharded), crashed or hung."""
    try:
        model, inputs = build(zoo, name)
    except Exception as error:
        return [{"name": name, "tp": tp, "status": "broken", "text": str(error)} for tp in sizes]
    step = step and sum(p.numel() for p in model.parameters()) <= LARGE
    with tempfile.TemporaryDirectory() as folder:
        entry = Entry(model, inputs, step, Path(folder), seconds)
        return [
            settled({"name": name, "tp": tp, "step": step}, functools.partial(_measured, entry, tp)) for tp in sizes
        ]


@dataclass
class Entry:
    """A model that is measured at several sizes; without the optimizer step, it is run unsharded once for all."""

    model: nn.Module
    inputs: Inputs
    step: bool
    folder: Path
    seconds: float

    @functools.cached_property
    def wide(self) -> nn.Module:
        """The model in float64; a copy of it, if memory holds two."""
        large = sum(p.numel() for p in self.model.parameters()) > LARGE
        return unsharded.prepare(self.model if large else copy.deepcopy(self.model))

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether the unsharded run is in the folder."""
        return not self.step and not unsharded.write(self.wide, self.inputs, self.folder, self.seconds)


def settled(record: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The record with what was measured, or why it could not be, and the time that took."""
    start = time.perf_counter()
    try:
        record.update(measured())
    except VerifyError as error:
        record.update(status="broken", text=str(error))
    except RankError as error:
        record.update(status="hung" if error.hung else "crashed", text=str(error)[-3000:])
    except AutotpError as error:
        record.update(status="refused", text=f"{type(error).__name__}: {error}")
    record["seconds"] = round(time.perf_counter() - start, 2)
    return record


def _measured(entry: Entry, tp: int) -> dict[str, Any]:
    start = time.perf_counter()
    prepared = _planned(entry.wide, entry.inputs, tp)
    planned = time.perf_counter()
    on_rank = _beside_known if entry.is_known else _on_rank
    with RankPool(tp, timeout=entry.seconds) as pool:
        numbers = pool.run_forked(on_rank, (entry, tp, prepared))[0]
    numbers.update(status="exact" if numbers.pop("ok") else "wrong", plan_seconds=round(planned - start, 2))
    return {**numbers, **_of_plan(prepared)}


def _beside_known(payload: tuple[Entry, int, Prepared]) -> dict[str, Any]:
    entry, tp, prepared = payload
    known = unsharded.read(entry.wide, entry.folder)

    def apply(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> nn.Module:
        return sharding.apply(model, mesh, prepared)

    return summary(measure(entry.wide, entry.inputs, mesh_of(tp), apply, Settings(step=False), known=known))


def _planned(wide: nn.Module, inputs: Inputs, tp: int) -> Prepared:
    """As every rank would plan it: on the model in float64, in the mode that it is measured in."""
    settings = Settings()
    with settings.mode():
        sample = structures.map_tensors(inputs, lambda t: widen(t.detach(), settings.dtype))
        return prepare(wide, as_mesh_axes(tp), sample=sample)


def _on_rank(payload: tuple[Entry, int, Prepared]) -> dict[str, Any]:
    entry, tp, prepared = payload

    def apply(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> nn.Module:
        dtype = next(model.parameters()).dtype
        if dtype != Settings().dtype:  # it does not run in float64
            return sharding.shard(model, mesh, sample=inputs)
        return sharding.apply(model, mesh, prepared)

    return summary(measure(entry.model, entry.inputs, mesh_of(tp), apply, Settings(step=entry.step)))


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
