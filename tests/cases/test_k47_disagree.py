"""K47: ranks that hold different rules or models; all of them say so, none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autotp.errors import AutotpError
from autotp.ranks import RankPool
from tests.cases.checks import SECONDS

pytestmark = pytest.mark.slow


class Layers(nn.Module):
    """Residual layers of two linear ones."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def differ(what: str) -> str | None:
    """Shard with something else on rank 1; the refusal."""
    import autotp
    from tests.harness.tasks import mesh_of

    mesh, rank = mesh_of(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = Layers(3 if what == "a layer more" and rank == 1 else 2)
    rules = {"layers.1.*": "replicate"} if what == "another rule" and rank == 1 else None
    try:
        autotp.shard(model, mesh, sample=torch.randn(4, 16), rules=rules)
    except AutotpError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("what", ["another rule", "a layer more"])
def test_ranks_that_differ_are_told_where(ranks: RankPool, what: str) -> None:
    answers: list[Any] = ranks.run("tests.cases.test_k47_disagree:differ", what, timeout=SECONDS)
    for answer in answers[:2]:
        assert "rank 0 and rank 1 differ" in answer, answer
        assert ("layers.1.0" if what == "another rule" else "8 against 12") in answer, answer
