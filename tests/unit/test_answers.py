"""Where a model's code reads computed values: the plan says by which values its path was chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.mesh import as_mesh_axes
from autotp.planning import prepare
from tests.models import paths


def calls(model: nn.Module, x: Tensor) -> list[str]:
    """The names of the calls that were planned."""
    analysis = prepare(model, as_mesh_axes(2), sample=x).analysis
    assert analysis is not None
    return [c.name for c in analysis.trace.calls]


@pytest.mark.parametrize(("sum_of_x", "taken"), [(0.0, "relu"), (1e5, "softmax")])
def test_the_sample_decides(sum_of_x: float, taken: str) -> None:
    x = torch.full((2, 8), sum_of_x / 16)
    assert calls(paths.ByValue(), x)[-2] == taken
    (found,) = [f for f in autotp.plan(paths.ByValue(), tp=2, sample=x).findings if f.code == "TP-PATH"]
    assert found.level == "note" and "takes on the sample" in found.message


def test_without_weights_comparisons_hold_and_the_plan_says_so() -> None:
    with torch.device("meta"):
        model = paths.ByValue()
    x = torch.full((2, 8), 1e5)
    assert calls(model, x)[-2] == "relu"
    (found,) = [f for f in autotp.plan(model, tp=2, sample=x).findings if f.code == "TP-PATH"]
    assert found.level == "warning" and "comparisons were taken to hold" in found.message


def test_the_real_run_changes_nothing_and_draws_nothing_of_the_users() -> None:
    class Counts(paths.ByValue):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x) + torch.rand_like(x))

    model, state = Counts(), torch.get_rng_state()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    assert "__bool__" in calls(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_models_that_read_nothing_are_not_run() -> None:
    plan = autotp.plan(paths.ByFunction(), tp=2, sample=torch.zeros(2, 8))
    assert not [f for f in plan.findings if f.code == "TP-PATH"]
