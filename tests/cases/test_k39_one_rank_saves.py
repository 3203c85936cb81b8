"""K39: `if rank == 0: save(...)`; an error that says who must call, in time, and nothing under a final name."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.ranks import RankPool
from tests.cases.checks import SECONDS, is_named
from tests.cases.test_k47_disagree import Layers

pytestmark = pytest.mark.slow
LIMIT = 2.0  # of the process group


def only_rank_0(folder: str) -> dict[str, Any]:
    """What rank 0 is told, and how long each call took."""
    from tests.harness.tasks import mesh_of

    mesh, rank = mesh_of(2), dist.get_rank()
    found: dict[str, Any] = {}
    if rank < 2:
        model = autotp.shard(Layers(1), mesh, sample=torch.randn(4, 16))
    if rank == 0:
        usual = autotp.torch_compat.default_timeout()
        dist.set_timeout(timedelta(seconds=LIMIT))
        try:
            found["save"] = _refused(lambda: autotp.save(model, f"{folder}/run"))
            found["export"] = _refused(lambda: autotp.export(model, f"{folder}/final"))
        finally:
            dist.set_timeout(timedelta(seconds=usual))
    dist.barrier()
    return found


def _refused(call: Callable[[], Any]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        call()
    except autotp.AutotpError as error:
        return str(error), time.monotonic() - start
    return "not refused", time.monotonic() - start


def test_k39_others_must_call_too(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run("tests.cases.test_k39_one_rank_saves:only_rank_0", str(tmp_path), timeout=SECONDS)[0]
    for call in ("save", "export"):
        text, seconds = told[call]
        is_named(text, "rank 1 did not call", f"autotp.{call}", "All 2 ranks must call it")
        assert seconds < LIMIT + 10
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []
    assert not (tmp_path / "final").exists()
    assert not list((tmp_path / "run").glob("[0-9]*")), "no checkpoint under a final name"
