"""Attention in the variants that tensor parallelism gets wrong elsewhere. D=32, 4 heads of 8, unless stated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import floats


def causal(length: int) -> Tensor:
    """True above the diagonal."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class RMSNorm(nn.Module):
    """Root mean square norm with a weight that is not constant."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normed over the last dim."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Separate q, k, v, o without bias; the number of heads is left to -1. K01 without its norms."""

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int | None = None, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.q = nn.Linear(width, heads * head, bias=False)
        self.k = nn.Linear(width, (kv_heads or heads) * head, bias=False)
        self.v = nn.Linear(width, (kv_heads or heads) * head, bias=False)
        self.o = nn.Linear(heads * head, width, bias=False)

    def by_head(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (batch, heads, length, head)."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head).transpose(1, 2) for w in (self.q, self.k, self.v))
        return q, k, v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Before mask and softmax."""
        return q @ k.transpose(-1, -2) / math.sqrt(self.head)

    def weights(self, scores: Tensor) -> Tensor:
        """Causal softmax."""
        return scores.masked_fill(causal(scores.shape[-1]).to(scores.device), float("-inf")).softmax(-1)

    def out(self, heads: Tensor) -> Tensor:
        """Heads put together, and the last matrix."""
        return self.o(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention."""
        q, k, v = self.by_head(x)
        return self.out(self.weights(self.scores(q, k)) @ v)


class NormedHeads(Attention):
    """K01: norms over each head of q and k, one weight for all heads."""

    def __init__(self, width: int = 32, heads: int = 4, head: int = 8) -> None:
        super().__init__(width, heads, head=head)
        self.q_norm, self.k_norm = RMSNorm(head), RMSNorm(head)

    def forward(self, x: Tensor) -> Tensor:
        """Norms after the view by head."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head) for w in (self.q, self.k, self.v))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class PerHeadScale(Attention):
    """K03b: a temperature and a sink logit for each head."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__(heads=heads)
        self.t = nn.Parameter(1 + 0.3 * torch.randn(heads))
        self.s = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        """The sink takes part in the softmax and is left out of the sum."""
        q, k, v = self.by_head(x)
        scores = self.scores(q, k) * self.t[:, None, None]
        scores = scores.masked_fill(causal(scores.shape[-1]), float("-inf"))
        sink = self.s[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return self.out(weights @ v)


class LatentAttention(nn.Module):
    """K05: keys and values from a latent; one rotary key part shared by all heads."""

    def __init__(self, *, norm: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(32, heads * 12, bias=False)
        self.kv_a = nn.Linear(32, 20, bias=False)
        self.norm = RMSNorm(16) if norm else nn.Identity()
        self.kv_b = nn.Linear(16, heads * 16, bias=False)
        self.o = nn.Linear(heads * 8, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention with heads of 8 + 4."""
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, 12).transpose(1, 2)
        latent, rotary = self.kv_a(x).split([16, 4], dim=-1)
        kv = self.kv_b(self.norm(latent)).view(batch, length, self.heads, 16).transpose(1, 2)
        k, v = kv.split([8, 8], dim=-1)
        shared = rotary.view(batch, 1, length, 4).expand(-1, self.heads, -1, -1)
        k = torch.cat([k, torch.sin(shared)], -1)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(12)).masked_fill(causal(length), float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1))


class FusedQKV(nn.Module):
    """K07: one matrix for three equal parts, with bias."""

    def __init__(self, width: int = 32, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.qkv = nn.Linear(width, 3 * width)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """chunk, then view by head."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, -1, self.head).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Alibi(Attention):
    """K11: a distance bias with another slope for each head, kept as a buffer, computed, or in a list."""

    def __init__(self, kind: str, heads: int = 4) -> None:
        super().__init__(heads=heads)
        self.kind = kind
        slopes = [2.0 ** -(2 * (i + 1)) for i in range(heads)]
        if kind == "buffer":
            self.register_buffer("slopes", torch.tensor(slopes).view(heads, 1, 1))
        self.slope_list = slopes

    def bias(self, q: Tensor, distance: Tensor) -> Tensor:
        """(heads, length, length)"""
        if self.kind == "buffer":
            return self.slopes * distance
        if self.kind == "computed":
            heads = torch.arange(1, q.shape[1] + 1, device=q.device)
            return torch.exp2(-2.0 * heads)[:, None, None] * distance
        return torch.tensor(self.slope_list, dtype=q.dtype, device=q.device)[:, None, None] * distance

    def forward(self, x: Tensor) -> Tensor:
        """Scores and bias."""
        q, k, v = self.by_head(x)
        position = torch.arange(x.shape[1], device=x.device)
        distance = (position[None, :] - position[:, None]).to(x.dtype)
        return self.out(self.weights(self.scores(q, k) + self.bias(q, distance)) @ v)


class GroupedAttention(Attention):
    """K18: D=64, 8 heads; how often a kv head is repeated is read from the activations."""

    def __init__(self, kv_heads: int, width: int = 64, heads: int = 8) -> None:
        super().__init__(width, heads, kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        """Repeat, then attend."""
        q, k, v = self.by_head(x)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        return self.out(self.weights(self.scores(q, k)) @ v)


class FixedHeads(Attention):
    """K20: the number of heads is fixed in the code, the length is left to -1."""

    def forward(self, x: Tensor) -> Tensor:
        """view(B, -1, 4, 8) runs with half of the features too, and gives something else."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, -1, 4, self.head).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


@dataclass
class Hidden:
    """What a block of K27 returns."""

    hidden: Tensor
    weights: Tensor | None = None


class KeywordAttention(Attention):
    """K27: called by keyword."""

    def forward(self, *, hidden: Tensor, mask: Tensor | None = None) -> Hidden:  # type: ignore[override]
        """Attention, as a dataclass."""
        q, k, v = self.by_head(hidden)
        scores = self.scores(q, k)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return Hidden(hidden=self.out(weights @ v))


def sequence(width: int = 32, batch: int = 2, length: int = 6) -> Tensor:
    """The input of all of them."""
    return floats(batch, length, width, seed=3)
