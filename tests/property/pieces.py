"""Pieces of random modules: each takes one or two values of shape (batch, time, WIDTH) and gives one of that shape.

A piece is built from a variant number; all of its constants and values follow from that number and torch's seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 16, 4
Step = Callable[..., Tensor]
ONE: dict[str, Callable[[int], Step | nn.Module]] = {}
TWO: dict[str, Callable[[int], Step | nn.Module]] = {}


def one(make: Callable[[int], Step | nn.Module]) -> Callable[[int], Step | nn.Module]:
    """Register a piece with one operand."""
    ONE[make.__name__] = make
    return make


def two(make: Callable[[int], Step | nn.Module]) -> Callable[[int], Step | nn.Module]:
    """Register a piece with two operands."""
    TWO[make.__name__] = make
    return make


@one
def linear(variant: int) -> Step | nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=variant % 2 == 0)


@one
def activation(variant: int) -> Step | nn.Module:
    return [torch.tanh, F.gelu, F.silu, torch.sigmoid, lambda x: x.clone().mul_(2).tanh_()][variant % 5]


@one
def movement(variant: int) -> Step | nn.Module:
    steps: list[Step] = [
        lambda x: x.flip(-1),
        lambda x: x.roll(WIDTH // 2, -1),
        lambda x: x.roll(1, -1),
        lambda x: x.unflatten(-1, (HEADS, -1)).transpose(-1, -2).flatten(-2),
        lambda x: x.view(*x.shape[:2], HEADS, WIDTH // HEADS).flip(2).reshape(x.shape),
        lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
        lambda x: x[..., : WIDTH // 2].repeat(1, 1, 2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x[..., torch.arange(WIDTH - 1, -1, -1)],
        lambda x: F.pad(x[..., 1:-1], (1, 1)),
        lambda x: x.unfold(1, 1, 1).squeeze(-1),
    ]
    return steps[variant % len(steps)]


@one
def reduction(variant: int) -> Step | nn.Module:
    def topk(x: Tensor) -> Tensor:
        values, index = x.topk(3, -1)
        return torch.zeros_like(x).scatter(-1, index, values)

    steps: list[Step] = [
        lambda x: x.softmax(-1),
        lambda x: x.view(*x.shape[:2], HEADS, -1).softmax(-1).flatten(2),
        lambda x: x.softmax(1),
        lambda x: x.cumsum(-1),
        lambda x: x.cumsum(1),
        lambda x: x - x.amax(-1, keepdim=True),
        lambda x: x - x.sum(-1, keepdim=True) / x.shape[-1],
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=0.1),
        lambda x: x * x.mean(-1, keepdim=True),
        lambda x: x * x.mean((0, 1)),
        lambda x: x - x.logsumexp(-1, keepdim=True),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1),
        topk,
    ]
    return steps[variant % len(steps)]


@one
def write(variant: int) -> Step | nn.Module:
    def into_whole(x: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype)
        out[:] = x
        return out

    def first_step(x: Tensor) -> Tensor:
        out = x.clone()
        out[:, 0] = out[:, 0] * 2
        return out

    def through_view(x: Tensor) -> Tensor:
        out = x.clone()
        out.view(*x.shape[:2], HEADS, -1).mul_(0.5)
        return out.add_(x)

    def head_column(x: Tensor) -> Tensor:
        out = x.clone()
        out.view(*x.shape[:2], HEADS, -1)[..., 0].mul_(3.0)
        return out

    def masked(x: Tensor) -> Tensor:
        return x.clone().masked_fill_(torch.arange(x.shape[1])[:, None] > 1, 0.25)

    return [into_whole, first_step, through_view, head_column, masked][variant % 5]


@two
def meet(variant: int) -> Step | nn.Module:
    steps: list[Step] = [
        lambda x, y: x + y,
        lambda x, y: x * y.sigmoid(),
        lambda x, y: torch.where(x.detach() > 0, x, y),
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.cat([x[..., ::2], y[..., 1::2]], -1),
        lambda x, y: torch.stack([x, y], -1).mean(-1),
        lambda x, y: (x.transpose(1, 2) @ y).softmax(-1).mean(1, keepdim=True) * x,
        lambda x, y: (x @ y.transpose(1, 2)).softmax(-1) @ y,
        lambda x, y: torch.einsum("btc,bsc->bts", x, y).tanh() @ x,
        lambda x, y: x.clone().add_(y),
        lambda x, y: torch.addcmul(x, x, y, value=0.5),
    ]
    return steps[variant % len(steps)]
