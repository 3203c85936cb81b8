"""Ranks that die, hang, raise or are elsewhere while the others wait: what tests/exact/test_lost_ranks.py starts.

    python -m tests.exact.lost_ranks_tasks FOLDER

Torch is imported once; then all scenarios run at the same time, each on forked processes that form a group of their
own. What a rank is told goes to FOLDER/SCENARIO-RANK.json.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.rank_process import loopback

TIMEOUT, LONG = 6.0, 13.0


class Layers(nn.Module):
    """Residual layers of two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


X = torch.ones(4, 16)
_began: list[float] = []  # when what was well ended


def sharded(*shape: int) -> Layers:
    """On a mesh of this shape, after a step that went well. From then on the time limit is TIMEOUT on every axis."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    model = Layers()
    autotp.shard(model, mesh, sample=X)
    model(X).sum().backward()
    dist.barrier()
    for axis in range(mesh.ndim):
        dist.set_timeout(timedelta(seconds=TIMEOUT), mesh.get_group(axis))
    _began.append(time.monotonic())
    return model


def dies_in_forward(rank: int) -> None:
    """Rank 2 of 4 ends in the middle of a forward."""
    model = sharded(4)
    if rank == 2:
        model.layers[1].register_forward_pre_hook(lambda *_: os._exit(7))
    model(X)


def hangs(rank: int) -> None:
    """Rank 1 does not come in time."""
    model = sharded(2)
    if rank == 1:
        loads_data(LONG)
    model(X)


def loads_data(seconds: float) -> None:
    """Takes long."""
    time.sleep(seconds)


def raises(rank: int) -> None:
    """Rank 1 raises in its forward."""
    model = sharded(2)
    if rank == 1:
        model.layers[1].register_forward_pre_hook(refuse)
    with autotp.roll_call():
        model(X)


def refuse(*_: Any) -> None:
    """As code of users does."""
    raise LookupError("no such token: 7")


def ran_less_often(rank: int) -> None:
    """Rank 1 makes two forwards and goes on with something else."""
    model = sharded(2)
    for _ in range(3 - rank):
        model(X)
    if rank == 1:
        loads_data(LONG)


def killed_in_backward(rank: int) -> None:
    """Rank 1 is killed while gradients are computed."""
    model = sharded(2)
    if rank == 1:
        model.layers[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model(X.clone().requires_grad_()).sum().backward()


def dies_on_two_axes(rank: int) -> None:
    """Rank 3 of 2 x 2 ends; rank 1 waits for it in a collective of FSDP2, rank 0 for rank 1 and 2."""
    model = sharded(2, 2)
    if rank == 3:
        os._exit(7)
    with autotp.roll_call():
        for _ in range(3):
            model(X).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def hangs_on_two_axes(rank: int) -> None:
    """Rank 1 of 2 x 2 does not come in time; rank 3 waits for it in a collective of FSDP2, rank 2 for rank 3."""
    model = sharded(2, 2)
    if rank == 1:
        loads_data(LONG)
    with autotp.roll_call():
        model(X).sum().backward()


def not_sharded(rank: int) -> None:
    """Rank 1 does not call autotp.shard."""
    if rank == 0:
        mesh = init_device_mesh("cpu", (2,))
        dist.set_timeout(timedelta(seconds=TIMEOUT), mesh.get_group())
        autotp.shard(Layers(), mesh, sample=X)
    else:
        time.sleep(LONG)


SCENARIOS: dict[Callable[[int], None], int] = {
    dies_in_forward: 4,
    hangs: 2,
    raises: 2,
    ran_less_often: 2,
    killed_in_backward: 2,
    dies_on_two_axes: 4,
    hangs_on_two_axes: 4,
    not_sharded: 2,
}


def as_rank(scenario: Callable[[int], None], rank: int, size: int, port: int, folder: Path) -> None:
    """Be one rank of a scenario."""
    faulthandler.enable()
    torch.set_num_threads(1)  # not before the fork: torch's thread pool does not survive it
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    told: dict[str, Any] = {}
    _began[:] = [time.monotonic()]
    try:
        scenario(rank)
    except Exception as error:
        told = {"error": str(error), "kind": type(error).__name__, "ranks": getattr(error, "ranks", [])}
    told["seconds"] = time.monotonic() - _began[-1]
    (folder / f"{scenario.__name__}-{rank}.json").write_text(json.dumps(told))


def host_stores(ports: int) -> None:
    """Hold the stores of all scenarios, in a process that no fault concerns; writes their ports."""
    stores = [dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False) for n in SCENARIOS.values()]
    os.write(ports, json.dumps([store.port for store in stores]).encode())
    os.close(ports)
    signal.pause()


def forked(function: Callable[..., None], *args: Any) -> int:
    """Run it in a child; its number."""
    child = os.fork()
    if child:
        return child
    try:
        function(*args)
    finally:
        os._exit(0)


def main(folder: Path) -> None:
    """Run all scenarios; returns when every rank has ended."""
    os.environ.update(GLOO_SOCKET_IFNAME=loopback(), TORCH_CPP_LOG_LEVEL="ERROR")
    autotp.plan(Layers(), tp=2, sample=X)  # whatever it imports is there before the forks
    reading, writing = os.pipe()
    host = forked(host_stores, writing)
    ports = json.loads(os.read(reading, 4096))
    sizes = zip(SCENARIOS.items(), ports, strict=True)
    children = [
        forked(as_rank, scenario, rank, size, port, folder) for (scenario, size), port in sizes for rank in range(size)
    ]
    for child in children:
        os.waitpid(child, 0)
    os.kill(host, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
