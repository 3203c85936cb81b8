"""Ranks that do something slow together, and learn within a set time when one of them is not there.

A collective waits for ranks that will never call it, and cannot say which. Here the ranks exchange small messages over
the key-value store of their process group instead: whoever waits knows for whom. It also works beside collectives that
run at the same time, as when a checkpoint is written while training goes on.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import AutotpError
from autotp.torch_compat import default_store, default_timeout

T = TypeVar("T")
U = TypeVar("U")
SILENT_SECONDS = 30.0  # a rank that is at work gives a sign of life more often than this, or it is gone
_GRACE = 5.0  # how much longer than the first one the others wait for its answer
_LONGEST = 600.0


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The ranks, the first of which leads; ``key`` sets apart what they are doing from all else in the store.

    What goes wrong is raised as ``kind``.
    """

    ranks: tuple[int, ...]
    rank: int
    timeout: float
    kind: type[AutotpError] = AutotpError
    store: Any = None
    key: str = ""

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == self.ranks[0]

    def begin(self, what: str) -> Crew:
        """Meet: every rank must call this with the same `what` within the time limit.

        Raises:
            AutotpError: on all ranks that called: some did not, or came for something else.
        """

        def agree(said: Mapping[int, str]) -> dict[int, str]:
            other = next((r for r in self.ranks if said[r] != what), None)
            if other is not None:
                raise self.kind(
                    f"rank {self.ranks[0]} called {what}, rank {other} called {said[other]}: all ranks must make the "
                    "same call"
                )
            return dict.fromkeys(self.ranks, uuid.uuid4().hex)

        late = f"did not call {what} within {self.timeout:.0f} s. All {len(self.ranks)} ranks must call it"
        key = self.step("meet", lambda: what, agree, late=late)
        return replace(self, key=key)

    def step(
        self, tag: str, local: Callable[[], T], decide: Callable[[Mapping[int, T]], Mapping[int, U]], *, late: str = ""
    ) -> U:
        """Do `local` on every rank, `decide` with all results on the first; every rank gets its part of the answer.

        Raises:
            AutotpError: on all ranks, if one of them raised, died, or passed the time limit; says which.
        """
        mine = self._attempt(local)
        if len(self.ranks) == 1:
            if mine.error is not None:
                raise mine.error
            alone = self._attempt(lambda: decide({self.rank: mine.value}))
            if alone.error is not None:
                raise alone.error
            return alone.value[self.rank]
        late = late or f"did not get through {tag} within {self.timeout:.0f} s"
        try:
            answer = self._exchange(tag, mine, decide, late)
        except (dist.DistError, OSError) as error:
            raise self.kind(
                f"the store of the process group, which rank 0 or the launcher holds, does not answer ({error}): "
                "that process has ended"
            ) from error
        if mine.error is not None:
            raise mine.error
        if answer.error is not None:
            raise answer.error
        return answer.value

    def together(self, tag: str, local: Callable[[], T]) -> T:
        """The result of `local`, if no rank raised in it."""
        kept: list[T] = []
        self.step(tag, lambda: kept.append(local()), lambda all_of: dict.fromkeys(all_of))
        return kept[0]

    def alive(self) -> Alive:
        """While this context is open the others see that this rank is at work, however long that takes."""
        return Alive(self)

    # ---- messages: a rank posts what it has under a number of its own, under which it looks for the answer

    def _exchange(self, tag: str, mine: _Outcome, decide: Callable[[Any], Mapping[int, Any]], late: str) -> _Outcome:
        number = uuid.uuid4().hex
        here = self._place(tag, self.rank)
        self.store.set(here, pickle.dumps((number, self._portable(mine))))
        try:
            if not self.leads:
                missing = self._wait([(self.ranks[0], f"autotp/{number}")], self.timeout + _GRACE)
                if not missing:
                    return self._take(f"autotp/{number}")
                absent = [r for r in self.ranks if r != self.rank and not self.store.check([self._place(tag, r)])]
                return _Outcome(error=self._missing(absent or missing, late))
            missing = self._wait([(r, self._place(tag, r)) for r in self.ranks], self.timeout)
            said = {r: self._take(self._place(tag, r)) for r in self.ranks if r not in missing}
            answers = self._answers({r: outcome for r, (_, outcome) in said.items()}, missing, decide, late)
            for r, (own, _) in said.items():
                if r != self.rank:
                    self.store.set(f"autotp/{own}", pickle.dumps(self._portable(answers[r])))
            return answers[self.rank]
        finally:
            self.store.delete_key(here)

    def _place(self, tag: str, rank: int) -> str:
        return f"autotp/{self.key or self.ranks}/{tag}/{rank}"

    def _take(self, key: str) -> Any:
        value = pickle.loads(self.store.get(key))
        self.store.delete_key(key)
        return value

    def _wait(self, keys: Iterable[tuple[int, str]], seconds: float) -> list[int]:
        """The ranks whose key is not there when the time is over, or which have fallen silent."""
        start = time.monotonic()
        heard: dict[int, tuple[Any, float]] = {}
        waiting, pause = dict(keys), 0.002
        while True:
            waiting = {r: key for r, key in waiting.items() if not self.store.check([key])}
            now = time.monotonic()
            if not waiting or now - start > seconds:
                return list(waiting)
            if self.key and (silent := [r for r in waiting if self._silent(r, heard, now)]):
                return silent
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _silent(self, rank: int, heard: dict[int, tuple[Any, float]], now: float) -> bool:
        key = f"autotp/{self.key}/alive/{rank}"
        sign = self.store.get(key) if self.store.check([key]) else None
        last, since = heard.setdefault(rank, (sign, now))
        if sign != last:
            heard[rank] = (sign, now)
            return False
        return now - since > SILENT_SECONDS

    def _attempt(self, local: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(value=local())
        except AutotpError as error:
            return _Outcome(error=error)
        except Exception as error:
            wrapped = self.kind(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return _Outcome(error=wrapped)

    def _portable(self, outcome: _Outcome) -> _Outcome:
        """What another process can read: of an error the text."""
        if outcome.error is None:
            return outcome
        return _Outcome(error=self.kind(str(outcome.error), code=outcome.error.code))

    def _answers(
        self, said: Mapping[int, _Outcome], missing: list[int], decide: Callable[[Any], Mapping[int, Any]], late: str
    ) -> dict[int, _Outcome]:
        failed = {r: outcome.error for r, outcome in said.items() if outcome.error is not None}
        if failed:
            rank = min(failed)
            error: AutotpError = self.kind(f"rank {rank}: {failed[rank]}", code=failed[rank].code)
        elif missing:
            error = self._missing(missing, late)
        else:
            decided = self._attempt(lambda: decide({r: outcome.value for r, outcome in said.items()}))
            if decided.error is None:
                return {r: _Outcome(value=decided.value[r]) for r in said}
            error = decided.error
        return dict.fromkeys(said, _Outcome(error=error))

    def _missing(self, ranks: list[int], late: str) -> AutotpError:
        more = "it has died, hangs, or is" if len(ranks) == 1 else "they have died, hang, or are"
        return self.kind(f"rank {', '.join(map(str, ranks))} {late}; {more} elsewhere in the program")


class Alive:
    """Signs of life, from a thread."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.over = crew, threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        if len(self.crew.ranks) > 1:
            self.thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()

    def _beat(self) -> None:
        key = f"autotp/{self.crew.key}/alive/{self.crew.rank}"
        count = 0
        try:
            while not self.over.wait(0.0 if not count else SILENT_SECONDS / 10):
                count += 1
                self.crew.store.set(key, str(count))
        except (dist.DistError, OSError):
            return  # the store is gone: whoever waits for it says so


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    value: Any = None
    error: AutotpError | None = None


def crew_of(mesh: DeviceMesh | None, timeout: float | None, kind: type[AutotpError]) -> Crew:
    """The ranks of a mesh; without one, this process alone."""
    if mesh is None:
        return Crew(ranks=(0,), rank=0, timeout=timeout or _LONGEST, kind=kind)
    ranks = tuple(sorted(int(r) for r in mesh.mesh.flatten().tolist()))
    seconds = timeout or min(default_timeout(), _LONGEST)
    return Crew(ranks=ranks, rank=dist.get_rank(), timeout=seconds, kind=kind, store=default_store())
