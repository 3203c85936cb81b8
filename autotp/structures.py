"""Tensors inside the inputs and outputs of any model: lists, dicts, dataclasses and what is nested in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

HUGE = 1e30  # masked logits and the like: beyond this a value means "never"


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in an output; opaque objects such as caches are passed over."""
    if isinstance(value, Tensor):
        yield path or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            yield from named_tensors(item, f"{path}.{field.name}" if path else field.name)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_tensors(getattr(value, name), change) for name in names})
    return value


def real(tensor: Tensor) -> Tensor:
    """Complex values as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def differentiable(tensor: Tensor) -> bool:
    """Whether gradients can flow through it."""
    return tensor.is_floating_point() or tensor.is_complex()


def weighted_sum(output: Any) -> Tensor | None:
    """One number from any output, with a fixed weight per element: a plain sum hides errors behind a norm."""
    total = None
    for _, tensor in named_tensors(output):
        if not differentiable(tensor) or not tensor.numel():
            continue
        flat = real(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).reshape(-1)
        flat = torch.where(flat.abs() < HUGE, flat, torch.zeros_like(flat))
        index = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
        part = (flat * (1 + torch.cos(0.37 * index + 0.1))).sum()
        total = part if total is None else total + part
    return total


def largest(tensors: list[Tensor]) -> float:
    """The largest absolute value that is a number and not huge; 0 if there is none."""
    best = 0.0
    for tensor in tensors:
        if tensor.numel() and differentiable(tensor):
            size = real(tensor.detach()).abs().double()
            size = torch.where(size < HUGE, size, torch.zeros_like(size))
            best = max(best, float(size.max()))
    return best


def difference(reference: Tensor, other: Tensor) -> float:
    """The largest absolute difference; infinite where shapes or not-a-numbers do not match."""
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return float("inf")
    if not reference.numel():
        return 0.0
    if not differentiable(reference):
        return 0.0 if torch.equal(reference, other) else float("inf")
    a, b = real(reference.detach()).double(), real(other.detach()).double()
    same = (a == b) | (a.isnan() & b.isnan()) | ((a.abs() >= HUGE) & (b.abs() >= HUGE) & (a.sign() == b.sign()))
    gap = torch.where(same, torch.zeros_like(a), (a - b).abs())
    return float(torch.nan_to_num(gap, nan=float("inf")).max())
