"""Tasks on their way to other processes: a function and its payload in one file.

Pickle stores classes and functions by reference, and another process has no `__main__` of the caller's. What is
defined there travels by value if cloudpickle is installed, and else not at all.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

from autotp.errors import AutotpError

Task = str | Callable[[Any], Any]


class CannotTravelError(AutotpError):
    """An object that cannot be pickled, so that no other process can be given it."""

    default_code: ClassVar[str] = "TP-PICKLE"


class _ByReference(pickle.Pickler):
    """A pickler that refuses what only the running script or notebook knows."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in the running script or notebook")
        return NotImplemented


def save_task(task: Task, payload: Any, path: Path) -> None:
    """Write both to `path`."""
    try:
        _save(task, payload, path, SimpleNamespace(Pickler=_ByReference, __name__="pickle"))
    except Exception as error:
        if importlib.util.find_spec("cloudpickle") is None:
            raise CannotTravelError(f"cannot be handed to another process: {error}") from error
        _save_by_value(task, payload, path)


def _save_by_value(task: Task, payload: Any, path: Path) -> None:
    cloudpickle = importlib.import_module("cloudpickle")
    try:
        _save(task, payload, path, cloudpickle)
    except Exception as error:
        raise CannotTravelError(f"cannot be handed to another process: {error}") from error


def _save(task: Task, payload: Any, path: Path, pickle_module: Any) -> None:
    import torch

    torch.save((task, payload), path, pickle_module=pickle_module)


def load_task(path: str) -> tuple[Task, Any]:
    """What `save_task` wrote; local ranks compute on the CPU."""
    import torch

    task, payload = torch.load(path, weights_only=False, map_location="cpu")
    return task, payload
