"""K50: ranks of a tensor-parallel group that are given different inputs; all of them say so when asked to look.

And K52c: a number of ranks that is not the one started.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.errors import AutotpError, InputError
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


def verified(payload: object) -> dict[str, str]:
    """What `verify` says of other inputs on rank 1, of other weights there, and of another number of ranks."""
    from tests.harness.tasks import mesh_of

    mesh, rank = mesh_of(4), dist.get_rank()
    told = {}
    for name in ("inputs", "weights", "number"):
        torch.manual_seed(rank if name == "weights" else 0)
        model, x = Layers(1), torch.full((4, 16), 1.0 + (rank == 1 and name == "inputs"))
        try:
            autotp.verify(model, 1, sample=x) if name == "number" else autotp.verify(model, mesh=mesh, sample=x)
            told[name] = ""
        except AutotpError as error:
            told[name] = str(error)
    return told


def test_verify_names_the_ranks(ranks: RankPool) -> None:
    for told in ranks.run("tests.cases.test_k50_inputs_differ:verified", None, timeout=SECONDS):
        assert "inputs differ between TP ranks 0 and 1" in told["inputs"]
        assert "weights differ between TP ranks 0 and 1" in told["weights"]
        assert "tp=1, but the process group has 4 ranks" in told["number"]
