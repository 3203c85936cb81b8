"""Experts on different ranks: six of them on two and four ranks, and tokens few enough that some have none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.operations import Case, weight

E, H, INNER = 6, 16, 24


def _routed(m: Any, x: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    """Weights and experts of every token."""
    chances, experts = torch.topk(m.router(x).softmax(-1), k)
    return chances / chances.sum(-1, keepdim=True), experts


def _sorted(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert: which token each is of, its expert, its weight, and where each expert's end."""
    chances, experts = _routed(m, x)
    order = experts.flatten().argsort(stable=True)
    ids = experts.flatten()[order]
    ends = torch.bincount(ids, minlength=E).cumsum(0).to(torch.int32)
    return order // 2, ids, chances.flatten()[order], ends


def grouped(m: Any, x: Tensor) -> Tensor:
    """Separate gate and up, biases, a shift that does not keep zeros, rows added where their token is."""
    x = x.flatten(0, 1)
    token, ids, chance, ends = _sorted(m, x)
    rows = x[token]
    gate = F.grouped_mm(rows, m.gate, offs=ends) + m.bias[ids]
    up = F.grouped_mm(rows, m.up, offs=ends).clamp(-2, 2)
    y = F.grouped_mm((up + 1) * F.silu(gate), m.down, offs=ends) * chance[:, None]
    return m.after(x + torch.zeros_like(x).index_add_(0, token, y))


def softmaxed(m: Any, x: Tensor) -> Tensor:
    """What runs over features is of one row; a sum is made before a function that does not keep zeros."""
    x = x.flatten(0, 1)
    token, _, chance, ends = _sorted(m, x)
    gate, up = F.grouped_mm(x[token], m.up, offs=ends).chunk(2, -1)
    y = F.grouped_mm(gate.softmax(-1) * up, m.down, offs=ends) * chance[:, None]
    return m.after(y.exp())


def in_a_batch(m: Any, x: Tensor) -> Tensor:
    """All experts see all tokens."""
    chances = m.router(x).softmax(-1)
    h = torch.einsum("bth,ehi->beti", x, m.up)
    y = torch.einsum("beti,eih->beth", F.gelu(h), m.down)
    return m.after((y * chances.mT[..., None]).sum(1))


def looped(m: Any, x: Tensor) -> Tensor:
    """Experts by their numbers in the code, with biases; the result of one is added to that of the others."""
    chances = m.router(x).softmax(-1)
    out: Any = 0
    for e in range(E):
        out = out + m.two[e] * (F.linear(F.relu(F.linear(x, m.up[e], m.bias[e])), m.down[e]) * chances[..., e, None])
    return x + out


def hit(m: Any, x: Tensor) -> Tensor:
    """Experts that have tokens; the tensor that they add to is returned, and read as it is."""
    x = x.flatten(0, 1)
    chances, experts = _routed(m, x)
    out = torch.zeros_like(x)
    for e in experts.unique():
        token, place = torch.where(experts == e)
        gate, up = (x[token] @ m.up[e]).chunk(2, -1)
        out.index_add_(0, token, F.silu(gate) * up @ m.down[e] * chances[token, place, None])
    return m.after(x + out) + out


def gathered(m: Any, x: Tensor) -> Tensor:
    """A matrix for every token, picked by its expert."""
    x = x.flatten(0, 1)
    chances, experts = _routed(m, x, 1)
    h = torch.bmm(x[:, None], m.up[experts[:, 0]]).squeeze(1)
    y = torch.bmm(m.down[experts[:, 0]].mT, F.silu(h)[:, :, None]).squeeze(-1)
    return m.after(y * chances)


def _case(how: Any, sums: int, long: bool = False, **parts: Any) -> Case:
    parts = {"router": lambda: nn.Linear(H, E), "after": lambda: nn.Linear(H, H), "up": weight(E, H, INNER),
             "down": weight(E, INNER, H), **parts}  # fmt: skip
    rules = {n: "expertwise" for n in ("up", "gate", "down", "bias", "two") if n in parts}
    return Case(forward=how, parts=parts, x=(1, 3, H), cut=tuple(rules), styles=rules, rules=rules, sums=sums,
                gathers=2, tp=(4,), long=long)  # fmt: skip


EXPERTS: dict[str, Case] = {
    "experts grouped": _case(grouped, 1, gate=weight(E, H, INNER), bias=weight(E, INNER)),
    "experts softmaxed": _case(softmaxed, 1, True, up=weight(E, H, 2 * INNER)),
    "experts in a batch": _case(in_a_batch, 1),
    "experts looped": _case(
        looped, 1, True, up=weight(E, INNER, H), down=weight(E, H, INNER), bias=weight(E, INNER), two=weight(E, H)
    ),
    "experts hit": _case(hit, 2, up=weight(E, H, 2 * INNER)),
    "experts gathered": _case(gathered, 1, True),
}
