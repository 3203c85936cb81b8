"""Rules of the user's: each is followed, or said to say nothing of what it matches, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp


class Mixed(nn.Module):
    """Layers, a norm, and matrices that are no layer's: a table that is indexed, positions that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.table = nn.Parameter(torch.randn(16, 8))
        self.places = nn.Parameter(torch.randn(1, 12, 8))
        self.unused = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids] + self.places
        return self.down(self.up(self.norm(x)).relu())


class Grouped(nn.Module):
    """Experts with a bias of [experts, features] each: no product reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16))
        self.down, self.down_bias = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.bmm(x.expand(4, -1, -1), self.up) + self.up_bias[:, None]
        return (torch.bmm(hidden.relu(), self.down) + self.down_bias[:, None]).sum(0)


def planned(rules: dict[str, str]) -> autotp.Plan:
    return autotp.plan(Mixed(), tp=2, sample=torch.zeros(2, 12, dtype=torch.int64), rules=rules)


def told(plan: autotp.Plan) -> str:
    return "\n".join(f.message for f in plan.findings if f.code == "TP-RULE" and "no weight of a layer" in f.message)


@pytest.mark.parametrize("style", ["colwise", "rowwise", "embedding_rowwise", "embedding_colwise", "packed_colwise"])
@pytest.mark.parametrize("glob", ["table", "places", "unused"])
def test_a_matrix_that_no_layer_multiplies_with_is_refused(glob: str, style: str) -> None:
    with pytest.raises(autotp.RuleError, match=rf"{glob}: .*{style}.*no weight of a layer"):
        planned({glob: style})


@pytest.mark.parametrize("style", ["replicate", "gathered_at_use"])
def test_it_may_be_whole_or_in_parts(style: str) -> None:
    found = {r.name: r.style for r in planned({"table": style}).parameters}
    assert found["table"] == style


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_vectors_without_a_layer_are_refused(style: str) -> None:
    with pytest.raises(autotp.RuleError, match=rf"norm\.(weight|bias): .*{style}.*no weight of a layer"):
        planned({"norm": style})


def test_vectors_beside_weights_are_named() -> None:
    plan = planned({"[nu]*": "colwise", "unused": "replicate"})
    assert told(plan).endswith("norm.bias, norm.weight")
    rows = {r.name: r for r in plan.parameters}
    assert rows["up.weight"].is_cut and rows["up.bias"].is_cut and not rows["norm.weight"].is_cut


def test_a_bias_goes_with_its_weight() -> None:
    assert not told(planned({"up.bias": "colwise"}))
    assert told(planned({"down*": "rowwise"})).endswith("down.bias")
    with pytest.raises(autotp.RuleError, match=r"down\.bias: .*colwise.*no weight of a layer"):
        planned({"down.bias": "colwise"})


@pytest.mark.parametrize(
    ("rules", "cut"),
    [
        ({"up*": "colwise"}, {"up": 2, "up_bias": 1, "down": 1, "down_bias": None}),
        ({"down*": "rowwise"}, {"up": 2, "up_bias": 1, "down": 1, "down_bias": None}),
        ({"down*": "colwise", "up*": "replicate"}, {"up": None, "up_bias": None, "down": 2, "down_bias": 1}),
    ],
)
def test_biases_of_experts_go_with_them(rules: dict[str, str], cut: dict[str, Any]) -> None:
    plan = autotp.plan(Grouped(), tp=2, sample=torch.zeros(1, 3, 8), rules=rules)
    in_use = {r.name: r.dim if r.is_cut and r.style != "gathered_at_use" else None for r in plan.parameters}
    assert in_use == cut
