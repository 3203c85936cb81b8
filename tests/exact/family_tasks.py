"""What ranks run to check a plan file of plans/ with numbers: its choices on a tiny model of the same class."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autotp
from autotp.measuring import Settings, measure
from autotp.plan_types import Plan, Row
from autotp.sharding import shard
from tests.harness.tasks import mesh_of, summary
from tests.models import families

FOLDER = Path(__file__).parents[2] / "plans"


def general(name: str) -> str:
    """A name with `*` for every layer number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def chosen(file: Plan, tiny: Plan) -> Plan:
    """The tiny model's plan with the file's choices in place of its own, layer by layer."""
    exact = {row.name: row for row in file.parameters}
    alike = {general(row.name): row for row in file.parameters}
    return replace(tiny, parameters=tuple(_as(exact.get(r.name) or alike[general(r.name)], r) for r in tiny.parameters))


def _as(choice: Row, row: Row) -> Row:
    return replace(row, style=choice.style, dim=choice.dim)


def measure_family(name: str) -> dict[str, Any] | None:
    """Build the tiny model, shard it over two ranks by the file's choices, compare."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    torch.manual_seed(0)
    model, args, kwargs = families.build(name)
    own = autotp.plan(model, tp=2, sample=(args, kwargs))
    wanted = chosen(Plan.load(FOLDER / f"{name}.toml"), own)

    def apply(model: Any, mesh: Any, inputs: Any) -> Any:
        return shard(model, mesh, sample=inputs, plan=wanted)

    figures = measure(model, (args, kwargs), mesh, apply, Settings())
    other = {a.name: (a.dim, b.dim) for a, b in zip(wanted.parameters, own.parameters, strict=True) if a.dim != b.dim}
    return {**summary(figures), "other": other}
