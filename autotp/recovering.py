"""The constructor of a module that somebody else built, found in what the module has kept.

Its class is called again with the arguments that it has kept as attributes, and what comes out is taken only if it is
the same module in every respect that can be seen. An argument that was not kept must show in the module: it is varied,
and if nothing else changes with it, the module could have been built with another value, and is not rebuilt.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autotp import meta_build

Constructor = Callable[[], nn.Module]

_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_INTERNAL = set(nn.Module().__dict__)


def copied(arguments: Any) -> Any:
    """A copy, so that neither the caller nor a constructor changes what the next one gets, where one can be made."""
    try:
        return copy.deepcopy(arguments)
    except Exception:  # the arguments' own code, or a process group
        return arguments


def recovered(module: nn.Module, *, values: bool) -> Constructor | None:
    """The class of a module with the arguments it was built with, if these can be told.

    With `values`, starting values of parameters must be certain too, otherwise only those of buffers.
    """
    cls = class_of(module)
    found = _arguments(module, cls)
    if found is None:
        return None
    known, unknown = found
    default = torch.get_default_dtype()
    dtypes = [default, *(p.dtype for p in module.parameters() if p.dtype.is_floating_point and p.dtype != default)]
    # Built with another default dtype; or built as now, and moved to another dtype afterwards.
    for dtype, same_dtypes in (*((dtype, True) for dtype in dict.fromkeys(dtypes)), (default, False)):

        def construct(dtype: torch.dtype = dtype, **changed: Any) -> nn.Module:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                made: nn.Module = cls(**copied(known), **changed)
            finally:
                torch.set_default_dtype(before)
            return made

        rebuilt = _built(construct)
        if rebuilt is not None and _alike(rebuilt, module, same_dtypes):
            certain = all(_shows(construct, rebuilt, n, v, values) for n, v in unknown.items())
            return construct if certain else None
    return None


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module before fully_shard gave it another."""
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


def _arguments(module: nn.Module, cls: type) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Arguments of a class that a module has kept, and those that are left at their defaults; None if one is lost."""
    modeling = sys.modules.get("transformers.modeling_utils")
    by_config = modeling is not None and isinstance(module, modeling.PreTrainedModel)
    known: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    if inspect.signature(cls) == inspect.signature(nn.Module):
        return known, unknown
    for name, p in list(inspect.signature(cls).parameters.items()):
        if name in module.__dict__ and not isinstance(module.__dict__[name], (Tensor, nn.Module)):
            known[name] = module.__dict__[name]
        elif name in module._parameters and isinstance(p.default, bool):
            known[name] = module._parameters[name] is not None
        elif by_config and (p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)):
            continue  # transformers builds its models from their config alone
        elif p.default is p.empty:
            return None
        elif name not in ("device", "dtype") or p.default is not None:
            unknown[name] = p.default
    return known, unknown


def _built(construct: Constructor) -> nn.Module | None:
    try:
        return meta_build.build(construct)
    except Exception:  # the user's constructor, with arguments that are a guess
        return None


def _shows(construct: Any, rebuilt: nn.Module, name: str, default: Any, values: bool) -> bool:
    """Whether another value of an argument would have made a module that looks different.

    Only numbers are varied: a flag like ``pretrained`` may do anything.
    """
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return False
    for other in (default * 2, default + 1) if default else (default + 1,):
        varied = _built(lambda other=other: construct(**{name: other}))  # type: ignore[misc]
        if varied is not None:
            return not _alike(varied, rebuilt, True) or (not values and _same_buffers(varied, rebuilt))
    return False


def _same_buffers(a: nn.Module, b: nn.Module) -> bool:
    return all(
        x.is_meta == y.is_meta and (x.is_meta or torch.equal(x, y))
        for x, y in zip(a.buffers(), b.buffers(), strict=True)
    )


def _alike(made: nn.Module, model: nn.Module, same_dtypes: bool) -> bool:
    """Same classes, parameters and buffers; and what plain attributes `made` has, `model` has too."""
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (made, model))
    return list(ours) == list(theirs) and all(_alike_alone(ours[p], theirs[p], same_dtypes) for p in ours)


def _alike_alone(made: nn.Module, model: nn.Module, same_dtypes: bool) -> bool:
    def described(x: Tensor | None) -> Any:
        return x if x is None else (tuple(x.shape), x.dtype if same_dtypes else None)

    for ours, theirs in ((made._parameters, model._parameters), (made._buffers, model._buffers)):
        if {n: described(x) for n, x in ours.items()} != {n: described(x) for n, x in theirs.items()}:
            return False
    kept = {n: v for n, v in made.__dict__.items() if n not in _INTERNAL and _is_plain(v)}
    return class_of(made) is class_of(model) and all(n in model.__dict__ and model.__dict__[n] == kept[n] for n in kept)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)
