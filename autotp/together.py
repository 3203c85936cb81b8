"""All ranks of a mesh go on, or all of them raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import AutotpError
from autotp.lost_ranks import calls_of

T = TypeVar("T")


@contextmanager
def together(mesh: DeviceMesh) -> Iterator[None]:
    """What a rank raises inside, all ranks of `mesh` raise: those that were fine say which rank failed, and why.

    Nothing inside may communicate. Ends with one small exchange per axis.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    failed = _exchange(mesh, mine)
    if mine is not None:
        raise mine
    if failed:
        rank = min(failed)
        code, text = failed[rank]
        raise AutotpError(f"rank {rank} of {mesh.size()}: {text}", code=code)


def same_everywhere(mesh: DeviceMesh, value: str, what: str) -> None:
    """Raise on all ranks unless they have equal values."""
    answers = _gathered(mesh, {dist.get_rank(): value})
    first = min(answers)
    if others := [rank for rank, answer in answers.items() if answer != answers[first]]:
        raise AutotpError(f"{what} are not the same on rank {first} and on rank {others[0]}")


def _exchange(mesh: DeviceMesh, mine: Exception | None) -> dict[int, tuple[str, str]]:
    """The code and text of every rank that failed."""
    failed: dict[int, tuple[str, str]] = {}
    if mine is not None:
        known = isinstance(mine, AutotpError)
        text = str(mine) if known else f"{type(mine).__name__}: {mine}"
        failed[dist.get_rank()] = (mine.code if isinstance(mine, AutotpError) else "TP-ERROR", text)
    return _gathered(mesh, failed)


def _gathered(mesh: DeviceMesh, mine: dict[int, T]) -> dict[int, T]:
    """What all ranks of a mesh have, by rank."""
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            answers: list[dict[int, T]] = [{}] * mesh.size(axis)
            calls_of(mesh.get_group(axis)).run("all_gather_object", "", None, dist.all_gather_object, answers, mine)
            mine = {rank: value for answer in answers for rank, value in answer.items()}
    return mine
