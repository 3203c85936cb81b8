"""Which rank did not come, when a collective fails: autotp's own ones say so, ``autotp.roll_call`` for all others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.alarm import ANSWER_SECONDS, Alarm, Finding, Watch, place_of_error, place_of_thread
from autotp.errors import AutotpError, RankLostError
from autotp.torch_compat import default_store

_SILENT = (
    f"did not come, and gave no answer within {ANSWER_SECONDS:.0f} s: the process has ended, or Python stands still in "
    "it, or it has not called autotp.shard"
)


class Calls:
    """The collectives of one group that this process has begun: the same ones, in the same order, on all its ranks."""

    def __init__(self, group: Any) -> None:
        self.group, self.ranks = group, tuple(dist.get_process_group_ranks(group))
        self.count = 0
        self.now: tuple[str, str, Tensor | None] | None = None

    def run(self, kind: str, at: str, x: Tensor | None, collective: Callable[..., Any], *args: Any) -> Any:
        """Run a collective that module ``at`` makes with ``x``.

        Raises:
            RankLostError: it failed; says which rank did not come.
        """
        self.count += 1
        self.now = kind, at, x
        try:
            return collective(*args, group=self.group)
        except RuntimeError as error:
            found = None if isinstance(error, torch.OutOfMemoryError) else _found_out(self, error)
            if found is None:
                raise
            raise found from error
        finally:
            self.now = None

    def told(self) -> str:
        """What it is in, or an empty text."""
        now = self.now  # another thread may read it
        if now is None:
            return ""
        kind, at, x = now
        what = "" if x is None else f" of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        return f"{kind}{what}{f' in {at}' if at else ''}"


_known: dict[str, Calls] = {}
_watch: Watch | None = None
_failed_at: list[str] = []  # where this process is, once that can be said better than by its stack


def calls_of(group: Any) -> Calls:
    """Those of a group; all models that are cut over it share them."""
    known = _known.get(group.group_name)
    if known is None or known.group is not group:
        known = _known[group.group_name] = Calls(group)
    return known


def watch() -> None:
    """From now on this process answers when another one asks where it is."""
    global _watch
    store = default_store()
    if _watch is None or _watch.store is not store or _watch.process != os.getpid():
        _watch = Watch(store, dist.get_rank(), _where)


def _where() -> dict[str, Any]:
    place, waits = (_failed_at[-1], True) if _failed_at else place_of_thread(threading.main_thread())
    calls = [[c.ranks, c.count, c.told()] for c in list(_known.values())]
    return {"place": place, "waits": waits or any(doing for _, _, doing in calls), "calls": calls}


# ---------------------------------------------------------------- collectives of autotp


def _found_out(calls: Calls, error: Exception) -> RankLostError | None:
    """Why a collective has failed; None if all ranks came to it with the same."""
    head, said = f"{calls.told()} failed, collective {calls.count} of ranks {_listed(calls.ranks)}", _said(error)
    try:
        alarm = Alarm.raised()
        if (found := alarm.found_before(calls.ranks, calls.count)) is not None:
            return _after(found, head, said)
        reasons, lost = _missing(calls, alarm)
        if not lost:
            return None
        text = _by_rank(reasons)
        alarm.publish(lost, text, calls.ranks, calls.count)
        return RankLostError(f"{head}: {text}{said}", ranks=lost)
    except (dist.DistError, OSError) as gone:
        return _no_store(head, said, gone)


def _missing(calls: Calls, alarm: Alarm) -> tuple[dict[int, str], list[int]]:
    """What is known of the ranks of a group that are not in its collective; and who is to blame.

    That is they, unless all of them wait in collectives of other groups: then whoever waits nowhere.
    """
    answers = alarm.answers(range(dist.get_world_size()))
    others, here = [r for r in calls.ranks if r != dist.get_rank()], (calls.count, calls.told())
    lost: dict[int, str] = {}
    waiting: dict[int, str] = {}
    for rank in others:
        of = [(n, doing) for ranks, n, doing in answers.get(rank, _NOTHING)["calls"] if tuple(ranks) == calls.ranks]
        number, doing = max(of, default=(0, ""))
        if not doing and rank in answers and answers[rank]["waits"]:
            waiting[rank] = f"waits in a collective of other ranks, at {answers[rank]['place']}"
        elif not doing:
            lost[rank] = _absent(answers, rank, alarm.store)
        elif (number, doing) != here:
            lost[rank] = f"was in {doing}, collective {number} there"
    if waiting and not lost:
        lost = _nowhere(answers, alarm.store)
    return {**waiting, **lost}, list(lost or waiting)


_NOTHING: dict[str, Any] = {"calls": []}


def _nowhere(answers: dict[int, dict[str, Any]], store: Any) -> dict[int, str]:
    """What is known of all ranks that wait in no collective."""
    idle = [r for r in range(dist.get_world_size()) if r not in answers or not answers[r]["waits"]]
    return {r: _absent(answers, r, store) for r in idle if r != dist.get_rank()}


def _absent(answers: dict[int, dict[str, Any]], rank: int, store: Any) -> str:
    known = _raised(store, rank)
    return known or (f"did not come, but was at {answers[rank]['place']}" if rank in answers else _SILENT)


def _raised(store: Any, rank: int) -> str:
    key = f"autotp/raised/{rank}"
    return f"did not come, having raised {store.get(key).decode()}" if store.check([key]) else ""


def _after(found: Finding, head: str, said: str) -> RankLostError:
    late = ". This rank came too late" if dist.get_rank() in found.missing else ""
    return RankLostError(f"{head}: rank {found.by} has found before: {found.text}{late}{said}", ranks=found.missing)


def _no_store(head: str, said: str, gone: Exception) -> RankLostError:
    return RankLostError(
        f"{head}, and the store of the process group does not answer{_said(gone)}: the process that holds it, rank 0 "
        f"unless the launcher does, has ended{said}",
        ranks=(0,),
    )


def _said(error: Exception) -> str:
    return f" ({str(error).splitlines()[0][:200]})" if str(error) else ""


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _by_rank(reasons: dict[int, str]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, reason in reasons.items():
        alike.setdefault(reason, []).append(rank)
    return "; ".join(f"rank{'s'[: len(ranks) - 1]} {_listed(ranks)} {reason}" for reason, ranks in alike.items())


# ---------------------------------------------------------------- collectives of others


@contextmanager
def roll_call() -> Iterator[None]:
    """Around a training loop, on every rank: names the rank that is missing in any collective, not only in autotp's.

    What leaves the block as an error of communication (of FSDP2, of a clipped norm, of your own all_reduce) is raised
    as a :class:`RankLostError` that names the ranks that wait in no collective, and where they are. Whatever else
    leaves it on one rank is told to the others, which say so when they miss that rank.
    """
    watch()
    store, rank = default_store(), dist.get_rank()
    store.delete_key(f"autotp/raised/{rank}")
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        if _of_communication(error):
            raise _found_anywhere(error) from error
        try:
            store.set(f"autotp/raised/{rank}", f"{type(error).__name__}: {error}"[:300])
        except (dist.DistError, OSError):
            pass  # nobody is left to be told
        raise


def _of_communication(error: Exception) -> bool:
    """Whether a collective has failed. Gloo's errors have no type of their own."""
    return not isinstance(error, AutotpError) and (
        isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
    )


def _found_anywhere(error: Exception) -> RankLostError:
    """All ranks are asked: of which group the collective was is not known."""
    place = place_of_error(error.__traceback__)
    head, said = f"a collective failed at {place}", _said(error)
    _failed_at.append(place)
    try:
        alarm = Alarm.raised()
        if (found := alarm.found_before()) is not None:
            return _after(found, head, said)
        answers = alarm.answers(range(dist.get_world_size()))
        lost = _nowhere(answers, alarm.store)
        text = _by_rank(lost)
        if lost:
            alarm.publish(lost, text)
        else:
            text = "all ranks wait: " + _by_rank({r: f"at {answer['place']}" for r, answer in sorted(answers.items())})
        return RankLostError(f"{head}: {text}{said}", ranks=tuple(lost))
    except (dist.DistError, OSError) as gone:
        return _no_store(head, said, gone)
    finally:
        _failed_at.pop()
