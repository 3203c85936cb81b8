"""Local gloo ranks: processes on this machine that form a process group and run tasks.

    with RankPool(4) as pool:
        per_rank = pool.run("package.module:function", payload)

Each rank is a fresh interpreter that never re-runs the caller's script, so no `if __name__ == "__main__"`
guard is needed. What a rank raises comes back as text; when one rank raises, dies or passes the time limit,
the others are ended too, so that a call always comes back.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from autotp.errors import AutotpError
from autotp.payloads import CannotTravelError, Task, save_task
from autotp.rank_process import forked, loopback

GRACE_SECONDS = 8.0  # how long the other ranks may go on after the first failure
PING_SECONDS = 10.0
START_SECONDS = 240.0  # importing torch on a busy machine is slow
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from autotp.rank_process import child; child(*map(int, sys.argv[2:]))"
)
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def default_timeout() -> float:
    """Seconds that a task may take: AUTOTP_RANK_TIMEOUT, or 300."""
    return float(os.environ.get("AUTOTP_RANK_TIMEOUT", "300"))


class RankError(AutotpError):
    """A rank raised, died or did not finish; `failures` maps each such rank to what is known of it."""

    default_code: ClassVar[str] = "TP-RANK"

    def __init__(self, size: int, failures: dict[int, str], *, hung: bool = False) -> None:
        self.failures, self.hung = failures, hung
        alike: dict[str, list[int]] = {}
        for rank in sorted(failures):
            alike.setdefault(failures[rank], []).append(rank)
        parts = [f"rank {', '.join(map(str, ranks))} of {size}: {text.strip()}" for text, ranks in alike.items()]
        super().__init__("\n".join(parts))


class _Process:
    """One rank: its process, its pipe and its log file."""

    def __init__(self, rank: int, size: int, seconds: float, log: Path, inherited: tuple[Task, Any] | None) -> None:
        self._log = log
        self.conn, theirs = Pipe()
        self._popen: subprocess.Popen[bytes] | None = None
        if inherited is None:
            self._popen = _spawn(theirs, rank, size, seconds, log)
            self.pid = self._popen.pid
        else:
            args = (theirs, self.conn, rank, size, int(seconds), log, inherited)
            self._fork = get_context("fork").Process(target=forked, args=args, daemon=True)
            self._fork.start()
            self.pid = self._fork.pid or 0
        theirs.close()

    def send(self, *message: Any) -> None:
        try:
            self.conn.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # it has died; waiting for its answer will say so

    def receive(self) -> tuple[Any, ...]:
        try:
            return pickle.loads(self.conn.recv_bytes())
        except (EOFError, OSError):
            return "died", f"the process ended with exit code {self._exit_code()}\n{self._tail()}", None

    def kill(self) -> None:
        self.conn.close()
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
        else:
            self._fork.kill()
            self._fork.join()

    def stack(self) -> str:
        """Where a rank that does not answer is, as far as it can be had."""
        try:
            os.kill(self.pid, signal.SIGUSR1)  # its fault handler writes the stack to the log
            time.sleep(0.5)
        except OSError:
            pass
        return self._tail()

    def _exit_code(self) -> int | None:
        if self._popen is not None:
            return self._popen.wait(10)
        self._fork.join(10)
        return self._fork.exitcode

    def _tail(self, limit: int = 3000) -> str:
        return self._log.read_text(errors="replace")[-limit:].strip() if self._log.exists() else ""


def _spawn(theirs: Connection, rank: int, size: int, seconds: float, log: Path) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    env.setdefault("GLOO_SOCKET_IFNAME", loopback())
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    numbers = (theirs.fileno(), rank, size, int(seconds))
    command = [sys.executable, "-c", _BOOT, path, *map(str, numbers)]
    with open(log, "wb") as out:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=[theirs.fileno()]
        )


class RankPool:
    """`size` local ranks that stay alive between tasks: started at the first one, and anew after a failure."""

    def __init__(self, size: int, *, timeout: float | None = None) -> None:
        if os.name != "posix":
            raise AutotpError("local ranks need Linux or macOS; start the ranks with torchrun instead")
        self.size = size
        self.timeout = timeout or default_timeout()
        self._ranks: list[_Process] = []
        self._folder = tempfile.TemporaryDirectory(prefix="autotp-ranks-")

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks for good."""
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End the processes; the next task starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def run(self, task: Task, payload: Any = None, *, timeout: float | None = None) -> list[Any]:
        """Run `task(payload)` on every rank, `task` a function or "module:function"; the results in rank order.

        An AutotpError that a rank raises is raised here as it is; anything else becomes a RankError.
        """
        path = Path(self._folder.name) / "task.pt"
        save_task(task, payload, path)
        if not self._ranks:
            self._start(None)
        return self._answer(str(path), timeout or self.timeout)

    def run_forked(self, task: Task, payload: Any = None, *, timeout: float | None = None) -> list[Any]:
        """The same on forked processes, for objects that cannot be pickled; they end with the task."""
        self.stop()
        self._start((task, payload))
        try:
            return self._answer(None, timeout or self.timeout)
        finally:
            self.stop()

    def _start(self, inherited: tuple[Task, Any] | None) -> None:
        logs = [Path(self._folder.name) / f"rank{rank}.log" for rank in range(self.size)]
        seconds = max(self.timeout, 60.0)
        self._ranks = [_Process(rank, self.size, seconds, log, inherited) for rank, log in enumerate(logs)]
        port = self._collect([0], START_SECONDS)[0]
        self._tell(port)
        self._collect(range(self.size), START_SECONDS)

    def _answer(self, path: str | None, timeout: float) -> list[Any]:
        self._tell(path)
        return self._collect(range(self.size), timeout)

    def _in_step(self) -> bool:
        path = Path(self._folder.name) / "ping.pt"
        save_task("autotp.rank_process:ping", None, path)
        for rank in self._ranks:
            rank.send(str(path))
        waiting = {process.conn: process for process in self._ranks}
        deadline = time.monotonic() + PING_SECONDS
        while waiting and time.monotonic() < deadline:
            for conn in connection.wait(list(waiting), PING_SECONDS):
                if waiting.pop(conn).receive()[0] != "ok":  # type: ignore[call-overload]
                    return False
        return not waiting

    def _tell(self, *message: Any) -> None:
        for rank in self._ranks:
            rank.send(*message)

    def _collect(self, ranks: Sequence[int], timeout: float) -> list[Any]:
        """One answer of each rank; raises for the first that failed, after a moment for the others to fail too."""
        answers: dict[int, tuple[Any, ...]] = {}
        deadline = time.monotonic() + timeout
        while waiting := {self._ranks[r].conn: r for r in ranks if r not in answers}:
            for conn in connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0)):
                rank = waiting[conn]  # type: ignore[index]
                answers[rank] = self._ranks[rank].receive()
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                break
        if len(answers) == len(ranks) and all(answer[0] == "ok" for answer in answers.values()):
            return [answers[rank][1] for rank in ranks]
        self._fail(ranks, answers, timeout)

    def _fail(self, ranks: Sequence[int], answers: dict[int, tuple[Any, ...]], timeout: float) -> NoReturn:
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        texts = {rank: answer[1] for rank, answer in failed.items()}
        if not failed:
            late = [rank for rank in ranks if rank not in answers]
            texts = {r: f"no answer within {timeout:.0f} s; it is at\n{self._ranks[r].stack()}" for r in late}
        # Collectives may be half done on some ranks; only if all ranks raised may they still be in step.
        if len(failed) < self.size or any(answer[0] == "died" for answer in failed.values()) or not self._in_step():
            self.stop()
        error = RankError(self.size, texts, hung=not failed)
        originals = [answer[2] for answer in failed.values()]
        if originals and all(originals):
            raise pickle.loads(originals[0]) from error
        raise error


def run_once(size: int, task: Task, payload: Any = None, *, timeout: float | None = None) -> list[Any]:
    """Start `size` ranks, run one task on them and end them; what cannot be pickled is forked."""
    with RankPool(size, timeout=timeout) as pool:
        try:
            return pool.run(task, payload)
        except CannotTravelError:
            return pool.run_forked(task, payload)
