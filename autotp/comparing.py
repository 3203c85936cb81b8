"""Compare a sharded model with its unsharded twin: state, names, cut share, agreement of ranks, first wrong module.

Gathering is collective: whether a value is there and how it is laid out is compared between ranks first, because a
rank that gathers alone would wait for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp import structures

Values = Mapping[str, Tensor | None]
INFINITE = float("inf")


def gathered(tensor: Tensor) -> Tensor:
    """The whole value, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> bool:
    """Whether this rank holds all of it."""
    return not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements)


def _layout(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    kind = f"DTensor {tensor.placements}" if isinstance(tensor, DTensor) else "whole"
    return f"{kind} {tuple(tensor.shape)} {tensor.dtype}"


def disagreement(values: Values, group: dist.ProcessGroup) -> str:
    """The first name whose presence, layout, shape or type is not the same on all ranks; else empty."""
    first, *others = _everyones({name: _layout(value) for name, value in values.items()}, group)
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                here, there = first.get(name, "absent"), other.get(name, "absent")
                return f"{name}: {here} on rank 0, {there} on rank {rank}"
    return ""


def _everyones(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shared_problems(problems: list[str], group: dist.ProcessGroup) -> list[str]:
    """The problems of all ranks; what only some of them see says so. Every rank must take the same way after it."""
    everyones = _everyones(problems, group)
    merged = []
    for text in dict.fromkeys(text for one in everyones for text in one):
        ranks = [rank for rank, one in enumerate(everyones) if text in one]
        everywhere = len(ranks) == len(everyones)
        merged.append(text if everywhere else f"{text} (only on rank {', '.join(map(str, ranks))})")
    return merged


def errors(expected: Values, actual: Values, group: dist.ProcessGroup) -> tuple[dict[str, float], list[str]]:
    """Per name: the difference relative to the largest expected value of all, worst rank; and what is in the way."""
    if text := disagreement(actual, group):
        return {text.partition(": ")[0]: INFINITE}, [f"ranks differ in {text}"]
    scale = structures.largest([t for t in expected.values() if t is not None]) or 1.0
    found = {}
    for name in [*expected, *(n for n in actual if n not in expected)]:
        found[name] = _error(expected.get(name), actual.get(name), scale)
    return _worst(found, group), []


def _error(expected: Tensor | None, actual: Tensor | None, scale: float) -> float:
    actual = None if actual is None else gathered(actual)
    if expected is None or actual is None:  # no gradient at all and a gradient of zero mean the same
        present = expected if actual is None else actual
        return 0.0 if present is None or not present.count_nonzero() else INFINITE
    return structures.difference(expected, actual) / scale


def _worst(found: dict[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    if not found:
        return found
    values = torch.tensor(list(found.values()), dtype=torch.float64, device=_device(group))
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return dict(zip(found, values.tolist(), strict=True))


def _device(group: dist.ProcessGroup) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def first_other(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """The first rank whose tensors are not, byte for byte, those of rank 0; 0 if there is none."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = _everyones(digest.hexdigest(), group)
    return next((rank for rank, other in enumerate(digests) if other != digests[0]), 0)


def spread(parts: Iterable[Values], group: dist.ProcessGroup) -> float:
    """How far the ranks are apart in the values that each has whole; each part relative to its largest value."""
    flat: list[Tensor] = []
    for part in parts:
        if disagreement(part, group):
            return INFINITE
        tensors = [local(t).detach() for t in part.values() if t is not None and whole(t)]
        tensors = [structures.real(t).double().reshape(-1) for t in tensors if structures.differentiable(t)]
        scale = structures.largest(tensors) or 1.0
        flat += [torch.nan_to_num(t / scale).clamp(-structures.HUGE, structures.HUGE) for t in tensors]
    if not flat:
        return 0.0
    high = torch.cat(flat)
    low = -high
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, dist.ReduceOp.MAX, group=group)
    return float((high + low).max()) if high.numel() else 0.0


def identity(model: nn.Module) -> dict[str, tuple[str, bool, str]]:
    """Name -> (first name of the same object, requires_grad, type) of parameters and buffers."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {n: (first.setdefault(id(t), n), t.requires_grad, str(t.dtype)) for n, t in named}


def state(model: nn.Module) -> dict[str, Tensor]:
    """All state, non-persistent buffers included."""
    found = {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict()}
    return {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of it."""
    return {name: value.clone() for name, value in state(model).items()}


def state_problems(before: dict[str, Tensor], model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Where the sharded model's gathered state is not the original, bit for bit."""
    now = state(model)
    problems = [f"state_dict lost {name}" for name in before if name not in now]
    problems += [f"state_dict has a new key {name}" for name in now if name not in before]
    if text := disagreement(now, group):
        return [*problems, f"ranks differ in {text}"]
    for name, old in before.items():
        if name not in now:
            continue
        new = gathered(now[name])
        if new.shape != old.shape or new.dtype != old.dtype:
            problems.append(f"{name}: was {_layout(old)}, is {_layout(new)} after sharding")
        elif structures.difference(old, new) != 0.0:
            problems.append(f"{name}: the gathered values are not the original ones")
    return problems


def cut_share(model: nn.Module) -> float:
    """Share of the bytes in parameters of two or more dims of which this rank holds only a part."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    total = sum(p.numel() * p.element_size() for p in matrices)
    cut = sum(p.numel() * p.element_size() for p in matrices if local(p).numel() < p.numel())
    return cut / total if total else 0.0


def first_bad_module(
    reference: nn.Module, sharded: nn.Module, run: Callable[[nn.Module], Any], limit: float, group: dist.ProcessGroup
) -> str:
    """The first module, in the order in which they finish, whose output is wrong; found by running both again."""
    expected, actual = _module_outputs(reference, run), _module_outputs(sharded, run)
    found: dict[str, float] = {}
    apart: dict[str, Values] = {}
    for name, old in expected.items():
        new = actual.get(name)
        if new is not None and old.shape == new.shape and old.dtype == new.dtype and not isinstance(new, DTensor):
            found[name] = structures.difference(old, new) / (structures.largest([old]) or 1.0)
            apart[name] = {name: new}
    if disagreement({name: expected[name] for name in found}, group):
        return ""
    bad = [name for name, error in _worst(found, group).items() if error > limit]
    # A sum that is still to be added up over the ranks has the right shape too; but then the ranks differ.
    certain = [name for name in bad if spread([apart[name]], group) <= limit]
    first = (certain or bad or [""])[0]
    return first.rpartition(" ")[0] or first


def _module_outputs(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """First float tensor that each call of each module returns, by "name call-number", in order of completion."""
    outputs: dict[str, Tensor] = {}
    calls: dict[str, int] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            tensors = [t for _, t in structures.named_tensors(output) if structures.differentiable(t)]
            if tensors:
                outputs[f"{name} {calls[name]}"] = tensors[0].detach().clone()

        return hook

    names = {name or type(module).__name__: module for name, module in model.named_modules()}
    handles = [module.register_forward_hook(hook_for(name)) for name, module in names.items()]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def last_reached(model: nn.Module, run: Callable[[nn.Module], Any], parameters: list[str]) -> str:
    """Of these parameters, the one whose module runs last: gradients go wrong from there backwards."""
    order = [key.rpartition(" ")[0] for key in _module_outputs(model, run)]
    place = {name: index for index, name in enumerate(order)}
    return max(parameters, key=lambda name: place.get(name.rpartition(".")[0], -1))
