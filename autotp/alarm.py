"""Alarms: how a rank asks all others where they are, while they may be stuck.

A collective that a rank does not come to fails on the others after a while, and cannot say whom it waited for. So in
every rank a thread looks once in a second whether an alarm was raised in the key-value store of the process group. All
ranks that live then answer where they are, also those that wait inside of a collective or are busy elsewhere.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from autotp.torch_compat import default_store

LOOK_SECONDS = 1.0  # between two looks for an alarm
ANSWER_SECONDS = 5.0  # how long answers are waited for
_FRESH_SECONDS = 600.0  # what was found out longer ago is about something else
_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (os.__file__, torch.__file__, __file__))
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep


class Watch:
    """The thread that answers alarms with what ``tell`` says."""

    def __init__(self, store: Any, rank: int, tell: Callable[[], Any]) -> None:
        self.store, self.rank, self.tell, self.process = store, rank, tell, os.getpid()
        self.next = int(store.add("autotp/alarms", 0)) + 1
        self.line = _line_to(store)
        threading.Thread(target=self._look, name="autotp roll call", daemon=True).start()

    def _look(self) -> None:
        try:
            while dist.is_initialized() and default_store() is self.store and not _hung_up(self.line):
                while self.store.check([f"autotp/alarm/{self.next}"]):
                    self.store.set(f"autotp/alarm/{self.next}/{self.rank}", json.dumps(self.tell()))
                    self.next += 1
                time.sleep(LOOK_SECONDS)
        except (RuntimeError, ValueError, OSError):
            return  # the store is gone, and with it whoever might ask


def _line_to(store: Any) -> socket.socket | None:
    """A connection that only shows whether the process that holds the store is there. To ask that by the store itself,
    when it is not, would fill the log of a program in which that process just ended first."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    try:
        line = socket.create_connection((store.host, store.port), timeout=ANSWER_SECONDS)
    except (AttributeError, OSError):
        return None  # a store of another kind
    line.setblocking(False)
    return line


def _hung_up(line: socket.socket | None) -> bool:
    try:
        return line is not None and not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(frozen=True)
class Finding:
    """What a rank has found out: which ranks are missing in which collective (the ranks of its group, and its number
    there; none if that is not known)."""

    by: int
    missing: list[int]
    text: str
    group: list[int]
    count: int
    time: float


@dataclass(frozen=True)
class Alarm:
    """One roll call."""

    store: Any
    number: int

    @classmethod
    def raised(cls) -> Alarm:
        """Ask."""
        store = default_store()
        number = int(store.add("autotp/alarms", 1))
        store.set(f"autotp/alarm/{number}", "")
        return cls(store, number)

    def answers(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What those of the ranks that live say."""
        waiting, start = {r: f"autotp/alarm/{self.number}/{r}" for r in ranks}, time.monotonic()
        found: dict[int, dict[str, Any]] = {}
        while waiting and time.monotonic() - start < ANSWER_SECONDS:
            for rank in [r for r, key in waiting.items() if self.store.check([key])]:
                found[rank] = json.loads(self.store.get(waiting.pop(rank)))
            time.sleep(0.05)
        return found

    def publish(self, missing: Iterable[int], text: str, group: Iterable[int] = (), count: int = 0) -> None:
        """For ranks that fail later, because this one has ended."""
        found = Finding(dist.get_rank(), list(missing), text, list(group), count, time.time())
        self.store.set(f"autotp/alarm/{self.number}/found", json.dumps(vars(found)))

    def found_before(self, group: Iterable[int] = (), count: int = 0) -> Finding | None:
        """The first thing that another rank found out about what has led to this failure."""
        for number in range(max(1, self.number - 64), self.number):
            if not self.store.check([f"autotp/alarm/{number}/found"]):
                continue
            found = Finding(**json.loads(self.store.get(f"autotp/alarm/{number}/found")))
            went_on = found.group == list(group) and found.count < count - 1
            if not went_on and time.time() - found.time < _FRESH_SECONDS and found.by != dist.get_rank():
                return found
        return None


def place_of_thread(thread: threading.Thread) -> tuple[str, bool]:
    """The innermost line that belongs to no library, of a thread that runs; and whether it is in torch.distributed."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "", False
    lines = [(f.f_code, line) for f, line in reversed(list(traceback.walk_stack(frame)))]
    return _place(lines), lines[-1][0].co_filename.startswith(_DISTRIBUTED)


def place_of_error(trace: TracebackType | None) -> str:
    """The line, of an error."""
    return _place([(f.f_code, line) for f, line in traceback.walk_tb(trace)])


def _place(lines: list[tuple[CodeType, int]]) -> str:
    """Of lines of code, the innermost last."""
    own = [x for x in lines if not x[0].co_filename.startswith((*_LIBRARIES, "<frozen"))]
    return next((f"{code.co_filename}:{line} in {code.co_name}" for code, line in reversed(own or lines)), "")
