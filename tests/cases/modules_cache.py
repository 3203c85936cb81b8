"""K44: a decoder whose cache has room for all tokens from the start, wherever that room is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.modules_attention import RMSNorm
from tests.cases.modules_mlp import PackedGate

D, HEADS, KV, HD, VOCABULARY, ROOM, BATCH = 64, 8, 2, 8, 53, 32, 2
Pair = tuple[Tensor, Tensor]


class Store(nn.Module):
    """Keys and values of one layer in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(BATCH, KV, ROOM, HD), persistent=False)
        self.register_buffer("v", torch.zeros(BATCH, KV, ROOM, HD), persistent=False)

    def forward(self, k: Tensor, v: Tensor, at: Tensor) -> Pair:
        """All keys and values, after these were put at their places."""
        self.k[:, :, at] = k
        self.v[:, :, at] = v
        return self.k, self.v


class CachedAttention(nn.Module):
    """Grouped attention over everything in the cache up to now."""

    def __init__(self, inside: bool, apart: bool) -> None:
        super().__init__()
        self.apart = apart  # a single token goes another way
        self.q, self.o = nn.Linear(D, HEADS * HD, bias=False), nn.Linear(HEADS * HD, D, bias=False)
        self.k, self.v = nn.Linear(D, KV * HD, bias=False), nn.Linear(D, KV * HD, bias=False)
        self.store = Store() if inside else None

    def forward(self, x: Tensor, start: int, cache: Pair | None) -> Tensor:
        """x: (batch, tokens, D); the first token is number `start`."""
        batch, length, _ = x.shape
        at = torch.arange(start, start + length)
        q = self.q(x).view(batch, length, HEADS, HD).transpose(1, 2)
        k = self.k(x).view(batch, length, KV, HD).transpose(1, 2)
        v = self.v(x).view(batch, length, KV, HD).transpose(1, 2)
        if self.store is not None:
            keys, values = self.store(k, v, at)
        else:
            assert cache is not None
            keys, values = cache
            keys[:, :, start : start + length] = k
            values[:, :, start : start + length] = v
        seen = torch.arange(ROOM)[None] <= at[:, None]
        if self.apart and length == 1:
            return self.o(self.one(q, keys[:, :, : start + 1], values[:, :, : start + 1]))
        keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (keys, values))
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))

    def one(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one token: each group of heads with its keys."""
        grouped = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        scores = torch.einsum("bghd,bgtd->bght", grouped, keys) / HD**0.5
        y = torch.einsum("bght,bgtd->bghd", scores.softmax(-1), values)
        return y.flatten(1).unsqueeze(1)


class CachedBlock(nn.Module):
    """Attention and MLP."""

    def __init__(self, inside: bool, apart: bool) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(D), RMSNorm(D)
        self.attention, self.mlp = CachedAttention(inside, apart), PackedGate(2 * D, D)

    def forward(self, x: Tensor, start: int, cache: Pair | None) -> Tensor:
        """With residuals."""
        x = x + self.attention(self.first(x), start, cache)
        return x + self.mlp(self.second(x))


class CachedDecoder(nn.Module):
    """Two layers; the cache is given (`inside=False`), or in buffers of its own."""

    def __init__(self, inside: bool, apart: bool = False) -> None:
        super().__init__()
        self.inside, self.n_kv, self.head_dim, self.room = inside, KV, HD, ROOM
        self.emb, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(CachedBlock(inside, apart) for _ in range(2))

    def forward(self, ids: Tensor, start: int = 0, caches: list[Pair] | None = None) -> Tensor:
        """Logits of the tokens given."""
        x = self.emb(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, start, caches[i] if caches is not None else None)
        return self.head(x)

    def new_cache(self, batch: int) -> list[Pair] | None:
        """Room for all tokens, as many heads as there are keys."""
        if self.inside:
            return None
        shape = (batch, self.n_kv, self.room, self.head_dim)
        dtype = self.emb.weight.dtype
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in self.blocks]

    @torch.no_grad()
    def generate(self, ids: Tensor, steps: int, temperature: float = 0.0) -> Tensor:
        """A decode loop as a method: greedy, or sampled."""
        return decode(self, ids, steps, temperature)[0]


def decode(model: Any, ids: Tensor, steps: int, temperature: float = 0.0) -> tuple[Tensor, Tensor]:
    """A prefill and one token at a time: the tokens and the logits they were chosen by."""
    caches = model.new_cache(ids.shape[0])
    logits = model(ids, 0, caches)[:, -1]
    every = [logits]
    for step in range(steps):
        if temperature:
            new = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            new = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], 1)
        if step + 1 < steps:
            logits = model(new, ids.shape[1] - 1, caches)[:, -1]
            every.append(logits)
    return ids, torch.stack(every)
