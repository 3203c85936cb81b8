"""The models of `autotp demo` and of the documentation: ordinary torch code that knows nothing of tensor parallelism.

`autotp plan autotp.demo_models:LanguageModel --tp 2` needs nothing but autotp itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TinyAttention(nn.Module):
    """Attention small enough to follow by hand: width 4, two heads, q, k and v in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)
        self.out = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Every position looks at every other."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(batch, length, 2, 2).transpose(1, 2)
        k = k.view(batch, length, 2, 2).transpose(1, 2)
        v = v.view(batch, length, 2, 2).transpose(1, 2)
        y = (q @ k.transpose(2, 3)).softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, 4))


class GroupedAttention(nn.Module):
    """Causal attention; two query heads share a key and value head, and one matrix makes all of them."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * shared) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        batch, length, width = x.shape
        parts = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
        q, k, v = self.qkv(x).split(parts, dim=-1)
        q = q.view(batch, length, self.heads, self.size).transpose(1, 2)
        k = k.view(batch, length, self.shared, self.size).transpose(1, 2)
        v = v.view(batch, length, self.shared, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then an MLP whose gate and input are one matrix."""

    def __init__(self, width: int = 64, heads: int = 8, shared: int = 4) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = GroupedAttention(width, heads, shared)
        self.gate_up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One block with its two residuals."""
        x = x + self.attention(self.norm_1(x))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class LanguageModel(nn.Module):
    """A decoder whose head is its token embedding."""

    def __init__(self, vocabulary: int = 512, width: int = 64, heads: int = 8, shared: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads, shared) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token at every position."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Separable(nn.Module):
    """A depthwise convolution and a pointwise one, each with batch norm."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, out, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        """Per channel, then across channels."""
        x = F.relu(self.norm_1(self.depthwise(x)))
        return F.relu(self.norm_2(self.pointwise(x)))


class ConvNet(nn.Module):
    """Convolution, batch norm, pooling, depthwise separable convolutions, a classifier."""

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Separable(width, 2 * width, 1), Separable(2 * width, 4 * width, 2))
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.pool(F.relu(self.norm(self.stem(image))))
        return self.classifier(self.blocks(x).mean(dim=(2, 3)))
