"""K53: the plan's sizes are those worked out by hand, and those measured.

That cutting tokens sends no more bytes is in tests/exact/test_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autotp
from autotp.comparing import local
from autotp.plan_types import Memory
from autotp.ranks import RankPool
from tests.cases.checks import SECONDS
from tests.cases.tasks import built

pytestmark = pytest.mark.slow

WHOLE, SHARE = 64 * 256 + 256 + 256 * 64 + 64, 64 * 64 + 64 + 64 * 64 + 64  # elements, of 4 bytes
SENT = 8 * 16 * 64 * 4  # the activation that is summed, each way


def test_k53_by_hand() -> None:
    model, args, kwargs = built("K53")
    plan = autotp.plan(model, tp=4, sample=(args, kwargs))
    assert (WHOLE, SHARE, SENT) == (33_088, 8_320, 32_768)
    assert plan.memory == Memory(
        parameters=4 * WHOLE, local_parameters=4 * SHARE, gradients=4 * SHARE, optimizer=2 * 4 * SHARE
    )
    assert [(c.when, c.kind, c.bytes) for c in plan.collectives] == [
        ("forward", "all_reduce", SENT),
        ("backward", "all_reduce", SENT),
    ]


def measured(payload: object) -> dict[str, Any]:
    """Elements that a rank holds after a step, and bytes that it has summed."""
    from tests.harness.tasks import mesh_of

    model, args, _ = built("K53")
    model, x = model.float(), args[0].float().requires_grad_()
    autotp.shard(model, mesh_of(4), sample=(x,))
    optimizer = torch.optim.AdamW(model.parameters())
    with summed() as forward:
        out = model(x)
    with summed() as backward:
        out.sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    kept = [v for p in parameters for key, v in optimizer.state[p].items() if key != "step"]
    return {
        "local": sum(local(p).numel() for p in parameters),
        "gradients": sum(local(p.grad).numel() for p in parameters if p.grad is not None),
        "optimizer": sum(local(v).numel() for v in kept),
        "sent": (forward, backward),
    }


@contextmanager
def summed() -> Iterator[list[int]]:
    """Bytes of each all_reduce inside."""
    found: list[int] = []
    original = dist.all_reduce

    def all_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(x.numel() * x.element_size())
        return original(x, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield found
    finally:
        dist.all_reduce = original


def test_k53_measured(ranks: RankPool) -> None:
    for found in ranks.run("tests.cases.test_k53_sizes:measured", None, timeout=SECONDS):
        assert found == {"local": SHARE, "gradients": SHARE, "optimizer": 2 * SHARE, "sent": ([SENT], [SENT])}
