"""K50: ranks of a tensor-parallel group that are given different inputs; all of them say so when asked to look."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.errors import InputError
from autotp.ranks import RankPool
from tests.cases.checks import SECONDS
from tests.cases.test_k47_disagree import Layers

pytestmark = pytest.mark.slow


def calls(payload: object) -> dict[str, str]:
    """Calls that are alike and calls that are not, on (dp, tp); what each rank is told."""
    from tests.harness.tasks import grid_of

    mesh, rank = grid_of((2, 2), ("dp", "tp")), dist.get_rank()
    torch.manual_seed(0)
    model = autotp.shard(Layers(1), mesh, sample=torch.randn(4, 16))
    handle = autotp.check_inputs(model)
    alike, apart = torch.full((4, 16), float(rank // 2)), torch.full((4, 16), float(rank))
    given = {"alike": alike, "values": apart, "shape": torch.ones(4 + rank % 2, 16)}
    told = {}
    for name, x in given.items():
        try:
            model(x=x).sum().backward()
            told[name] = ""
        except InputError as error:
            told[name] = str(error)
            dist.barrier()
    handle.remove()
    model(apart).sum().backward()
    return told


def test_all_ranks_of_the_group_are_told(ranks: RankPool) -> None:
    told: list[Any] = ranks.run("tests.cases.test_k50_inputs_differ:calls", None, timeout=SECONDS)
    for rank, answer in enumerate(told):
        first = rank // 2 * 2
        assert answer["alike"] == ""
        assert f"rank {first} and rank {first + 1}, the values of x, float32[4, 16]" in answer["values"]
        assert "x is float32[4, 16] on the one, float32[5, 16] on the other" in answer["shape"]
