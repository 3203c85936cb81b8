"""A process apart, in which operations are tried: what reads out of bounds there ends that process and no other.

It is started at the first question, answers one after another, and goes with its parent.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pickle
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from autotp.ownership.apart import answer_all; answer_all(int(sys.argv[2]))"
)
SECONDS = 300.0  # for one operation, with the start of the process on a busy machine
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class _Apart:
    """The process as its parent sees it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.conn, theirs = Pipe()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path, str(theirs.fileno())],
            env={**os.environ, **_THREADS}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()

    def ask(self, question: bytes) -> Any:
        """The answer; None if the process died over it, or took too long."""
        try:
            self.conn.send_bytes(question)
            if self.conn.poll(SECONDS):
                return pickle.loads(self.conn.recv_bytes())
        except (OSError, EOFError):
            pass
        self.end()
        return None

    def end(self) -> None:
        """Close it."""
        self.conn.close()
        if self.pid == os.getpid():
            self.process.kill()
            self.process.wait()

    @property
    def usable(self) -> bool:
        """Whether it is this process's own, not one that a fork came with, and lives."""
        return self.pid == os.getpid() and not self.conn.closed


_current: list[_Apart] = []


@atexit.register
def _end() -> None:
    for one in _current:
        if one.usable:
            one.end()


def asked(space: str, function: str, payload: Any) -> Any:
    """What ``function`` (``module:name``) gives there for a payload; None if it ended that process.

    ``space``: the namespace of the operation, whose library is imported first.
    """
    if os.name != "posix":
        return None
    if not (_current and _current[0].usable):
        _current[:] = [_Apart()]
    return _current[0].ask(pickle.dumps((space, function, payload)))


def answer_all(descriptor: int) -> None:
    """Entry point of the process."""
    import torch

    torch.set_num_threads(1)
    conn = Connection(descriptor)
    while True:
        try:
            space, function, payload = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            return
        if space not in ("aten", "prims"):
            importlib.import_module(space)
        module, _, name = function.partition(":")
        conn.send_bytes(pickle.dumps(getattr(importlib.import_module(module), name)(payload)))
