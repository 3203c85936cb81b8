"""Small modules with a twist, each of a kind that once went wrong, and their comparison with the unsharded module."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

Forward = Callable[[Any, Tensor], Any]


class Pair(nn.Module):
    """Two linear layers and a raw weight; the forward is what the case is about."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.w = nn.Parameter(torch.randn(16, 16))
        self.n = nn.LayerNorm(4)
        self.spare = nn.Linear(16, 16)
        self.register_buffer("ema", torch.zeros(16))
        self.how, self.group = forward, 2

    def forward(self, x: Tensor, flag: bool = False, spare: bool = False) -> Any:
        x = self.spare(x) if spare else x
        return self.b(self.a(x).softmax(-1)) if flag else self.how(self, x)


class GroupedHeads(nn.Module):
    """A Llama with two key heads: over four ranks its values are cut by head and within heads: in tiles."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaModel(
            LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=8, **heads)
        )
        del self.model.embed_tokens

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(inputs_embeds=x[None]).last_hidden_state
        return out


class Layer(nn.Module):
    """A block that may act by its number or by a function it was given."""

    def __init__(self, i: int, act: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.i, self.act = nn.Linear(16, 16), nn.Linear(16, 16), i, act

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.act is not None:
            return self.b(self.act(h))
        return self.b(h.softmax(-1) if self.i % 3 == 2 else h.relu())


class Stack(nn.Module):
    """Seven blocks with residuals."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Positions(nn.Module):
    """Projects its input, which other layers read too, and a table of its own by the same layers (as SEW-D does)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.table = nn.LayerNorm(16), nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        table = self.norm(self.table)
        q, k, v = (f(x).view(4, 4, 4).transpose(0, 1) for f in (self.q, self.k, self.v))
        pq, pk = (f(table).view(4, 4, 4).transpose(0, 1) for f in (self.q, self.k))
        scores = q @ k.transpose(1, 2) + q @ pk.transpose(1, 2) + k @ pq.transpose(1, 2)
        return self.o((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


class Mixing(torch.autograd.Function):
    """Elementwise forward; the backward mixes features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sum(-1, keepdim=True).expand_as(grad)


@functools.lru_cache
def _masked(x: Tensor) -> Tensor:
    allowed = torch.ones(4, 16, dtype=torch.bool).tril(3)
    rows = torch.vmap(torch.vmap(lambda i, j: allowed[i, j] | (i == j), (None, 0)), (0, None))
    return rows(torch.arange(4), torch.arange(16))[: len(x)].to(x.dtype)


def _ramp(n: int) -> Tensor:
    return torch.linspace(0, 1, n, dtype=torch.float64)


def _write_part(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).clone()
    u = (h[:, :8] + h[:, 8:]).repeat(1, 2)
    h[:, :8] = 1.0
    return m.b(h + u)


