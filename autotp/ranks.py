"""Local gloo ranks: processes on this machine that form a process group and run tasks.

    with RankPool(4) as pool:
        per_rank = pool.run("package.module:function", payload)

The ranks are forks of a fresh interpreter that has imported torch and never re-runs the caller's script, so no
`if __name__ == "__main__"` guard is needed. What a rank raises comes back as text; when one rank raises, dies or passes
the time limit, the others are ended too, so that a call always comes back.
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
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkProcess
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
    "from autotp.rank_process import nursery; nursery(*json.loads(sys.argv[2]))"
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


class _Rank:
    """One rank: its process, its pipe and its log file."""

    def __init__(self, conn: Connection, pid: int, log: Path, fork: ForkProcess | None = None) -> None:
        self.conn, self.pid, self._log, self._fork = conn, pid, log, fork

    def send(self, *message: Any) -> None:
        try:
            self.conn.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # it has died; waiting for its answer will say so

    def receive(self) -> tuple[Any, ...]:
        try:
            return pickle.loads(self.conn.recv_bytes())
        except (EOFError, OSError):
            return "died", f"the process ended with exit code {self._exit_code()}\n{_tail(self._log)}", None

    def kill(self) -> None:
        self.conn.close()
        if self._fork is not None:
            self._fork.kill()
            self._fork.join()
        elif not self._exit_file.exists():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def stack(self) -> str:
        """Where a rank that does not answer is, as far as it can be had."""
        try:
            os.kill(self.pid, signal.SIGUSR1)  # its fault handler writes the stack to the log
            time.sleep(0.5)
        except OSError:
            pass
        return _tail(self._log)

    @property
    def _exit_file(self) -> Path:
        return self._log.with_name(f"{self._log.name}.exit")

    def _exit_code(self) -> int | None:
        if self._fork is not None:
            self._fork.join(10)
            return self._fork.exitcode
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self._exit_file.exists() and (text := self._exit_file.read_text()):
                return int(text)
            time.sleep(0.05)
        return None


def _tail(log: Path, limit: int = 3000) -> str:
    return log.read_text(errors="replace")[-limit:].strip() if log.exists() else ""


def _forked(inherited: tuple[Task, Any], logs: list[Path], seconds: int) -> list[_Rank]:
    """Ranks that are forks of this process."""
    ranks = []
    for rank, log in enumerate(logs):
        ours, theirs = Pipe()
        args = (theirs, ours, rank, len(logs), seconds, log, inherited)
        fork = get_context("fork").Process(target=forked, args=args, daemon=True)
        fork.start()
        theirs.close()
        ranks.append(_Rank(ours, fork.pid or 0, log, fork))
    return ranks


def _spawn(theirs: list[Connection], logs: list[Path], seconds: int, imports: Sequence[str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter that imports torch once, and forks the ranks."""
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    env.setdefault("GLOO_SOCKET_IFNAME", loopback())
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    descriptors = [conn.fileno() for conn in theirs]
    told = json.dumps([descriptors, [str(log) for log in logs], seconds, list(imports)])
    with open(logs[0].with_name("nursery.log"), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, path, told],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=descriptors,
        )


class RankPool:
    """`size` local ranks that stay alive between tasks: started at the first one, and anew after a failure."""

    def __init__(self, size: int, *, timeout: float | None = None, imports: Sequence[str] = ()) -> None:
        """``imports``: modules that tasks will need, which are imported once for all ranks."""
        if os.name != "posix":
            raise AutotpError("local ranks need Linux or macOS; start the ranks with torchrun instead")
        self.size = size
        self.timeout = timeout or default_timeout()
        self._ranks: list[_Rank] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        self._imports = imports
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
        if self._nursery is not None:
            self._nursery.communicate()  # it ends when its ranks have
            self._nursery = None

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
        seconds = int(max(self.timeout, 60.0))
        self._ranks = _forked(inherited, logs, seconds) if inherited is not None else self._born(logs, seconds)
        port = self._collect([0], START_SECONDS)[0]
        self._tell(port)
        self._collect(range(self.size), START_SECONDS)

    def _born(self, logs: list[Path], seconds: int) -> list[_Rank]:
        for old in Path(self._folder.name).glob("*.exit"):
            old.unlink()
        pipes = [Pipe() for _ in logs]
        self._nursery = _spawn([theirs for _, theirs in pipes], logs, seconds, self._imports)
        for _, theirs in pipes:
            theirs.close()
        out = self._nursery.stdout
        assert out is not None
        pids = out.readline() if connection.wait([out.fileno()], START_SECONDS) else b""
        if not pids:
            self._nursery.kill()
            self.stop()
            raise RankError(self.size, dict.fromkeys(range(self.size), _tail(logs[0].with_name("nursery.log"))))
        return [_Rank(ours, pid, log) for (ours, _), pid, log in zip(pipes, json.loads(pids), logs, strict=True)]

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


def run_once(
    size: int, task: Task, payload: Any = None, *, timeout: float | None = None, imports: Sequence[str] = ()
) -> list[Any]:
    """Start `size` ranks, run one task on them and end them; what cannot be pickled is forked."""
    with RankPool(size, timeout=timeout, imports=imports) as pool:
        try:
            return pool.run(task, payload)
        except CannotTravelError:
            return pool.run_forked(task, payload)
