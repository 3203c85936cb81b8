"""What ranks run to see which random numbers a sharded model draws."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from tests.harness.tasks import grid_of, mesh_of


class Noisy(nn.Module):
    """Draws between its layers, where nothing is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x)
        return self.b(torch.relu(self.a(x))) * torch.rand(x.shape[0], 1, dtype=x.dtype)


class NoisyInside(nn.Module):
    """Draws in a cut region what depends on a shape alone, in two orders of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.a(x).chunk(2, -1)
        h = mean + torch.randn_like(mean) * scale + torch.rand_like(mean, dtype=x.dtype)
        h = h.transpose(0, 1)
        h = h + torch.randn_like(h.cos()) + torch.randint_like(input=h, high=3)
        return self.b(h.transpose(0, 1))  # type: ignore[no-any-return]


def forwards(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Outputs of two forwards and a number drawn after them, sharded with a seed per rank, unsharded with rank 0's."""
    grid = payload["grid"]
    if grid is None and dist.get_rank() >= 2:
        return None
    torch.manual_seed(0)
    model = (NoisyInside if payload.get("inside") else Noisy)().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    reference = copy.deepcopy(model)
    model = autotp.shard(
        model, mesh_of(2) if grid is None else grid_of(tuple(grid), ("dp", "tp")), sample=x, fsdp=False
    )
    own = 7 + dist.get_rank() * payload["apart"]
    torch.manual_seed(own)
    found = [model(x).tolist() for _ in range(2)]
    after = torch.rand(3).tolist()
    torch.manual_seed(7)
    wanted = [reference(x).tolist() for _ in range(2)]
    cut = model.a.weight.to_local().shape[0]  # type: ignore[operator]
    return {"cut": cut, "found": found, "after": after, "wanted": wanted, "wanted_after": torch.rand(3).tolist()}
