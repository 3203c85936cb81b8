"""Pieces with parameters: fused projections, attention, convolutions, norms, raw and shared weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.property.pieces import HEADS, WIDTH, Step, one, two


def weight(*shape: int) -> nn.Parameter:
    """A random parameter of moderate size."""
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


class Fused(nn.Module):
    """Two halves of one projection, laid out in one of several ways, and a gate."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant = variant % 5
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.variant == 0:
            a, b = h.chunk(2, -1)
        elif self.variant == 1:
            a, b = h.split([WIDTH, WIDTH], dim=-1)
        elif self.variant == 2:
            a, b = h[..., :WIDTH], h[..., WIDTH:]
        elif self.variant == 3:
            a, b = h[..., 0::2], h[..., 1::2]
        else:
            a, b = h.unflatten(-1, (HEADS, 2, -1)).unbind(-2)
            a, b = a.flatten(-2), b.flatten(-2)
        return self.down(F.silu(a) * b)


class Attention(nn.Module):
    """Self-attention: fused or apart, with 4, 2 or 1 key heads, by torch's kernel or by hand, with extras."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.kv = (4, 2, 1)[variant % 3]
        self.layout, self.extra = variant // 3 % 3, variant // 9 % 5
        self.dim = WIDTH // HEADS
        if self.layout == 1:
            self.kv = HEADS
        if self.layout:
            self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.kv) * self.dim)
        else:
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, self.kv * self.dim)
            self.v = nn.Linear(WIDTH, self.kv * self.dim, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HEADS).view(HEADS, 1, 1))
        self.table = weight(7, HEADS)
        self.q_norm, self.k_norm = nn.LayerNorm(self.dim), nn.RMSNorm(self.dim)
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, HEADS).view(HEADS, 1, 1))

    def project(self, x: Tensor) -> list[Tensor]:
        b, t, _ = x.shape
        if self.layout == 0:
            parts = [self.q(x), self.k(x), self.v(x)]
        elif self.layout == 1:
            h = self.qkv(x).view(b, t, HEADS, 3 * self.dim)
            return [p.transpose(1, 2) for p in h.chunk(3, -1)]
        else:
            n = self.kv * self.dim
            parts = list(self.qkv(x).split([WIDTH, n, n], dim=-1))
        return [p.view(b, t, -1, self.dim).transpose(1, 2) for p in parts]

    def bias(self, t: int) -> Tensor | None:
        at = torch.arange(t)
        if self.extra == 1:
            return self.slopes * (at[None] - at[:, None])
        if self.extra == 2:
            return self.table[(at[None] - at[:, None]).clamp(-3, 3) + 3].permute(2, 0, 1)
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.extra == 3:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.extra == 4:
            a, b = q.chunk(2, -1)
            angle = torch.arange(q.shape[2], dtype=q.dtype)[:, None] * 0.3
            q = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        k, v = (y.repeat_interleave(HEADS // self.kv, 1) for y in (k, v))
        bias = self.bias(x.shape[1])
        if self.layout == 0:
            out = F.scaled_dot_product_attention(q, k, v, None if bias is None else bias.to(q.dtype)[None])
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.dim) * self.scale
            out = (scores if bias is None else scores + bias).softmax(-1) @ v
        return self.o(out.transpose(1, 2).reshape(x.shape))


class Convolved(nn.Module):
    """Convolutions over time: pointwise, depthwise, grouped, transposed."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        groups = (1, WIDTH, 4, 2)[variant % 4]
        kind = nn.ConvTranspose1d if variant // 4 % 2 else nn.Conv1d
        self.conv = kind(WIDTH, WIDTH, 3, padding=1, groups=groups)
        self.out = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Raw(nn.Module):
    """Products with raw parameters, tied ones among them."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant = variant % 6
        self.a, self.b, self.c = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == 0:
            h = torch.einsum("btc,chd->bthd", x, self.a.view(WIDTH, HEADS, -1)).tanh()
            return torch.einsum("bthd,hdc->btc", h, self.b.view(HEADS, -1, WIDTH))
        if self.variant == 1:
            return F.linear(F.relu(F.linear(x, self.a, self.c)), self.a.t())
        if self.variant == 2:
            return F.linear(self.inner(x).tanh(), self.inner.weight.t(), self.c)
        if self.variant == 3:
            return (x @ (self.a * self.c)).relu() @ self.b.softmax(-1)
        if self.variant == 4:
            return (self.a @ x.transpose(1, 2)).tanh().transpose(1, 2) @ (self.b + self.a.t()) / 2
        return torch.addmm(self.c, x.flatten(0, 1) @ self.a, self.b, beta=0.5, alpha=2.0).view(x.shape)


class Normed(nn.Module):
    """A norm over features, channels or groups of them."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.last = variant % 5 < 2
        kinds = [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GroupNorm(4, WIDTH)]
        self.norm = (*kinds, nn.InstanceNorm1d(WIDTH, affine=True))[variant % 5]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.last else self.norm(x.transpose(1, 2)).transpose(1, 2)


class Scaled(nn.Module):
    """A parameter times an activation: per feature, one number, per head, per time step."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.rand([(WIDTH,), (), (HEADS, 1), (1, 1)][variant % 4]) + 0.5)
        self.heads = variant % 4 == 2

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (HEADS, -1)) * self.g).flatten(-2) if self.heads else x * self.g


class Experts(nn.Module):
    """Three experts in one parameter, weighted by a router."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.inside = variant % 2
        self.router, self.up, self.down = nn.Linear(WIDTH, 3), weight(3, WIDTH, WIDTH), weight(3, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        h = torch.einsum("btc,ech->bteh", x, self.up).relu()
        if self.inside:
            return torch.einsum("bteh,ehc->btc", h * gate[..., None], self.down)
        return (torch.einsum("bteh,ehc->btec", h, self.down) * gate[..., None]).sum(2)


class Excited(nn.Module):
    """Squeeze and excite, over time."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b(self.a(x.mean(1, keepdim=True)).relu()).sigmoid()


class Joined(nn.Module):
    """Two values side by side into one linear layer."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.out, self.stacked = nn.Linear(2 * WIDTH, WIDTH), variant % 2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.stack([x, y], -1).flatten(-2) if self.stacked else torch.cat([x, y], -1))


for kind in (Fused, Attention, Convolved, Raw, Normed, Scaled, Experts, Excited):
    one(kind)
two(Joined)
__all__ = ["Step"]