def _depthwise(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(1, *x.shape).transpose(1, 2)
    return m.b(F.conv1d(h, m.w[:, None, :3], padding=1, groups=h.shape[1]).transpose(1, 2)[0])


def _table(m: Any, x: Tensor) -> Tensor:
    rows = m.w.matrix_exp()  # has no rule: stays whole
    table = torch.empty(len(x), 16, dtype=x.dtype)
    table[0] = rows[0]
    table[1:] = rows[1 : len(x)]
    return m.b((m.a(x) + table).relu())


def _rebind(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    with torch.no_grad():
        m.ema = 0.9 * m.ema + 0.1 * h.mean(0)
    return m.b(h - m.ema.detach())


def _shared_norm(m: Any, x: Tensor) -> Tensor:
    q, k = m.n(m.a(x).view(4, 4, 4)), m.n(x[:, :4] @ m.w[:4, :4]).unsqueeze(1)
    return m.b((q * k).flatten(1))


def _local_roll(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.b(h) + x.roll(h.shape[-1] // 4, -1)


def _local_index(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    n = h.shape[-1] // 4
    return m.b(h) + x[:, n : n + 1]


class Reader(nn.Module):
    """A block that reads its input from a container, which others read too, and puts what it makes there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.name = nn.Linear(16, 16), nn.Linear(16, 16), name

    def forward(self, states: Any) -> None:
        out = self.b(F.relu(self.a(states["h"] if isinstance(states, dict) else states.h)))
        if isinstance(states, dict):
            states[self.name] = out
        else:
            states.out.append(out)


@dataclass
class States:
    """A container that is no dict."""

    h: Tensor
    out: list[Tensor] = field(default_factory=list)


class Container(nn.Module):
    """Blocks that share a container made by ``make(h)``, which the model goes on to read."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.make = nn.Linear(16, 16), nn.Linear(16, 16), make
        self.readers = nn.ModuleList([Reader("p"), Reader("q")])

    def forward(self, x: Tensor) -> Any:
        states = self.make(self.b(F.relu(self.a(x))))
        for reader in self.readers:
            reader(states)
        if isinstance(states, dict):
            return states["h"].sin(), states["p"] * states["q"]
        return states.h.sin(), states.out[0] * states.out[1]


class Keeper(nn.Module):
    """A block that keeps what it returns, with a layer of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(16, 16)), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.last = F.linear(x, self.w)
        return self.last


class Kept(nn.Module):
    """Reads what a block has kept beside what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper, self.b = Keeper(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.keeper(x).softmax(-1)) + self.keeper.last.cumsum(-1)


def _local_scale(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.b(h) / h.shape[-1] + F.linear(x, m.w)


_FORWARDS: dict[str, Forward] = {
    "module run on whole and cut": lambda m, x: m.b(m.a(x) - m.a(x).logsumexp(-1, keepdim=True)),
    "norm on cut and whole heads": _shared_norm,
    "write into a part": _write_part,
    "whole table written row by row": _table,
    "weight times activation": lambda m, x: m.b((m.w @ x.view(2, 2, 16).transpose(1, 2)).transpose(1, 2).flatten(0, 1)),
    "groups counted by a shape": _depthwise,
    "slice over the parts": lambda m, x: m.b((m.a(x).relu()[:, 6:14].repeat(1, 2)) * 2),
    "index under vmap": lambda m, x: m.b(m.a(x).relu() * _masked(x)),
    "first feature left out": lambda m, x: m.b(F.pad(m.a(x).relu()[:, 1:], (0, 1))),
    "function that remembers": lambda m, x: m.b((m.a(x) * _ramp(16)).relu()),
    "buffer rebound": _rebind,
    "tril of features": lambda m, x: m.b(m.a(x).tril()),
    "triu per head": lambda m, x: m.b(m.a(x).view(4, 4, 4).triu().flatten(1)),
    "renorm": lambda m, x: m.b(torch.renorm(F.relu(m.a(x)), 2, 0, 0.5)) + F.linear(x, m.w),
    "weight returned": lambda m, x: (m.b(F.relu(m.a(x))), m.a.weight * 1.0),
    "raw weight returned": lambda m, x: (m.b(F.relu(m.a(x))), m.w.pow(2)),
    "size returned": lambda m, x: (m.b(F.relu(m.a(x))), m.a(x).shape[-1]),
    "roll by a local size": _local_roll,
    "index by a local size": _local_index,
    "scale by a local size": _local_scale,
    "custom gradient": lambda m, x: m.b(Mixing.apply(m.a(x))),
    "another module's shape": lambda m, x: m.b(F.relu(x @ m.a.weight.t())) + m.a.weight.shape[0],
    "checkpointed blocks": lambda m, x: checkpoint(
        m.b, F.relu(checkpoint(m.a, x, use_reentrant=False)), use_reentrant=False
    ),
}


def _pair(name: str) -> nn.Module:
    return Pair(_FORWARDS[name])


EXACT: dict[str, Callable[[], nn.Module]] = {
    "parts that are tiles": GroupedHeads,
    "numbers read by Python": lambda: Pair(_numbers),
    **{name: (lambda name=name: _pair(name)) for name in _FORWARDS},
    "blocks by number": lambda: Stack([Layer(i) for i in range(7)]),
    "blocks by function": lambda: Stack(
        [Layer(i, (lambda h: h.softmax(-1)) if i == 2 else (lambda h: h.relu())) for i in range(7)]
    ),
    "layers run on an input and on a table": lambda: Stack([Positions(), Positions()]),
    "tensor in a shared dict": lambda: Container(lambda h: {"h": h}),
    "tensor in a shared ordered dict": lambda: Container(lambda h: OrderedDict(h=h)),
    "tensor in a shared dataclass": lambda: Container(States),
    "result kept and returned": Kept,
    "given by name": lambda: Pair(lambda m, x: m.b(F.relu(m.a(x)))),
    "module that planning did not reach": lambda: Pair(lambda m, x: m.b(F.relu(m.a(x)))),
}


def _plain(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x)))


def _numbers(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    rows, columns = h.sum(-1).tolist(), h.detach().sum(0).numpy()
    return m.b(h) * (
        h.sum().item() + float(h.mean()) + int(h.sum()) + rows[1] + columns.max() + float(f"{h.sum():.5f}")
    )


def _pooled(m: Any, x: Tensor) -> Tensor:
    return torch.cumsum(F.relu(m.a(x)).unflatten(-1, (-1, m.group)).mean(-1), -1)


def _replace(m: Any) -> None:
    m.a.weight = nn.Parameter(torch.zeros(16, 16))


def _regrouped(m: Any, x: Tensor) -> Any:
    m.group = 4
    return m(x)


# name -> (what is done with the sharded module and an input, words of the refusal)
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "unplanned branch": (lambda m, x: m(x, flag=True), "was not reached when the plan was made"),
    "unplanned module": (lambda m, x: m(x, spare=True), "spare was not reached when the plan was made"),
    "part called by itself": (lambda m, x: m.a(x), "outside of the model's forward"),
    "weight replaced": (lambda m, x: (_replace(m), m(x)), "was replaced by an ordinary tensor"),
    "part of another size": (lambda m, x: _regrouped(m, x), "this rank is to have 2 elements in dim 1, got [4, 1]"),
}


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]


def _local(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _run(model: nn.Module, x: Tensor, name: str) -> tuple[list[Tensor], Tensor]:
    x = x.clone().requires_grad_()
    outs = _tensors(model(x=x) if name == "given by name" else model(x))
    if name == "module that planning did not reach":
        outs.append(model.spare(x))
    sum((t * torch.cos(torch.arange(t.numel(), dtype=t.dtype)).view(t.shape)).sum() for t in outs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return outs, x.grad


def compare(payload: dict[str, Any]) -> dict[str, Any]:
    """Forward and gradients (twice, so that state shows) of a case, sharded against not; or the refusal."""
    import autotp
    from tests.harness.tasks import autotp_shard, mesh_of

    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return {}
    torch.manual_seed(0)
    name = payload["name"]
    model = EXACT[name]() if name in EXACT else Pair(_pooled if name == "part of another size" else _plain)
    model = model.double().train()
    x = torch.randn(4, 16, dtype=torch.float64)
    expected = copy.deepcopy(model)
    autotp_shard(model, mesh, ((x,), {}))
    if name in REFUSED:
        try:
            REFUSED[name][0](model, x)
        except autotp.AutotpError as e:
            return {"refused": str(e)}
        return {}
    forward = gradient = 0.0
    for _ in range(2):
        (got, got_x), (want, want_x) = (_run(m, x, name) for m in (model, expected))
        forward = max(
            [forward, *(float((_local(p) - q).abs().max() / q.abs().max()) for p, q in zip(got, want, strict=True))]
        )
        grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), expected.parameters(), strict=True)]
        pairs = [(got_x, want_x), *((_local(p), q) for p, q in grads if p is not None and q is not None)]
        assert sum(p is None for p, _ in grads) == sum(q is None for _, q in grads)
        largest = max(float(q.abs().max()) for _, q in pairs)
        gradient = max([gradient, *(float((p - q).abs().max()) / largest for p, q in pairs)])
    buffers = zip(model.buffers(), expected.buffers(), strict=True)
    forward = max([forward, *(float((_local(p) - q).abs().max()) for p, q in buffers)])
    cut = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters())
    return {"forward": forward, "gradient": gradient, "cut": cut}
