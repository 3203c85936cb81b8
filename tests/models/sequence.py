"""Small models for sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Branch(nn.Module):
    """An MLP after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class TwoStreams(nn.Module):
    """Two inputs that are added after a branch each: equally long, or the second of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Branch(), Branch(), Branch()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.a(x) + self.b(y)
        return x + self.c(x)


class DroppingBlocks(nn.Module):
    """Dropout on the residual branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.drops = nn.ModuleList(nn.Dropout(0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for branch, drop in zip(self.branches, self.drops, strict=True):
            x = x + drop(branch(x))
        return x


Forward = Callable[[Any, Tensor], Tensor]


class Odd(nn.Module):
    """Two branches, and something done to the tokens between them; ``x`` is (batch, tokens, 16)."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = Branch(), Branch(), Branch()
        self.norm, self.gate = nn.LayerNorm(16), nn.Linear(16, 1)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.scale = nn.Parameter(torch.rand(16) + 0.5)
        self.mix = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = self.between(self, x)
        return x + self.c(x)


def _positions(m: Any, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    return x + m.b(x) + torch.sin(at)[:, None]


def _causal_mean(m: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return x + scores.softmax(-1) @ x


def _in_place(m: Any, x: Tensor) -> Tensor:
    h = m.b(x)
    h += x
    h.mul_(m.scale)
    return h


def _flat(m: Any, x: Tensor) -> Tensor:
    batch, n, width = x.shape
    h = x.reshape(batch * n, width)
    h = h + m.b(h) * torch.sigmoid(m.gate(h))
    return h.view(batch, n, width)


def _checks(m: Any, x: Tensor) -> Tensor:
    h = m.b(x)
    if h.shape[1] != x.shape[1] or x.shape[1] % 100 == 77:
        raise ValueError("lengths differ")
    return x + h / x.shape[1]


def _windows(m: Any, x: Tensor) -> Tensor:
    h = x.view(x.shape[0], x.shape[1] // 2, 2, 16)
    return x + (h - h.mean(2, keepdim=True)).reshape(x.shape)


def _write(m: Any, x: Tensor) -> Tensor:
    h = x + m.b(x)
    h = h.clone()
    h[:, 0] = 0
    return h


ODD: dict[str, Forward] = {
    "nothing": lambda m, x: x + m.b(x),
    "norm after": lambda m, x: m.norm(x + m.b(x)),
    "parallel": lambda m, x: x + m.b(x) + m.c(m.norm(x)),
    "scaled": lambda m, x: x + m.b(x) * m.scale,
    "gated": lambda m, x: x + m.b(x) * torch.sigmoid(m.gate(m.norm(x))),
    "first token": lambda m, x: x + m.b(x)[:, :1],
    "last token": lambda m, x: x + m.b(x)[:, -1:],
    "every other token": lambda m, x: x + (x + m.b(x))[:, ::2].mean(1, keepdim=True),
    "shifted": lambda m, x: x + torch.cat([m.first.expand(x.shape[0], 1, 16), x[:, :-1]], 1),
    "flipped": lambda m, x: x + m.norm(x).flip(1),
    "rolled": lambda m, x: x + m.norm(x).roll(1, 1),
    "class token": lambda m, x: m.b(torch.cat([m.first.expand(x.shape[0], 1, 16), x], 1))[:, 1:],
    "mean": lambda m, x: x + m.norm(x).mean(1, keepdim=True),
    "softmax over tokens": lambda m, x: x + m.norm(x).softmax(1),
    "cumulative": lambda m, x: x + m.norm(x).cumsum(1) / 8,
    "convolution": lambda m, x: x + m.mix(m.norm(x).transpose(1, 2)).transpose(1, 2),
    "repeated": lambda m, x: (x + m.b(x)).repeat(1, 2, 1).view(x.shape[0], 2, x.shape[1], 16).sum(1),
    "sorted": lambda m, x: x + m.norm(x).sort(1).values,
    "norm over tokens": lambda m, x: x + F.layer_norm(x, x.shape[1:]),
    "scaled by the length": lambda m, x: x + m.b(x) / x.shape[1],
    "outer": lambda m, x: x + torch.einsum("btd,bsd->bts", m.norm(x), x).mean(2, keepdim=True),
    "positions": _positions,
    "causal": _causal_mean,
    "in place": _in_place,
    "flat": _flat,
    "checked": _checks,
    "windows": _windows,
    "written": _write,
    "mask by value": lambda m, x: torch.where(x > 0, x + m.b(x), x),
    "time first": lambda m, x: (x.transpose(0, 1) + m.b(x.transpose(0, 1))).transpose(0, 1),
    "random mask by length": lambda m, x: x + m.b(x) * torch.arange(x.shape[1]).remainder(3)[None, :, None],
}
