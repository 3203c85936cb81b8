"""Planning on one rank for all of them, for tests of what comes after it.

Planning is most of the time that a rank needs for a small model, and every rank plans the same; that they do is what
other tests show. Here the first rank of a tensor-parallel group plans and sends what it made. Ranks have the same
modules, so that most of it travels by name; code objects, which places in the code are told by, are sent as they are:
a copy is equal to the original. What cannot be sent, and what fails, is planned by every rank as ever. Not for models
that are compiled: while torch.compile traces, a copy of a code object is not found.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, GetSetDescriptorType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh

from autotp import generation, sharding
from autotp.mesh import resolve_mesh
from autotp.record import Traced
from autotp.torch_hooks import no_modes


@contextmanager
def planned_once(mesh: DeviceMesh) -> Iterator[list[Any]]:
    """In it the first rank of a tensor-parallel group plans, for ``shard`` and ``generate``, and all get what it made.

    All ranks must make the same calls. Yields what was made, in order.
    """
    if isinstance(sharding.prepare, _Once):
        yield sharding.prepare.found
        return
    found: list[Any] = []
    with (
        patch.object(sharding, "prepare", _Once(sharding.prepare, mesh, found)),
        patch.object(generation, "plan_generate", _Once(generation.plan_generate, mesh, found)),
    ):
        yield found


@dataclass(frozen=True)
class _Once:
    make: Callable[..., Any]
    mesh: DeviceMesh
    found: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = self.mesh.get_group(resolve_mesh(self.mesh).tp_name if self.mesh.ndim > 1 else None)
        first, own, sent = dist.get_global_rank(group, 0), None, [b""]
        if dist.get_rank() == first:
            try:
                own = self.make(*args, **kwargs)
                sent = [packed(own)]
            except Exception:
                pass  # every rank plans by itself, and says what is wrong
        with no_modes():
            dist.broadcast_object_list(sent, first, group)
        if own is None:
            own = pickle.loads(sent[0]) if sent[0] else self.make(*args, **kwargs)
        self.found.append(own)
        return own


def packed(made: Any) -> bytes:
    """What another process with the same modules can unpickle.

    Raises:
        Exception: something in it cannot be sent.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(made)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, Traced):
            return _traced, (x.size(), x.stride(), x.dtype)
        if isinstance(x, CodeType):
            return marshal.loads, (marshal.dumps(x),)
        if isinstance(x, OpOverload):
            return getattr, (x.overloadpacket, x._overloadname)
        if isinstance(x, OpOverloadPacket):
            return _packet, tuple(x._qualified_op_name.split("::"))
        if isinstance(x, GetSetDescriptorType):
            return getattr, (x.__objclass__, x.__name__)
        if isinstance(x, FunctionType) and "<locals>" in x.__qualname__:  # torch makes some, and names them anew
            module = sys.modules.get(x.__module__)
            return (getattr, (module, x.__name__)) if getattr(module, x.__name__, None) is x else NotImplemented
        if isinstance(x, ModuleType):
            return importlib.import_module, (x.__name__,)
        return NotImplemented


def _traced(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Traced:
    return Traced(torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def _packet(namespace: str, name: str) -> OpOverloadPacket:
    return getattr(getattr(torch.ops, namespace), name)  # type: ignore[no-any-return]
