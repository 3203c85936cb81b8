"""A folder of checkpoints, written and read by torch.distributed.checkpoint, one step at a time.

    folder/00000003/    the newest that is complete: .metadata and one .distcp file per rank
    folder/.00000004.part/    one that is being written, or was when its program ended

A checkpoint gets its number by one rename, after everything in it is on the disk: what has a number is complete.
The steps are those of torch's own `save` and `load`; the ranks meet between them as a :class:`Crew`, so that none waits
for ever.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

from autotp.crew import Crew
from autotp.errors import CheckpointError

_METADATA = ".metadata"


def numbered(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.name.isdecimal() and (p / _METADATA).is_file()]
    return sorted(found, key=lambda p: int(p.name))


def newest(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one in it."""
    if (path / _METADATA).is_file():
        return path
    if found := numbered(path):
        return found[-1]
    what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {what}: pass the folder that was given to autotp.save, or one checkpoint in it")


# ---- writing


def start(folder: Path) -> str:
    """Make room for a new checkpoint and return its number; what an ended program left half written is removed."""
    if (folder / _METADATA).is_file():
        raise CheckpointError(f"{folder} is itself a checkpoint: save into the folder around it, or into another one")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.part"):
        shutil.rmtree(left)
    number = 1 + max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=0)
    _part(folder, f"{number:08d}").mkdir()
    return f"{number:08d}"


def write(crew: Crew, state: dict[str, Any], folder: Path, keep: int) -> Path:
    """Write a state, every rank its own part; afterwards it is the newest checkpoint of the folder.

    Raises:
        AutotpError: on all ranks, if it failed on one; the folder then holds what it held before.
    """
    begun: list[str] = []
    try:
        with crew.alive():
            number = crew.step("start", lambda: None, lambda all_of: dict.fromkeys(all_of, start(folder)))
            begun.append(number)
            return _write(crew, state, folder, number, keep)
    except BaseException:
        if crew.leads and begun:
            shutil.rmtree(_part(folder, begun[0]), ignore_errors=True)
        raise


def _write(crew: Crew, state: dict[str, Any], folder: Path, number: str, keep: int) -> Path:
    writer = FileSystemWriter(_part(folder, number))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    described: list[Metadata] = []

    def plan() -> SavePlan:
        planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=crew.leads)
        writer.set_up_storage_writer(crew.leads, rank=crew.ranks.index(crew.rank), use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def deal(plans: Mapping[int, SavePlan]) -> Mapping[int, SavePlan]:
        dealt, metadata = planner.create_global_plan([plans[r] for r in crew.ranks])
        described.append(metadata)
        return dict(zip(crew.ranks, writer.prepare_global_plan(dealt), strict=True))

    mine = crew.step("plan", plan, deal)

    def put() -> Any:
        return writer.write_data(planner.finish_plan(mine), planner).value()

    def commit(results: Mapping[int, Any]) -> Mapping[int, Path]:
        writer.finish(described[0], [results[r] for r in crew.ranks])
        return dict.fromkeys(crew.ranks, _publish(folder, number, keep))

    return crew.step("write", put, commit)


def _publish(folder: Path, number: str, keep: int) -> Path:
    """Give a complete checkpoint its number, then remove those beyond `keep`."""
    part, final = _part(folder, number), folder / number
    _to_disk(part)
    os.rename(part, final)
    _to_disk(folder)
    for old in numbered(folder)[:-keep] if keep else []:
        gone = folder / f".{old.name}.part"  # a number is never one that is half removed
        os.rename(old, gone)
        shutil.rmtree(gone)
    return final


def _part(folder: Path, number: str) -> Path:
    return folder / f".{number}.part"


def _to_disk(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# ---- reading


class _Values(DefaultLoadPlanner):
    """Reads what is no tensor without running any code that it may hold."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def describe(checkpoint: Path) -> Metadata:
    """What a checkpoint holds; all of its files are there and as long as they must be.

    Raises:
        CheckpointError: names the file that is not.
    """
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{checkpoint / _METADATA} cannot be read: {type(error).__name__}: {error}") from error
    ends: dict[str, tuple[int, str]] = {}
    for index, place in metadata.storage_data.items():
        last = (place.offset + place.length, index.fqn)
        ends[place.relative_path] = max(ends.get(place.relative_path, (0, "")), last)
    for name, (end, key) in sorted(ends.items()):
        file = checkpoint / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"is truncated: {size} bytes, of {end}"
            raise CheckpointError(f"{file} {what} (it holds {key} among others){_instead(checkpoint)}")
    return metadata


def _instead(checkpoint: Path) -> str:
    others = [p for p in numbered(checkpoint.parent) if p != checkpoint]
    return f". {others[-1]} is there too: pass that path to resume from it" if others else ""


def read(checkpoint: Path, metadata: Metadata, state: dict[str, Any], keys: Sequence[str] = ()) -> dict[str, Any]:
    """Fill the tensors of `state` in place, each rank with its part, and return it; `keys` are values to add to it."""
    reader = FileSystemReader(checkpoint)
    planner = _Values(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted = {**state, **{key: io.BytesIO() for key in keys}}
    planner.set_up_planner(wanted, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan: LoadPlan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{checkpoint} cannot be read: {type(error).__name__}: {text}. A file in it is corrupted"
            f"{_instead(checkpoint)}"
        ) from error
    return planner.state_dict
