"""Gradients of gradients, sharded against not: what a gradient penalty or forces from an energy need."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.comparing import gathered


class Attention(nn.Module):
    """Two heads, written out: torch has no second gradients of its fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (4, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP; with ``inner``, a norm over the features that are cut."""

    def __init__(self, inner: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(16), nn.LayerNorm(16), Attention()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner = inner(32) if inner is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        out: Tensor = x + self.down(self.inner(torch.tanh(self.up(self.second(x)))))
        return out


class Images(nn.Module):
    """Convolutions and batch norms, over pixels that the tokens are taken for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.transpose(1, 2).unflatten(-1, (2, 4))
        return x + self.b(torch.tanh(self.norm(self.a(pixels)))).flatten(2).transpose(1, 2)


class Looked(nn.Module):
    """A vocabulary in and out, mixed by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(40, 16), Block(), nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(8).expand(x.shape[0], 8)
        logits = self.head(self.mix(x + self.table(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(x.shape[0], 8, 1)


MODELS: dict[str, Any] = {
    "attention and MLP": Block,
    "two blocks": lambda: nn.Sequential(Block(), Block()),
    "layer norm of cut features": lambda: Block(nn.LayerNorm),
    "RMS norm of cut features": lambda: Block(nn.RMSNorm),
    "convolutions and batch norm": Images,
    "tied vocabulary and its loss": Looked,
}


def penalty(payload: dict[str, Any]) -> dict[str, float] | None:
    """Largest relative error of the first gradients, and of gradients of a function of them; and the share cut."""
    from autotp.comparing import cut_share
    from tests.harness.tasks import autotp_shard, mesh_of

    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return None
    torch.manual_seed(0)
    model = MODELS[payload["name"]]().double()
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    sharded = autotp_shard(copy.deepcopy(model), mesh, ((x,), {}), sequence_parallel=payload["sp"])
    found = []
    for m in (model, sharded):
        x = x.detach().clone().requires_grad_()
        energy = (m(x) * torch.linspace(-1, 1, 8, dtype=x.dtype)[:, None]).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        force.square().sum().backward()
        grads = {n: gathered(p.grad) for n, p in m.named_parameters() if p.grad is not None}
        found.append((force.detach(), {**grads, "x": x.grad}))
    (force, grads), (got_force, got) = found
    assert grads.keys() == got.keys()
    scale = max(float(g.abs().max()) for g in grads.values())
    second = max(float((g - got[n]).abs().max()) for n, g in grads.items()) / scale
    return {"first": float((force - got_force).abs().max() / force.abs().max()), "second": second,
            "cut": cut_share(sharded)}  # fmt: skip
