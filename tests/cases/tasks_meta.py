"""K33 and K37: models on meta, drawn or loaded; what each rank finds."""

from __future__ import annotations

import ctypes
import gc
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autotp
from autotp.comparing import local
from autotp.errors import AutotpError
from tests.harness.tasks import mesh_of

MIB = 1 << 20


class Block(nn.Module):
    """K33: an MLP, a norm, and two buffers that only the constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 64, 2) / 64), persistent=False)
        self.register_buffer("mask", torch.ones(16, 16).tril() == 0)

    def forward(self, x: Tensor) -> Tensor:
        """Turned by position, mixed over earlier positions, then the MLP."""
        length = x.shape[1]
        angles = torch.arange(length)[:, None] * self.inv_freq
        x = x * torch.cat([angles.cos(), angles.sin()], -1)
        scores = (x @ x.transpose(1, 2)).masked_fill(self.mask[:length, :length], float("-inf"))
        x = scores.softmax(-1) @ x
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Layers(nn.Module):
    """K37: 64 MiB, of which the embedding is half."""

    def __init__(self, depth: int = 8, width: int = 1024, rows: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        """Pairs of layers with a residual each."""
        x = self.embed(ids)
        for a, b in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + b(torch.relu(a(x)))
        return x


def drawn(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Build under meta, shard, draw; what is left on meta, what differs, and from what."""
    shape = tuple(payload["shape"])
    mesh: DeviceMesh = mesh_of(shape[0])
    if len(shape) == 2:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return None
    with torch.device("meta"):
        model = Block()
    autotp.shard(model, mesh, sample=torch.zeros(2, 6, 64))
    assert any(p.is_meta for p in model.parameters())
    autotp.materialize(model, seed=payload["seed"])
    torch.manual_seed(payload["seed"])
    expected = Block()
    parts: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        gathered: list[Any] = [None] * dist.get_world_size(mesh.get_group(mesh.ndim - 1))
        dist.all_gather_object(gathered, local(p).detach(), group=mesh.get_group(mesh.ndim - 1))
        parts[name] = gathered
    cut = {n for n, p in model.named_parameters() if local(p).numel() < p.numel()}
    whole = {n: p.full_tensor() for n, p in model.named_parameters()}
    x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1))
    return {
        "meta": [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta],
        "nan": [n for n, t in whole.items() if t.isnan().any()],
        "buffers": [n for n, b in model.named_buffers() if not torch.equal(b, expected.get_buffer(n))],
        "cut": sorted(cut),
        "twins": [n for n in cut if len(shape) == 1 and any(torch.equal(parts[n][0], p) for p in parts[n][1:])],
        "torn": [n for n in whole if n not in cut and any(not torch.equal(parts[n][0], p) for p in parts[n][1:])],
        "std": {n: float(t.std()) for n, t in whole.items() if t.dim() == 2},
        "unlike": [n for n, t in whole.items() if not torch.equal(t, expected.get_parameter(n))],
        "error": float((model(x) - expected(x)).abs().max()),
        "values": {n: t.tolist() for n, t in whole.items() if t.dim() == 1},
    }


# ---------------------------------------------------------------- K37


def peak_of(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` returns, and by how many bytes it raised the resident memory of this process at most."""
    if sys.platform != "linux":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return run(), float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, so that using it again counts
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    result = run()
    return result, _status("VmHWM") - before


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def _files(folder: Path) -> Path:
    torch.manual_seed(0)
    state = Layers().state_dict()
    names = sorted(state)
    save_file({n: state[n] for n in names if "embed" in n}, folder / "a.safetensors")
    save_file({n: state[n] for n in names if "embed" not in n}, folder / "b.safetensors")
    return folder


def loaded(payload: dict[str, Any]) -> dict[str, Any]:
    """Load sharded, and measure; `whole` reads the files as a whole instead, as a check of the measurement."""
    made = [_files(Path(tempfile.mkdtemp())) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, 0)
    folder: Any = made[0]
    mesh = mesh_of(4)
    ids = torch.arange(6).view(1, 6)
    with torch.device("meta"):
        model, other = Layers(), Layers()
    autotp.shard(other, mesh, sample=ids)  # what it imports is not what loading needs
    _, peak = peak_of(lambda: autotp.load(model, folder, mesh, sample=ids))
    whole, plain = peak_of(lambda: {k: v.clone() for f in sorted(folder.iterdir()) for k, v in load_file(f).items()})
    wrong = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), whole[n])]
    sizes = {n: local(p).numel() * p.element_size() for n, p in model.named_parameters()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {
        "wrong": wrong,
        "peak": peak / MIB,
        "plain": plain / MIB,
        "local": sum(sizes.values()) / MIB,
        "largest": max(p.numel() * p.element_size() for p in model.parameters()) / MIB,
    }


def misfit(payload: dict[str, Any]) -> str:
    """The error of files in which one tensor is changed."""
    mesh = mesh_of(2)
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    state = Layers(2, 16, 32).state_dict()
    value = payload["value"]
    if value is None:
        del state[payload["key"]]
    else:
        state[payload["key"]] = torch.ones(value)
    save_file(state, folder / "model.safetensors")
    with torch.device("meta"):
        model = Layers(2, 16, 32)
    if mesh.get_coordinate() is None:
        return ""
    try:
        autotp.load(model, folder, mesh, sample=torch.arange(6).view(1, 6), **payload.get("options", {}))
    except AutotpError as error:
        return str(error)
    finally:
        shutil.rmtree(folder)
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    return f"loaded; on meta: {', '.join(meta) or 'nothing'}"
