"""Example inputs: the user's own in any of the accepted forms, or inferred for any module.

Only shapes and dtypes matter to a plan, and integers steer the model's Python, so samples are tiny: two sequences of
seven tokens, the smallest image that runs.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotp import input_roles
from autotp.errors import InputError
from autotp.input_guesses import guesses
from autotp.sample_spec import format_sample, parse_sample

__all__ = ["Attempt", "Sample", "format_sample", "infer", "normalize", "parse_sample", "resolve", "second_opinion"]

Sample = tuple[tuple[Any, ...], dict[str, Any]]
Attempt = Callable[[tuple[Any, ...], dict[str, Any]], Exception | None]

MAX_ATTEMPTS = 200
_FORMS = "(args, kwargs), a dict of keyword inputs, a tensor, or a tuple or list of positional inputs"


def resolve(model: nn.Module, sample: Any, attempt: Attempt) -> Sample:
    """`sample` in the form (args, kwargs), checked against `model.forward`; inferred where it is None."""
    if sample is None:
        return infer(model, attempt)
    args, kwargs = normalize(sample)
    _check_binding(model, args, kwargs)
    return args, kwargs


def normalize(sample: Any) -> Sample:
    """Bring what a user may pass as `sample` into the form (args, kwargs).

    Raises:
        InputError: if it is none of the accepted forms.
    """
    if isinstance(sample, Tensor):
        return (sample,), {}
    if isinstance(sample, Mapping):
        if bad := [key for key in sample if not isinstance(key, str)]:
            raise InputError(f"sample: a dict of inputs needs parameter names as keys; {bad[0]!r} is not one.")
        return (), dict(sample)
    if not isinstance(sample, (tuple, list)):
        raise InputError(f"sample: got {type(sample).__name__}; it must be {_FORMS}.")
    if len(sample) == 2 and isinstance(sample[1], Mapping):
        args, kwargs = sample
        if not isinstance(args, (tuple, list)):
            raise InputError(
                f"sample: got ({type(args).__name__}, dict); write positional inputs as a tuple: ((x,), {{...}})."
            )
        return tuple(args), normalize(kwargs)[1]
    if not any(isinstance(part, Tensor) for part in sample):
        inside = ", ".join(type(part).__name__ for part in sample) or "nothing"
        raise InputError(f"sample: got a {type(sample).__name__} of {inside}; it must be {_FORMS}.")
    return tuple(sample), {}


def infer(model: nn.Module, attempt: Attempt) -> Sample:
    """The first guess with which `attempt` runs the model's forward.

    Args:
        model: any module; its parameters may be on meta.
        attempt: runs the forward on a twin without data, and returns None or the exception.

    Raises:
        InputError: naming the parameters of the forward, the failures, and the call that works.
    """
    if type(model).forward is nn.Module.forward or not callable(getattr(model, "forward", None)):
        raise InputError(f"{type(model).__name__} has no forward of its own. Plan the module that is called.")
    failures: dict[str, str] = {}
    for args, kwargs in guesses(model):
        shown = format_sample(args, kwargs)
        if shown in failures:
            continue
        error = attempt(args, kwargs)
        if error is None:
            return args, kwargs
        failures[shown] = _short(error)
        if len(failures) >= MAX_ATTEMPTS:
            break
    raise InputError(_not_found(model, failures))


def second_opinion(args: tuple[Any, ...], kwargs: dict[str, Any], attempt: Attempt | None = None) -> Sample:
    """The same inputs with one more in the batch and two more tokens, where that is plausible.

    Args:
        args: positional inputs of a sample that runs.
        kwargs: keyword inputs of it.
        attempt: as in `infer`; then only a variant that runs is returned, and the sample itself if none does.
    """
    tensors = [v for v in _leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim()]
    batch = tensors[0].shape[0] if tensors and len({t.shape[0] for t in tensors}) == 1 else None
    lengths = {t.shape[1] for t in tensors if _has_length(t)} - {batch}
    for grow_batch, grow_length in ((1, 2), (1, 0), (0, 2)):
        resized = {n: n + grow_length for n in lengths} if grow_length else {}
        if not (batch and grow_batch) and not resized:
            continue
        bigger = _map((args, kwargs), partial(_resize, batch=batch if grow_batch else None, lengths=resized))
        if attempt is None or attempt(*bigger) is None:
            return bigger
    return args, kwargs


def longer(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> Sample:
    """The same inputs with at least so many tokens: shorter ones are repeated from the start."""
    tensors = [v for v in _leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim()]
    lengths = {t.shape[1] for t in tensors if _has_length(t)}
    resized = {n: n + tokens for n in lengths if n < tokens}
    return _map((args, kwargs), partial(_resize, batch=None, lengths=resized)) if resized else (args, kwargs)


def _has_length(tensor: Tensor) -> bool:
    """Ids (batch, length) and features (batch, length, width) have one; images and plain feature rows do not."""
    return tensor.dim() == 3 if tensor.is_floating_point() else tensor.dim() == 2


def _resize(tensor: Tensor, batch: int | None, lengths: dict[int, int]) -> Tensor:
    """Repeat rows and tokens from the start, so that the content stays of the same kind."""
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        wanted = size
        if dim == 0 and size == batch:
            wanted = size + 1
        elif _grows(tensor, dim):
            wanted = lengths.get(size, size)
        if wanted != size:
            tensor = tensor.index_select(dim, (torch.arange(wanted) % size).to(tensor.device))
    return tensor


def _grows(tensor: Tensor, dim: int) -> bool:
    return dim == 1 and tensor.dim() == 3 if tensor.is_floating_point() else not (dim == 2 and tensor.dim() == 3)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(value, change) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [_map(value, change) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return change(tree) if isinstance(tree, Tensor) and tree.dim() else tree


def _check_binding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = list(signature.parameters)
        near = [m for key in kwargs if key not in names for m in difflib.get_close_matches(key, names, n=1)]
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise InputError(
            f"sample: {error} for {type(model).__name__}.forward({_signature(model)}).{hint} "
            f"The sample given was {format_sample(args, kwargs) or 'empty'}."
        ) from None


def _signature(model: nn.Module) -> str:
    """Parameter names of the forward, the optional ones marked."""
    found = input_roles.parameters(model)
    return ", ".join(p.name if p.default is p.empty else f"{p.name}=..." for p in found) or "*args"


def _not_found(model: nn.Module, failures: dict[str, str]) -> str:
    found = input_roles.parameters(model)
    needed = input_roles.required(found) or [p.name for p in found[:1]] or ["x"]
    call = ", ".join(f'"{name}": torch.randn(2, 7, 64)' for name in needed)
    by_error: dict[str, str] = {}
    for shown, error in failures.items():
        by_error.setdefault(error, shown)
    lines = [f"  {shown}  ->  {error}" for error, shown in list(by_error.items())[:6]]
    more = f"\n  and {len(by_error) - 6} other failures" if len(by_error) > 6 else ""
    tried = f" {len(failures)} guesses were tried:\n" + "\n".join(lines) + more if failures else ""
    return (
        f"No example inputs could be inferred for {type(model).__name__}.forward({_signature(model)}).{tried}\n"
        f"Pass inputs with which it runs (only shapes and dtypes matter), for example\n"
        f"  autotp.plan(model, tp=2, sample={{{call}}})"
    )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:117] + '...' if len(text) > 120 else text}"
