"""What runs inside a rank: join the process group, then answer one task after another."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from autotp.errors import AutotpError
from autotp.payloads import CannotTravelError, Task, load_task

CANNOT_TRAVEL = (
    "the model cannot be handed to other processes: something in it is defined in the running script or notebook, "
    "and this process has already run a backward pass, after which it cannot be forked. Either install cloudpickle, "
    "or move the model's code into a module that can be imported, or call this before the first backward pass."
)


def loopback() -> str:
    """The network interface that stays on this machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def nursery(descriptors: Sequence[int], logs: Sequence[str], seconds: int, imports: Sequence[str]) -> NoReturn:
    """Entry point of a freshly started interpreter: imports what all ranks need, forks them, and notes how they end.

    It computes nothing and has one thread, so that forks of it are as good as interpreters of their own. The pids go
    to standard output; a rank's exit code to a file beside its log.
    """
    out, descriptors = os.dup(1), list(descriptors)
    os.dup2(2, 1)  # what modules print while they are imported is no pid
    for name in ("torch.distributed.tensor", *imports):
        with suppress(ImportError):
            importlib.import_module(name)
    pids: dict[int, int] = {}
    for rank, own in enumerate(descriptors):
        pid = os.fork()
        if pid:
            pids[pid] = rank
            continue
        for other in [out, *descriptors[:rank], *descriptors[rank + 1 :]]:
            os.close(other)
        _write_to(logs[rank])
        serve(Connection(own), rank, len(descriptors), seconds, None)
    for descriptor in descriptors:
        os.close(descriptor)
    os.write(out, f"{json.dumps(list(pids))}\n".encode())
    os.close(out)
    while pids:
        pid, status = os.wait()
        Path(f"{logs[pids.pop(pid)]}.exit").write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _write_to(log: str | Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)


def forked(
    theirs: Connection, ours: Connection, rank: int, size: int, seconds: int, log: Path, inherited: tuple[Task, Any]
) -> NoReturn:
    """Entry point of a fork: it has the caller's objects as they are."""
    ours.close()
    _write_to(log)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    import torch

    torch.set_num_threads(1)
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:  # autograd's threads did not survive the fork
        _reply(theirs, ("error", CANNOT_TRAVEL, pickle.dumps(CannotTravelError(CANNOT_TRAVEL))))
        os._exit(1)
    serve(theirs, rank, size, seconds, inherited)


def serve(conn: Connection, rank: int, size: int, seconds: int, inherited: tuple[Task, Any] | None) -> NoReturn:
    """Join the group, then answer tasks until the caller goes away."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    commands: queue.Queue[tuple[Any, ...]] = queue.Queue()
    threading.Thread(target=_read_commands, args=(conn, commands), daemon=True).start()
    try:
        _join_group(conn, commands, rank, size, seconds)
        _reply(conn, ("ok", None))
    except BaseException as error:
        _reply(conn, _failure(error))
        os._exit(1)
    while True:
        (path,) = commands.get()
        try:
            task, payload = inherited if path is None and inherited else load_task(path)
            answer: tuple[Any, ...] = ("ok", _resolve(task)(payload))
        except BaseException as error:
            answer = _failure(error)
        _reply(conn, answer)


def _read_commands(conn: Connection, commands: queue.Queue[tuple[Any, ...]]) -> None:
    """Watch the pipe all the time: a rank stuck in a collective must still end when the caller is gone."""
    while True:
        try:
            commands.put(pickle.loads(conn.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)


def _join_group(conn: Connection, commands: queue.Queue[tuple[Any, ...]], rank: int, size: int, seconds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = None
    if rank == 0:  # the store picks its own free port, so nobody can take it in between
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        _reply(conn, ("ok", store.port))
    (port,) = commands.get()
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def _resolve(task: Task) -> Callable[[Any], Any]:
    if not isinstance(task, str):
        return task
    module, _, name = task.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _reply(conn: Connection, message: tuple[Any, ...]) -> None:
    try:
        data = pickle.dumps(message)
    except Exception as error:
        data = pickle.dumps(_failure(error))
    try:
        conn.send_bytes(data)
    except OSError:
        os._exit(0)


def _failure(error: BaseException) -> tuple[Any, ...]:
    """("error", traceback text, the exception itself where it is one of ours and can travel)"""
    text = "".join(traceback.format_exception(error))
    try:
        return "error", text, pickle.dumps(error) if isinstance(error, AutotpError) else None
    except Exception:
        return "error", text, None


def ping(payload: object) -> None:
    """A collective: it ends only if all ranks are in step."""
    import torch.distributed as dist

    dist.barrier()
