"""Ranks that die, hang, raise or are elsewhere: the others end in time and say which rank, where, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exact import lost_ranks_tasks as tasks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, dict[str, Any]]]:
    """Scenario -> rank -> what it was told; nothing of ranks that were killed."""
    folder = tmp_path_factory.mktemp("told")
    command = [sys.executable, "-m", "tests.exact.lost_ranks_tasks", str(folder)]
    subprocess.run(command, check=True, timeout=240, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        name, _, rank = path.stem.rpartition("-")
        found.setdefault(name, {})[int(rank)] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("scenario", "survivors", "lost", "words"),
    [
        ("dies_in_forward", [0, 1, 3], 2, ["in layers.1.2", "of ranks 0, 1, 2, 3", "the process has ended"]),
        ("hangs", [0], 1, ["in layers.0.2", "did not come, but was at", "in loads_data"]),
        ("raises", [0], 1, ["in layers.1.2", "did not come, having raised LookupError: no such token: 7"]),
        ("ran_less_often", [0], 1, ["did not come, but was at", "in loads_data"]),
        ("killed_in_backward", [0], 1, ["in layers.0 ", "the process has ended"]),
        ("dies_on_two_axes", [0, 1, 2], 3, ["the process has ended"]),
        ("hangs_on_two_axes", [0, 2, 3], 1, ["did not come, but was at", "in loads_data"]),
        ("not_sharded", [0], 1, ["in autotp.shard", "it has not called autotp.shard"]),
    ],
)
def test_the_others_name_the_rank(
    told: dict[str, dict[int, dict[str, Any]]], scenario: str, survivors: list[int], lost: int, words: list[str]
) -> None:
    for rank in survivors:
        answer = told[scenario][rank]
        assert answer["kind"] == "RankLostError", answer
        assert answer["ranks"] == [lost], answer
        assert f"rank {lost} did not come" in answer["error"]
        for word in words:
            assert word in answer["error"], answer
        assert answer["seconds"] < 2 * tasks.TIMEOUT + 10, "the time limit, once more for a rank that waits, and a bit"


def test_who_comes_too_late_is_told_so(told: dict[str, dict[int, dict[str, Any]]]) -> None:
    answer = told["hangs"][1]
    assert answer["ranks"] == [1]
    assert "rank 0 has found before: rank 1 did not come" in answer["error"]
    assert "This rank came too late" in answer["error"]


def test_an_error_of_the_user_stays_what_it_is(told: dict[str, dict[int, dict[str, Any]]]) -> None:
    assert told["raises"][1]["kind"] == "LookupError"


def test_a_collective_of_others_is_explained_too(told: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Rank 1 waits for rank 3 in one that FSDP2 makes."""
    assert "a collective failed at" in told["dies_on_two_axes"][1]["error"]
    assert "a collective failed at" in told["hangs_on_two_axes"][3]["error"]
    whole = told["hangs_on_two_axes"][2]["error"]
    assert "rank 3 waits in a collective of other ranks" in whole or "has found before" in whole
