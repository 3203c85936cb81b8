"""Planning does not depend on what the caller has turned on or off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp


class Tried(nn.Module):
    """Attention and an operation that has no rule, so that it is found out by running it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.special.spherical_bessel_j0(self.up(self.layer(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_plan_is_the_same(mode: Callable[[], Any]) -> None:
    model, x = Tried().eval(), torch.randn(2, 5, 32)
    expected = autotp.plan(model, tp=2, sample=x)
    with mode():
        found = autotp.plan(model, tp=2, sample=x.clone())
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    assert found == expected, found.diff(expected)
    assert expected.row("layer.linear1.weight").style == "colwise"


def test_models_made_in_inference_mode_are_planned() -> None:
    with torch.inference_mode():
        model = Tried().eval()
        found = autotp.plan(model, tp=2, sample=torch.randn(2, 5, 32))
    assert found.cut_share == 1.0
