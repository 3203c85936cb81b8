"""Operations of our own that autotp is taught: cut as they are declared, exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autotp
from tests.models.operations import Case, linear, weight


def defined(name: str, forward: Any, plain: Any) -> Any:
    """A custom operation whose gradient is that of ``plain``."""
    op = torch.library.custom_op(f"autotp_tests::{name}", forward, mutates_args=())
    op.register_fake(
        lambda *a: torch.empty_like(plain(*[x.new_zeros(x.shape) if isinstance(x, Tensor) else x for x in a]))
    )

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            args = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in ctx.args]
            tensors = [x for x in args if isinstance(x, Tensor)]
            found = iter(torch.autograd.grad(plain(*args), tensors, grad))
        return tuple(next(found) if isinstance(x, Tensor) else None for x in args)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "args", inputs))
    return op


def _decayed(x: Tensor, decay: Tensor) -> Tensor:
    out, state = [], torch.zeros_like(x[:, 0])
    for step in x.unbind(1):
        state = state * torch.sigmoid(decay) + step
        out.append(state)
    return torch.stack(out, 1)


def decay(x: Tensor, decay: Tensor) -> Tensor:
    return _decayed(x, decay)


def _attended(q: Tensor, k: Tensor, heads: int) -> Tensor:
    if q.shape[1] != heads:
        raise ValueError(f"{q.shape[1]} heads, expected {heads}")
    return (q @ k.mT).softmax(-1) @ k


def attend(q: Tensor, k: Tensor, heads: int) -> Tensor:
    return _attended(q, k, heads)


def _projected(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, w)


def project(x: Tensor, w: Tensor) -> Tensor:
    return _projected(x, w)


DECAY = defined("decay", decay, _decayed)
ATTEND = defined("attend", attend, _attended)
PROJECT = defined("project", project, _projected)


def teach() -> None:
    """The declarations."""
    autotp.register_rule(DECAY, "b t d, d -> b t d; cut b d")
    autotp.register_rule("autotp_tests::attend", "b h t d, b h s d -> b h t d; cut b h", counts={"heads": "h"})
    autotp.register_rule(torch.ops.autotp_tests.project, "... i, o i -> ... o; cut ... o; sum i")


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (8, -1)).transpose(1, 2)


def _attention(m: Any, x: Tensor) -> Tensor:
    return m.b(ATTEND(_heads(m.a(x)), _heads(m.k(x)), 8).transpose(1, 2).flatten(2))


teach()
TWO = {"a": linear(16, 32), "b": linear(32, 16)}
PAIR = {"a.weight": "colwise", "b.weight": "rowwise"}

TAUGHT = {
    "decay": Case(
        forward=lambda m, x: m.b(DECAY(m.a(x), m.w)), parts={**TWO, "w": weight(32)},
        cut=("a.weight", "b.weight", "w"), styles=PAIR, tp=(2, 4),
    ),
    "attention that counts its heads": Case(
        forward=_attention, parts={**TWO, "k": linear(16, 32)}, styles={**PAIR, "k.weight": "colwise"}, tp=(2, 4)
    ),
    "projections": Case(
        forward=lambda m, x: PROJECT(torch.relu(PROJECT(x, m.u)), m.v), cut=("u", "v"),
        parts={"u": weight(32, 16), "v": weight(16, 32)}, styles={"u": "colwise", "v": "rowwise"},
    ),
}  # fmt: skip
