"""What ranks run to test `verify` inside a process group, and with a `shard` that is wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotp.verification import Report, verify
from tests.harness import standins
from tests.harness.tasks import mesh_of


class OnlyFloat32(nn.Module):
    """A model that will not run in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """An MLP."""
        if x.dtype is not torch.float32:
            raise TypeError("this kernel takes float32 only")
        return self.down(torch.relu(self.up(x)))


def with_standin(name: str) -> Report | None:
    """`verify` where sharding is done by a stand-in."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, x = standins.build()
    way = getattr(standins, name)

    def shard(model: nn.Module, mesh: Any, *, sample: Any, **options: Any) -> nn.Module:
        return way(model, mesh, sample)

    with mock.patch("autotp.sharding.shard", shard):
        return verify(model, mesh=mesh, sample=(x,))


def in_group(payload: dict[str, Any]) -> Any:
    """`verify` in the group that is there; with `apart`, each rank has other inputs or other weights."""
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    model, x = standins.build()
    apart = payload.get("apart")
    with torch.no_grad():
        model.up.weight += dist.get_rank() * (apart == "weights")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    report = verify(model, mesh=mesh, sample=(x + dist.get_rank() * (apart == "inputs"),))
    same = all(type(p) is nn.Parameter and torch.equal(p, before[n]) for n, p in model.named_parameters())
    return report, same
