"""Gradients of gradients are exact (second_tasks.py); gradients taken inside of a forward are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.ranks import RankPool
from tests.exact.second_tasks import MODELS


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_gradients(ranks: RankPool, name: str, sp: bool) -> None:
    found = ranks.run("tests.exact.second_tasks:penalty", {"name": name, "tp": 2, "sp": sp})[0]
    assert found["first"] <= 1e-12 and found["second"] <= 1e-12 and found["cut"] > 0.9, found


class Acts(nn.Module):
    """Does something to gradients between two layers."""

    def __init__(self, how: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(16, 32), nn.Linear(32, 16), how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.how(h, x)
        out: Tensor = self.down(h)
        return out


def _guarded(h: Tensor, x: Tensor) -> None:
    if h.requires_grad:
        h.register_hook(lambda g: g / g.norm())


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (lambda h, x: h.register_hook(lambda g: g / g.norm()), "register_hook"),
        (_guarded, "register_hook"),
        (lambda h, x: torch.autograd.grad(h.sum(), x, create_graph=True), "grad"),
        (lambda h, x: h.sum().backward(), "backward"),
        (lambda h, x: torch.autograd.functional.jacobian(torch.tanh, x), "grad"),
    ],
)
def test_what_acts_on_gradients_inside_of_a_forward_is_refused(how: Any, name: str) -> None:
    with pytest.raises(autotp.AutotpError, match=rf" {name} at test_second_gradients.py:\d+ acts on gradients"):
        autotp.plan(Acts(how), tp=2, sample=torch.randn(3, 16))


def test_what_only_asks_is_planned() -> None:
    def asks(h: Tensor, x: Tensor) -> None:
        h.retain_grad()
        assert h.requires_grad and not torch.ones(3).requires_grad

    assert any(r.is_cut for r in autotp.plan(Acts(asks), tp=2, sample=torch.randn(3, 16)).parameters)


def test_outside_of_training_hooks_may_be_left_out() -> None:
    """As they are where gradients are off."""
    assert any(r.is_cut for r in autotp.plan(Acts(_guarded).eval(), tp=2, sample=torch.randn(3, 16)).parameters)
