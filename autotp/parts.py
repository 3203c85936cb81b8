"""Which part of a tensor this rank holds, and how it gets its values.

A parameter is filled in place: the object stays, so that ties, optimizers, FSDP2 and the user's own references go on
pointing at it. That is also how ``nn.Module.to_empty`` treats ``DTensor``s.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autotp import torch_hooks
from autotp.stored import Want
from autotp.torch_compat import chunks_here, dtensor_spec, local_of, wrap_local

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # names that wrappers put in, and state dicts leave out


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One tensor of a model with every name it goes by and every place it is held in."""

    tensor: Tensor
    parameter: bool
    names: list[str] = field(default_factory=list)
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def slots(model: nn.Module, *, persistent: bool = True) -> list[Slot]:
    """The parameters and buffers of a model, tied ones once; with `persistent`, those that a state dict holds."""
    found: dict[int, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        skipped = module._non_persistent_buffers_set if persistent else ()
        held = [(n, p, True) for n, p in module._parameters.items()]
        held += [(n, b, False) for n, b in module._buffers.items() if n not in skipped]
        for name, tensor, parameter in held:
            if tensor is None:
                continue
            slot = found.setdefault(id(tensor), Slot(tensor=tensor, parameter=parameter))
            slot.names.append(_plain(f"{path}.{name}" if path else name))
            slot.holders.append((module, name))
    return list(found.values())


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def held(tensor: Tensor) -> Want:
    """The index ranges of every dim that this rank holds of a parameter or buffer; None where it holds all."""
    if not torch_hooks.is_dtensor(tensor):
        return (None,) * tensor.dim()
    chunks = chunks_here(tensor)
    shape, local = tuple(tensor.shape), tuple(local_of(tensor).shape)
    want: list[list[tuple[int, int]] | None] = []
    for dim, (size, here) in enumerate(zip(shape, local, strict=True)):
        ranges = list(dict.fromkeys((offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in chunks))
        ranges = [(a, b) for a, b in ranges if b > a]
        assert sum(b - a for a, b in ranges) == here, f"{chunks} is not a local part of {local}"
        want.append(None if ranges == [(0, size)] else ranges)
    return tuple(want)


def pieces(full: Tensor, want: Want) -> Tensor:
    """The wanted part of a tensor that is there as a whole, as a new contiguous tensor."""
    for dim, ranges in enumerate(want):
        if ranges is not None:
            cut = [full.narrow(dim, a, b - a) for a, b in ranges] or [full.narrow(dim, 0, 0)]
            full = cut[0] if len(cut) == 1 else torch.cat(cut, dim)
    return full.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def fill(slot: Slot, local: Tensor, device: str) -> None:
    """Give a tensor its values on this rank. One on meta is replaced by a real one, in place."""
    old = slot.tensor
    target = local_of(old) if torch_hooks.is_dtensor(old) else old
    if not target.is_meta:
        target.detach().copy_(local)
        return
    local = local.to(device)
    if local.stride() != target.stride() or local.dtype != target.dtype:
        local = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=device).copy_(local)
    new = wrap_local(local, dtensor_spec(old)) if torch_hooks.is_dtensor(old) else local
    if slot.parameter:
        parameter = nn.Parameter(new, requires_grad=old.requires_grad)
        torch_hooks.move_attachments(old, parameter)
        if weakref.getweakrefs(old):
            _replace(slot, parameter)  # recurrent layers: torch swaps no tensor that is referred to weakly
        else:
            torch.utils.swap_tensors(old, parameter)
        return
    for module, name in slot.holders:
        module._buffers[name] = new


def _replace(slot: Slot, new: nn.Parameter) -> None:
    for module, name in slot.holders:
        module._parameters[name] = new
        for value in module.__dict__.values():
            for i, x in enumerate(value if type(value) is list else ()):
                if x is slot.tensor:
                    value[i] = new
                elif isinstance(x, weakref.ref) and x() is slot.tensor:
                    value[i] = weakref.ref(new)
