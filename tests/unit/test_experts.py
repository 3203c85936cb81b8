"""Experts on different ranks: what is planned, what is summed early, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp

E, WIDTH, INNER = 6, 16, 32
ALL = {"up": "expertwise", "down": "expertwise"}


class Experts(nn.Module):
    """Six experts, and what is done with the rows of every token's one expert, sorted by expert."""

    def __init__(self, how: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, WIDTH, INNER)), nn.Parameter(torch.randn(E, INNER, WIDTH))
        self.router, self.after, self.how = nn.Linear(WIDTH, E), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        """Every token by its expert."""
        order = self.router(x).argmax(-1).sort()
        ends = torch.bincount(order.values, minlength=E).cumsum(0).to(torch.int32)
        return self.after(self.how(self, x[order.indices], order.values, ends))


def planned(how: Any, rules: Any = ALL, tp: int = 2) -> autotp.Plan:
    """The plan of such a model."""
    return autotp.plan(Experts(how), tp=tp, sample=torch.zeros(10, WIDTH), rules=rules)


def sums(plan: autotp.Plan) -> list[int]:
    """Numbers that each sum of the forward adds up."""
    return [c.bytes // 4 for c in plan.collectives if (c.kind, c.when) == ("all_reduce", "forward")]


def up(m: Any, x: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, m.up, offs=ends)


def down(m: Any, x: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, m.down, offs=ends)


WAYS: dict[str, tuple[Any, list[int]]] = {
    "zeros stay zeros": (lambda m, x, ids, ends: down(m, F.silu(up(m, x, ends)), ends), [160]),
    "a constant is multiplied by zeros": (
        lambda m, x, ids, ends: down(m, (up(m, x, ends) + 1) * up(m, x, ends), ends), [160]),
    "rows of others are not read by a product": (lambda m, x, ids, ends: down(m, up(m, x, ends).exp(), ends), [160]),
    "a constant is not summed": (lambda m, x, ids, ends: down(m, up(m, x, ends), ends).exp(), [160]),
    "rows in another order": (
        lambda m, x, ids, ends: down(m, up(m, x, ends) * up(m, x, ends)[ids.argsort()], ends), [320, 320, 160]),
    "rows in one other order": (
        lambda m, x, ids, ends: (lambda o: (down(m, up(m, x, ends), ends)[o] * down(m, up(m, x, ends), ends)[o]))(
            ids.argsort()), [160]),
    "no gradient at zero": (lambda m, x, ids, ends: down(m, up(m, x, ends).abs().sqrt(), ends), [320, 160]),
    "not finite at zero": (
        lambda m, x, ids, ends: down(m, up(m, x, ends) ** 2 / up(m, x, ends), ends), [320, 320, 160]),
    "a bias that is picked by the same indices": (
        lambda m, x, ids, ends: down(m, up(m, x, ends) + m.down[:, :, 0][ids], ends), [160]),
    "a tensor that is added to under another name": (
        lambda m, x, ids, ends: _under_another_name(x, ids, down(m, up(m, x, ends), ends)), [160]),
}  # fmt: skip


def _under_another_name(x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
    out = x.new_zeros(10, WIDTH)
    seen = out.view(2, 5, WIDTH)
    out.index_add_(0, ids, y)
    return seen.view(10, WIDTH)


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_made_where_they_must_be(way: str) -> None:
    how, wanted = WAYS[way]
    plan = planned(how)
    assert {plan.row(n).style for n in ("up", "down")} == {"expertwise"}
    assert sums(plan) == wanted


def test_by_feature_without_a_rule() -> None:
    plan = planned(WAYS["zeros stay zeros"][0], rules=None)
    assert (plan.row("up").dim, plan.row("down").dim) == (2, 1)


def test_what_computes_on_the_rows_of_one_follows() -> None:
    plan = planned(WAYS["zeros stay zeros"][0], rules={"up": "expertwise"}, tp=4)
    assert plan.row("down").style == "expertwise"
    assert plan.row("down").reason.startswith("6 experts, 2/2/1/1 per rank")


def test_what_is_no_expert_is_refused() -> None:
    with pytest.raises(
        autotp.RuleError, match=r"after\.weight: rule 'after' asks for expertwise.*dim 0: out, dim 1: in"
    ):
        planned(WAYS["zeros stay zeros"][0], rules={"after": "expertwise"})


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(autotp.RuleError, match=r"up: .*expertwise.*its 6 experts cannot be dealt to 8 ranks"):
        planned(WAYS["zeros stay zeros"][0], tp=8)


def test_indices_that_are_not_sorted_do_not_say_whose_sorted_rows_are() -> None:
    def how(m: Any, x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        mine = m.router(x).argmax(-1)
        ends = torch.bincount(mine, minlength=E).cumsum(0).to(torch.int32)
        return F.silu(up(m, x, ends) + m.down[:, :, 0][mine])[:, :WIDTH]

    assert sums(planned(how)) == [320], "rows of different experts were taken for the same"


def test_weights_are_not_summed_to_have_a_plan() -> None:
    with pytest.raises(
        autotp.RuleError, match=r"up: .*expertwise.*the sum over the ranks that have experts cannot be made"
    ):
        planned(lambda m, x, ids, ends: x * m.up[ids].flatten(1).sort().values[:, :WIDTH], rules={"up": "expertwise"})


def test_a_saved_plan_gives_the_same_plan_again(tmp_path: Path) -> None:
    how = WAYS["a bias that is picked by the same indices"][0]
    plan = planned(how, tp=4)
    assert {(r.style, r.dim, r.local_shape[0]) for r in plan.parameters if r.name in ALL} == {("expertwise", 0, 2)}
    plan.save(tmp_path / "plan.toml")
    again = autotp.plan(Experts(how), tp=4, sample=torch.zeros(10, WIDTH), plan=tmp_path / "plan.toml")
    assert [(r.name, r.style, r.dim) for r in again.parameters] == [(r.name, r.style, r.dim) for r in plan.parameters]
    assert again.collectives == plan.collectives
    with pytest.raises(autotp.PlanError, match="expertwise"):
        plan.to_tp_plan()
