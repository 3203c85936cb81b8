"""The pool of local ranks: answers, failures, hangs, deaths, and what cannot be pickled."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from autotp.errors import AutotpError, MeshError
from autotp.payloads import CannotTravelError
from autotp.ranks import RankError, RankPool, run_once

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def rank_and(payload: object) -> tuple[int, object]:
    """Which rank runs it, and what it was given."""
    dist.barrier()
    return dist.get_rank(), payload


def raise_on_one(payload: object) -> None:
    """Rank 1 raises while rank 0 waits for it."""
    if dist.get_rank() == 1:
        raise RuntimeError("something went wrong here")
    dist.barrier()


def refuse(payload: object) -> None:
    """All ranks refuse."""
    raise MeshError("no such axis")


def hang(payload: object) -> None:
    """Rank 1 waits for rank 0, which has left."""
    if dist.get_rank() == 1:
        dist.barrier()


def die(payload: object) -> None:
    """Rank 0 ends without a word."""
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


@pytest.fixture(scope="module")
def pair() -> object:
    with RankPool(2, timeout=60) as pool:
        yield pool


def test_every_rank_answers_in_order(pair: RankPool) -> None:
    assert pair.run(rank_and, {"x": 1}) == [(0, {"x": 1}), (1, {"x": 1})]
    assert pair.run(f"{__name__}:rank_and", 2) == [(0, 2), (1, 2)]


def test_a_rank_that_raises_is_reported_with_its_traceback(pair: RankPool) -> None:
    with pytest.raises(RankError, match="something went wrong here") as caught:
        pair.run(raise_on_one)
    assert "in raise_on_one" in str(caught.value)
    assert not caught.value.hung
    assert pair.run(rank_and, 3) == [(0, 3), (1, 3)]


def test_an_error_of_ours_comes_back_as_itself_and_the_ranks_live_on(pair: RankPool) -> None:
    before = [process.pid for process in pair._ranks]
    with pytest.raises(MeshError, match="no such axis"):
        pair.run(refuse)
    assert [process.pid for process in pair._ranks] == before


def test_a_hang_is_ended_and_says_where(pair: RankPool) -> None:
    with pytest.raises(RankError, match="no answer within 3 s") as caught:
        pair.run(hang, timeout=3)
    assert caught.value.hung
    assert list(caught.value.failures) == [1]
    assert "in hang" in str(caught.value)


def test_a_rank_that_dies_is_reported(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2: the process ended with exit code 7"):
        pair.run(die)


def test_a_lambda_is_refused_by_a_pool_and_forked_by_run_once(pair: RankPool) -> None:
    with pytest.raises(CannotTravelError, match="cannot be handed to another process"):
        pair.run(lambda payload: payload)
    assert run_once(2, lambda payload: (dist.get_rank(), payload), 5) == [(0, 5), (1, 5)]


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch.distributed as dist
        from autotp.ranks import run_once

        class Local:
            value = 3

        def task(payload):
            return dist.get_rank() + payload.value

        print(run_once(2, task, Local()))
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.stdout.strip() == "[3, 4]", done.stderr


def test_errors_are_value_errors() -> None:
    assert issubclass(RankError, AutotpError)
    assert issubclass(RankError, ValueError)
