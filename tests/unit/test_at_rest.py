"""Matrices that are kept in parts and put together for use: by default, by rule and from a saved plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.mesh import as_mesh_axes
from autotp.planning import prepare


class Tagger(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rnn, self.down = nn.Linear(8, 16), nn.GRU(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.rnn(self.up(x))[0])


SAMPLE = torch.zeros(3, 2, 8)
MATRICES = ("rnn.weight_ih_l0", "rnn.weight_hh_l0")


def test_what_cannot_be_cut_in_use_is_cut_at_rest() -> None:
    plan = autotp.plan(Tagger(), tp=2, sample=SAMPLE)
    for name in MATRICES:
        row = plan.row(name)
        assert (row.style, row.dim, row.local_shape[0]) == ("gathered_at_use", 0, 12)
        assert "12 of 24 per rank" in row.reason
        assert "no rule" in row.reason
    assert plan.cut_share == 1.0
    gathered = [c.bytes for c in plan.collectives if c.module == "rnn" and c.kind == "all_gather"]
    assert gathered == [24 * 16 * 4, 24 * 8 * 4]


def test_a_rule_keeps_it_whole() -> None:
    plan = autotp.plan(Tagger(), tp=2, sample=SAMPLE, rules={"rnn.*": "replicate"})
    assert {plan.row(name).style for name in MATRICES} == {"replicate"}


def test_a_rule_keeps_a_layer_in_parts_that_could_be_cut_in_use() -> None:
    plan = autotp.plan(Tagger(), tp=2, sample=SAMPLE, rules={"up.weight": "gathered_at_use"})
    assert plan.row("up.weight").style == "gathered_at_use"
    assert plan.row("up.bias").style == "replicate"


def test_a_rule_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(autotp.RuleError, match=r"up\.bias.*no matrix"):
        autotp.plan(Tagger(), tp=2, sample=SAMPLE, rules={"up.bias": "gathered_at_use"})
    with pytest.raises(autotp.RuleError, match=r"rnn.weight_ih_l0.*\[24, 16\].*64 ranks"):
        autotp.plan(Tagger(), tp=64, sample=SAMPLE, rules={"rnn.weight*": "gathered_at_use"})


def test_a_saved_plan_gives_the_same_plan_again(tmp_path: Path) -> None:
    plan = autotp.plan(Tagger(), tp=2, sample=SAMPLE)
    plan.save(tmp_path / "plan.toml")
    again = prepare(Tagger(), as_mesh_axes(2), sample=SAMPLE, plan=tmp_path / "plan.toml")
    assert [(r.name, r.style, r.dim, r.local_shape) for r in again.plan.parameters] == [
        (r.name, r.style, r.dim, r.local_shape) for r in plan.parameters
    ]
    assert all(again.layout(name) is not None for name in MATRICES)


class Renormed(nn.Module):
    """A look-up that writes into its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.table(ids))


def test_what_is_written_into_stays_whole() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert autotp.plan(Renormed(), tp=2, sample=ids).row("table.weight").style == "replicate"
    with pytest.raises(autotp.RuleError, match="written into"):
        autotp.plan(Renormed(), tp=2, sample=ids, rules={"table": "gathered_at_use"})
