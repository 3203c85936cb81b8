"""What the ranks run for one random module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import AutotpError
from autotp.measuring import Settings, measure
from tests.harness.tasks import autotp_shard, mesh_of, summary
from tests.property.programs import Line, build


class Refused(Exception):
    """``shard`` said no, before any forward."""


def check(payload: dict[str, Any]) -> dict[str, Any]:
    """Figures of a random module, or {"refused": text}."""
    torch.set_num_threads(1)
    lines: tuple[Line, ...] = payload["lines"]
    model, args, kwargs = build(lines)
    model.train(payload.get("train", True))
    try:
        figures = measure(model, (args, kwargs), mesh_of(payload["tp"]), shard_or_refuse, Settings())
    except Refused as refused:
        return {"refused": str(refused)}
    return summary(figures)


def shard_or_refuse(model: nn.Module, mesh: DeviceMesh, inputs: Any) -> nn.Module:
    """Only a refusal by ``shard`` itself is one: later, every error is a failure."""
    try:
        return autotp_shard(model, mesh, inputs)
    except AutotpError as error:
        raise Refused(str(error)) from error
