"""Models as people write them, with the habits that make tensor parallelism hard. None of them knows about it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import LANGUAGE, OTHER, Built, Entry, floats, tokens

# ---------------------------------------------------------------- fused split, hard-coded views, tied head


class FusedAttention(nn.Module):
    """One matrix for q, k, v; all sizes are read from the config."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention."""
        batch, length, width = x.size()
        q, k, v = self.qkv(x).split(self.width, dim=2)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class FusedBlock(nn.Module):
    """Attention and MLP before a residual each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = FusedAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class NanoGPT(nn.Module):
    """Decoder whose head is its token embedding; gives logits and, with targets, the loss."""

    def __init__(
        self, vocabulary: int = 128, width: int = 64, heads: int = 8, depth: int = 2, length: int = 32
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(FusedBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss if there are targets."""
        x = self.token(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


# ---------------------------------------------------------------- complex rotary positions, grouped-query attention


def rotations(width: int, length: int) -> Tensor:
    """Unit complex numbers, one per position and pair of features."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Pairs of features as complex numbers, turned."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * by[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


class RootMeanSquare(nn.Module):
    """RMS norm that computes in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normed."""
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class GroupedAttention(nn.Module):
    """Fewer heads for k and v; how many heads there are is left to -1."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width, self.repeats = width // heads, heads // kv_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Causal attention."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_width) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (
            t[:, :, :, None, :].expand(-1, -1, -1, self.repeats, -1).reshape(batch, length, -1, self.head_width)
            for t in (k, v)
        )
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))


class GatedMLP(nn.Module):
    """Three matrices."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = GroupedAttention(width, heads, kv_heads)
        self.feed_forward = GatedMLP(width, hidden)
        self.attention_norm, self.ffn_norm = RootMeanSquare(width), RootMeanSquare(width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """One block."""
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class TitanLlama(nn.Module):
    """Layers in a ModuleDict, the rotations in a buffer that is not saved."""

    def __init__(self, vocabulary: int = 128, width: int = 64, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.register_buffer("turns", rotations(width // heads, 32), persistent=False)
        self.layers = nn.ModuleDict({str(i): LlamaBlock(width, heads, kv_heads, 128) for i in range(2)})
        self.norm = RootMeanSquare(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return self.output(self.norm(x))


# ---------------------------------------------------------------- MLP-Mixer


class MixerBlock(nn.Module):
    """One MLP over the patches, one over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Mixer(nn.Module):
    """Patches, blocks, mean, head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, image: Tensor) -> Tensor:
        """Scores."""
        x = self.blocks(self.patches(image).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


# ---------------------------------------------------------------- einsum on parameters, no linear layer anywhere


class EinsumLayer(nn.Module):
    """Attention and MLP on raw parameters, weights by head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        head = width // heads
        for name in ("q", "k", "v"):
            self.register_parameter(name, nn.Parameter(torch.randn(width, heads, head) / math.sqrt(width)))
        self.o = nn.Parameter(torch.randn(heads, head, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.randn(width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(2 * width, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = (torch.einsum("btd,dhe->bhte", x, w) for w in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("bhte,bhse->bhts", q, k) / math.sqrt(q.shape[-1]), -1)
        x = x + torch.einsum("bhts,bhse,hed->btd", weights, v, self.o)
        return torch.tanh(x @ self.up + self.bias) @ self.down + x


class EinsumModel(nn.Module):
    """Layers on float inputs, and a matrix as a head."""

    def __init__(self, width: int = 64, heads: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EinsumLayer(width, heads) for _ in range(2))
        self.head = nn.Parameter(torch.randn(width, 16) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scores per token."""
        for layer in self.layers:
            x = layer(x)
        return torch.einsum("btd,dc->btc", x, self.head)


# ---------------------------------------------------------------- called by keyword, returns a dict


class KeywordBlock(nn.Module):
    """All calls by keyword; takes a pair, returns a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, *, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """An MLP of the sum."""
        hidden = torch.relu(self.a(input=pair[0] + pair[1]))
        return {"hidden": self.b(input=hidden) * scale, "kept": pair[0]}


class KeywordModel(nn.Module):
    """Two blocks and two heads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = KeywordBlock(width), KeywordBlock(width)
        self.mean, self.spread = nn.Linear(width, 8), nn.Linear(width, 8)

    def forward(self, *, features: Tensor, extra: Tensor, flags: dict[str, bool]) -> dict[str, Tensor]:
        """Two outputs by name."""
        x = self.first(pair=(features, extra))
        y = self.second(pair=(x["hidden"], x["kept"]), scale=0.5)["hidden"]
        out = {"mean": self.mean(y)}
        if flags["spread"]:
            out["spread"] = F.softplus(self.spread(input=y))
        return out


# ----------------------------------------------------------------


def nanogpt() -> Built:
    """With targets, so that the loss is an output too."""
    return NanoGPT(), (tokens(), tokens(seed=8)), {}


def titan_llama() -> Built:
    """Logits only."""
    return TitanLlama(), (tokens(),), {}


def mixer() -> Built:
    """Images."""
    return Mixer(), (floats(2, 3, 32, 32),), {}


def einsum() -> Built:
    """Features."""
    return EinsumModel(), (floats(2, 6, 64),), {}


def keywords() -> Built:
    """A dict and two tensors by keyword."""
    return KeywordModel(), (), {"features": floats(3, 32), "extra": floats(3, 32, seed=8), "flags": {"spread": True}}


class Recurrent(nn.Module):
    """Recurrent layers between an embedding and a head; a matrix that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.forth, self.back = nn.LSTM(32, 24, 2, batch_first=True), nn.GRU(24, 32, bidirectional=True)
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
        self.mix = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        h, _ = self.forth(self.embed(ids))
        h = self.back(h.transpose(0, 1))[0].transpose(0, 1)
        return self.head((self.up(h).unflatten(-1, (8, 8)) @ self.mix.sinh()).relu().flatten(-2))


def recurrent() -> Built:
    """Token ids."""
    return Recurrent(), (tokens(64),), {}


MODELS: dict[str, Entry] = {
    "nanogpt": Entry(build=nanogpt, share=LANGUAGE),
    "titan_llama": Entry(build=titan_llama, share=LANGUAGE),
    "mixer": Entry(build=mixer, share=OTHER),
    "einsum": Entry(build=einsum, share=LANGUAGE),
    "recurrent": Entry(build=recurrent, share=LANGUAGE),
    "keywords": Entry(build=keywords, share=OTHER),
}
