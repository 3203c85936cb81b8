"""``autotp.export``: a model, sharded or not, as ordinary safetensors files, written one tensor at a time."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp import torch_hooks, weight_conversions
from autotp.checkpoint_state import settled
from autotp.checkpointing import finish_saving, mesh_of_model
from autotp.crew import crew_of
from autotp.errors import CheckpointError
from autotp.parts import Slot
from autotp.weight_files import safetensors_name

_LARGEST = 5_000_000_000  # bytes; what the hub's tools use


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Tensors of the model that become tensors of the files together, as these."""

    slots: Mapping[str, Slot]
    made: Mapping[str, Tensor]  # on meta


@torch.no_grad()
def export(
    model: nn.Module,
    folder: str | Path,
    *,
    max_file_bytes: int = _LARGEST,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
) -> Path:
    """Write the model's weights to a new folder, in the names and layouts of the unsharded model. All ranks call it.

    ``model.safetensors``, or several files with an index where they would be longer than ``max_file_bytes``. Of tied
    tensors one is written. A model of transformers gets the names and packing of its files, and its configuration:
    ``from_pretrained`` reads the folder. Every rank holds one whole tensor at a time (with what is packed with it in
    the files); rank 0 of the mesh writes. The folder appears when it is complete.

    Args:
        mesh, timeout: as in :func:`autotp.save`.

    Raises:
        AutotpError: on all ranks: one that did not call, died or could not write; a folder that holds something
            already; a parameter on meta; a dtype that safetensors has no name for.
    """
    mesh = mesh_of_model(model, mesh)
    target = Path(folder).expanduser().absolute()
    crew = crew_of(mesh, timeout, CheckpointError)
    finish_saving(crew)
    crew = crew.begin(f"autotp.export({str(target)!r})")
    part = target.parent / f".{target.name}.part"
    with crew.alive():

        def prepare() -> list[_Job]:
            if crew.leads and target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise CheckpointError(f"{target} holds something already: export to a new folder")
            return _jobs(model)

        jobs = crew.together("prepare", prepare)

        def commit(all_of: Mapping[int, None]) -> dict[int, None]:
            os.rename(part, target)
            return dict.fromkeys(all_of)

        try:
            crew.step("write", lambda: _write(model, jobs, part if crew.leads else None, max_file_bytes), commit)
        finally:
            if crew.leads:
                shutil.rmtree(part, ignore_errors=True)
    return target


def _jobs(model: nn.Module) -> list[_Job]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    slots: dict[str, Slot] = {}
    for slot in settled(model):
        if slot.tensor.is_meta:
            raise CheckpointError(
                f"{slot.name} is on meta: there are no values to write. Load or materialize them first"
            )
        name = next((n for n in slot.names if n not in tied), slot.name)
        safetensors_name(name, slot.tensor.dtype)
        if not left_out & set(slot.names):
            slots[name] = slot
    shapes = {n: torch.empty(s.tensor.shape, dtype=s.tensor.dtype, device="meta") for n, s in slots.items()}
    if not weight_conversions.concerns(model):
        return [_Job(slots={n: s}, made={n: shapes[n]}) for n, s in slots.items()]
    return [
        _Job(slots={n: slots[n] for n in names}, made=weight_conversions.reverted(model, {n: shapes[n] for n in names}))
        for names in _groups(model, shapes)
    ]


def _groups(model: nn.Module, shapes: Mapping[str, Tensor]) -> list[list[str]]:
    """Names that go into the files together: each by itself where that gives the same; else those of one module."""
    whole = _described(weight_conversions.reverted(model, shapes))
    for depth in (0, 1, 2):
        groups: dict[str, list[str]] = {}
        for name in shapes:
            groups.setdefault(name.rsplit(".", depth)[0], []).append(name)
        found = [weight_conversions.reverted(model, {n: shapes[n] for n in names}) for names in groups.values()]
        if (
            sum(map(len, found)) == len(whole)
            and {k: v for made in found for k, v in _described(made).items()} == whole
        ):
            return list(groups.values())
    return [list(shapes)]


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(t.shape) for key, t in tensors.items()}


def _write(model: nn.Module, jobs: Sequence[_Job], part: Path | None, largest: int) -> None:
    """Gather one job after the other; with a folder, write them. A failed write does not keep the others waiting."""
    failure: Exception | None = None
    files = _Files(jobs, largest)
    if part is not None:
        try:
            files.open(model, part)
        except Exception as error:
            failure = error
    for job in jobs:
        whole = {name: _whole(slot.tensor) for name, slot in job.slots.items()}
        if part is None or failure is not None:
            continue
        try:
            files.write(weight_conversions.reverted(model, whole) if weight_conversions.concerns(model) else whole, job)
        except Exception as error:
            failure = error
    files.close()
    if failure is not None:
        raise failure


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if torch_hooks.is_dtensor(tensor) else tensor.detach()


class _Files:
    """Which key lies in which file, and the files while they are written, one after the other."""

    def __init__(self, jobs: Sequence[_Job], largest: int) -> None:
        self.contents: list[dict[str, Tensor]] = []
        size = 0
        for job in jobs:
            added = sum(t.numel() * t.dtype.itemsize for t in job.made.values())
            if not self.contents or (size + added > largest and size):
                self.contents.append({})
                size = 0
            self.contents[-1].update(job.made)
            size += added
        self.names = ["model.safetensors"]
        if len(self.contents) > 1:
            count = len(self.contents)
            self.names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self.folder = Path()
        self.at = -1
        self.file: BinaryIO | None = None

    def open(self, model: Any, folder: Path) -> None:
        """Make the folder and what needs no weights."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        if weight_conversions.concerns(model):
            model.config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(folder)
        if len(self.names) > 1:
            where = {key: name for name, held in zip(self.names, self.contents, strict=True) for key in held}
            total = sum(t.numel() * t.dtype.itemsize for held in self.contents for t in held.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
            (folder / "model.safetensors.index.json").write_text(text)

    def write(self, made: Mapping[str, Tensor], job: _Job) -> None:
        """The tensors of one job, in the order in which their file announced them."""
        if self.at < 0 or next(iter(job.made), "") not in self.contents[self.at]:
            self._next()
        assert self.file is not None
        for key, announced in job.made.items():
            tensor = made[key].to("cpu").contiguous()
            if (tensor.shape, tensor.dtype) != (announced.shape, announced.dtype):
                raise CheckpointError(f"{key} is {list(tensor.shape)}, not {list(announced.shape)} as announced")
            size = tensor.numel() * tensor.dtype.itemsize
            if size:
                self.file.write((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))

    def _next(self) -> None:
        self.close()
        self.at += 1
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key, t in self.contents[self.at].items():
            start, end = end, end + t.numel() * t.dtype.itemsize
            name = safetensors_name(key, t.dtype)
            header[key] = {"dtype": name, "shape": list(t.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.file = open(self.folder / self.names[self.at], "wb")  # noqa: SIM115
        self.file.write(len(text).to_bytes(8, "little") + text)

    def close(self) -> None:
        """Flush the file that is being written to the disk."""
        if self.file is not None:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            finally:
                self.file.close()
                self.file = None
