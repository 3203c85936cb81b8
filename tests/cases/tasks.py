"""What the ranks run for a case: EQ and SPLIT as tests/cases/checks.py asks for them."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.comparing import local
from autotp.errors import AutotpError, VerifyError
from autotp.measuring import Settings, measure
from tests.cases.recipes import RECIPES
from tests.harness.tasks import autotp_shard, mesh_of, summary
from tests.models.common import Built, Entry, finish


def built(recipe: str, *, train: bool = False) -> Built:
    """The model of a recipe, with the same values on every rank."""
    return finish(Entry(build=RECIPES[recipe], train=train))


def held(model: nn.Module, patterns: list[str]) -> float:
    """Share of the bytes of the matching parameters that this rank holds."""
    chosen = [p for name, p in model.named_parameters() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    total = sum(p.numel() * p.element_size() for p in chosen)
    return sum(local(p).numel() * p.element_size() for p in chosen) / total


def left_whole(model: nn.Module) -> list[str]:
    """Parameters of two or more dims that are not cut."""
    return [name for name, p in model.named_parameters() if p.dim() >= 2 and local(p).numel() == p.numel()]


def compare(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Figures of one recipe on the first `tp` ranks, or {"refused": text}; None on the other ranks."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    return compare_on(mesh, payload)


def compare_on(mesh: DeviceMesh, payload: dict[str, Any]) -> dict[str, Any]:
    """The same on a given mesh."""
    model, args, kwargs = built(payload["recipe"], train=payload.get("train", False))
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]
    settings = Settings(**payload.get("settings", {}))
    apply = functools.partial(autotp_shard, **payload.get("options", {}))
    try:
        figures = measure(model, (args, kwargs), mesh, apply, settings)
    except VerifyError:
        raise
    except AutotpError as error:
        return {"refused": str(error)}
    share = held(model, payload.get("held") or matrices)
    return {**summary(figures), "held": share, "whole": left_whole(model)}


def reasons(payload: dict[str, Any]) -> dict[str, str]:
    """Parameter -> reason of a plan."""
    from autotp.planning import plan

    model, args, kwargs = built(payload["recipe"])
    made = plan(model, tp=payload["tp"], sample=(args, kwargs), **payload.get("options", {}))
    return {row.name: row.reason for row in made.parameters}


def seeded(mesh: DeviceMesh, *, by_rank: bool, seed: int = 5) -> None:
    """As users do: alike on all ranks, or each rank its own."""
    torch.manual_seed(seed + (dist.get_rank() if by_rank else 0))
