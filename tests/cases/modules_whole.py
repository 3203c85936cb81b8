"""Small whole models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases.modules_attention import (
    FusedQKV,
    GroupedAttention,
    Hidden,
    KeywordAttention,
    NormedHeads,
    RMSNorm,
)
from tests.cases.modules_mlp import MLP, PackedGate
from tests.models.common import floats, tokens


class TiedLM(nn.Module):
    """K12: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.mid = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.tanh(self.mid(self.emb(ids))))


class Dropping(nn.Module):
    """K15: dropout inside the cut region and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """MLP and head."""
        return self.head(self.outer(self.down(self.inner(F.relu(self.up(x))))))


class StartsDifferent(nn.Module):
    """K16: two cut layers, a norm, a head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.register_buffer("shift", torch.randn(8))
        with torch.no_grad():
            self.norm.weight.add_(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.norm(self.down(torch.tanh(self.up(x))) + self.shift))


class MultiHead(nn.Module):
    """K17: torch's attention, with averaged weights."""

    def __init__(self, *, bias: bool = True, kdim: int | None = None, vdim: int | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, bias=bias, kdim=kdim, vdim=vdim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor, need: bool = True) -> tuple[Tensor, Any]:
        """Attention output and weights."""
        return self.attention(q, k, v, key_padding_mask=padding, need_weights=need)


class EncoderLayer(nn.Module):
    """K17: torch's encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """One layer."""
        return self.layer(x, src_key_padding_mask=padding)


class UntiedLM(nn.Module):
    """K24: a vocabulary that no number of ranks divides."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.tanh(self.emb(ids)))


class ByKeyword(nn.Module):
    """K27: the MLP, the attention and the blocks are called by keyword, take tuples, return dicts and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = KeywordAttention()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, *, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """The sum of the pair through both."""
        attended: Hidden = self.attention(hidden=pair[0], mask=None)
        h = self.a(input=attended.hidden + pair[1])
        return {"out": self.b(input=torch.relu(h)), "attended": attended}


class Normed(nn.Module):
    """K29: an MLP and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP(nn.Linear(8, 16), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        """Normed sum."""
        return self.norm(x + self.mlp(x))


class Recomputed(nn.Module):
    """K42: attention and MLP, each in its own checkpoint if asked."""

    def __init__(self, *, recompute: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention = NormedHeads()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches."""
        for block in (self.attention, self.mlp):
            branch = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            x = x + self.drop(branch)
        return x


class ConvNet(nn.Module):
    """K45a: convolutions, batch norms, a skip, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Scores."""
        x = F.relu(self.bn1(self.conv1(image)))
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    """K45b, c: LSTM or GRU, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores per step."""
        return self.head(self.rnn(x)[0])


# ---------------------------------------------------------------- K48: image and text


class VisionLayer(nn.Module):
    """Fused attention with three heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attention = FusedQKV(24, 8)
        self.mlp = MLP(nn.Linear(24, 48), nn.Linear(48, 24))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Vision(nn.Module):
    """Patches and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.layers = nn.ModuleList(VisionLayer() for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        """(batch, patches, 24)"""
        x = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


class TextLayer(nn.Module):
    """Grouped attention and a packed gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(32), RMSNorm(32)
        self.attention = GroupedAttention(2, width=32, heads=4)
        self.mlp = PackedGate(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class TextModel(nn.Module):
    """Embedding and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(TextLayer() for _ in range(2))


class Text(nn.Module):
    """`model` inside, as wrappers nest them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TextModel()


class VisionLanguage(nn.Module):
    """Four of ten text positions are image tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.projector = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 32))
        self.text = Text()
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        """Logits."""
        x = self.text.model.embed(ids)
        seen = self.projector(self.vision(image))
        mask = (ids == 1)[..., None].expand_as(x)
        x = x.masked_scatter(mask, seen)
        for layer in self.text.model.layers:
            x = layer(x)
        return self.lm_head(x)


def vision_language() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """With its inputs: 8 x 8 images make 4 patches."""
    ids = tokens(64, length=10)
    ids[:, 2:6] = 1
    return VisionLanguage(), (ids, floats(2, 3, 8, 8)), {}
