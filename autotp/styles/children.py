"""Modules that come into a model after it was sharded."""

from __future__ import annotations

from torch import nn

from autotp import torch_hooks
from autotp.errors import AutotpError

_CHILDREN = "_autotp_children"  # copied with the module


def note_children(module: nn.Module) -> None:
    """Take note of the children that a module is sharded with."""
    module.__dict__[_CHILDREN] = tuple(module._modules.values())


def check_children(path: str, module: nn.Module) -> None:
    """Children put in since then may wrap what was there, and may not compute with weights of their own."""
    now = tuple(module._modules.values())
    if now == module.__dict__.get(_CHILDREN, ()):
        return
    for name, child in module._modules.items():
        for inner, p in child.named_parameters() if child is not None else ():
            if not torch_hooks.is_dtensor(p):
                raise AutotpError(
                    f"{f'{path}.{name}.{inner}'.lstrip('.')} {list(p.shape)} was added after sharding, where each rank "
                    "works on its part of the tensors, and is whole. Add adapters before autotp.shard"
                )
    note_children(module)
