"""What a run on real values says where a run on shapes can only guess: numbers, lengths and branches that are computed.

A sample is there to say which path will run. Where the model's code reads a computed value (``if x.max() > 0``, a
length that it predicts), the model is run once on the sample as it is, without gradients, and what that run gives is
what the recorded run reads. Indices of the largest (``topk``) stay plausible ones, which reach all experts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import plausible, structures, torch_hooks, torch_ops
from autotp.trees import flatten

SEED = 0  # all ranks must hear the same
_READ = torch.ops.aten._local_scalar_dense.default


@dataclass
class Heard:
    """The values that a real run gave, in order."""

    events: list[tuple[Any, tuple[int, ...], Any]]
    at: int = 0

    def next(self, call: int, turn: int, func: Any, shape: tuple[int, ...]) -> Any:
        """The next value, or None from the first one on that another operation gave: then the paths differ."""
        if self.at >= len(self.events) or self.events[self.at][:2] != (func, shape):
            self.at = len(self.events)
            return None
        self.at += 1
        return self.events[self.at - 1][2]


@dataclass
class Known:
    """The values that an earlier recorded run used, by the call in which it did."""

    values: dict[int, list[Any]]

    def next(self, call: int, turn: int, func: Any, shape: tuple[int, ...]) -> Any:
        """The value at this place, if it has this shape; a call may be tried several times."""
        values = self.values.get(call, [None])
        value = values[turn % len(values)]
        return value if not isinstance(value, Tensor) or tuple(value.shape) == shape else None


@dataclass
class Asking:
    """What a recorded run asks, and which guesses the model's code has read."""

    source: Heard | Known | None = None
    used: dict[int, list[Any]] = field(default_factory=dict)
    guesses: dict[int, Tensor] = field(default_factory=dict)  # integers without truth, by their id
    guessed: bool = False
    turns: Counter[int] = field(default_factory=Counter)
    inside: bool = False

    def number(self, call: int, func: Any, x: Tensor, guess: Any, *, unreal: bool) -> Any:
        """What code reads of a tensor; a ``guess`` if its content is not ``unreal`` is the truth."""
        if self.inside:
            return guess
        if not is_float(x):
            self.guessed |= id(x) in self.guesses
            return guess
        found = self._next(call, func, tuple(x.shape))
        if not unreal:
            return guess
        self.guessed |= found is None
        return guess if found is None else found

    def reading(self, call: int, func: Any, x: Tensor, read: Callable[..., Any], *, unreal: bool) -> Callable[..., Any]:
        """The same for what turns a whole tensor into numbers: ``read``, with what it reads inside left alone."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.inside = True
            try:
                guess = read(*args, **kwargs)
            finally:
                self.inside = False
            return self.number(call, func, x, guess, unreal=unreal)

        return run

    def result(self, call: int, func: Any, out: Any, leaves: list[Any], *, unreal: bool) -> Any:
        """The integers that an operation gives, in truth where it is known."""
        if not is_asked(func, out, leaves):
            if isinstance(out, Tensor) and any(id(x) in self.guesses for x in leaves if isinstance(x, Tensor)):
                self.guesses[id(out)] = out
            return out
        found = self._next(call, func, tuple(out.shape))
        if not unreal:
            return out
        if found is not None:
            return found.clone()
        self.guesses[id(out)] = out
        return out

    def _next(self, call: int, func: Any, shape: tuple[int, ...]) -> Any:
        turn = self.turns[call]
        self.turns[call] += 1
        found = self.source.next(call, turn, func, shape) if self.source is not None else None
        self.used.setdefault(call, []).append(found)
        return found


def is_float(x: Any) -> bool:
    """Whether it is a tensor of floats."""
    return isinstance(x, Tensor) and structures.differentiable(x)


def is_asked(func: Any, out: Any, leaves: list[Any]) -> bool:
    """Whether an operation gives new integers that are not known from shapes and integers alone."""
    if not isinstance(out, Tensor) or is_float(out) or plausible.is_ranked(func) or func is _READ:
        return False
    if not torch_ops.makes_new(func):
        return False
    return torch_ops.is_random(func) or any(map(is_float, leaves))


def listen(model: nn.Module, run: Callable[[nn.Module], Any]) -> Heard | None:
    """What a run of a copy of ``model`` gives; None if there are no real values, or it does not run."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta or torch_hooks.is_dtensor(t) for t in tensors):
        return None
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    ops = _Listening()
    try:
        twin = copy.deepcopy(model, memo)
        for m in twin.modules():
            torch_hooks.drop_hooks(m)
        with torch_hooks.kept_rng(), torch.inference_mode(False), torch.no_grad(), torch_hooks.plain_attention():
            torch.manual_seed(SEED)
            with _Readers(ops), ops:
                run(twin)
    except Exception:
        return None
    return Heard(ops.events)


class _Listening(TorchDispatchMode):
    """Notes integer results of float operations, and floats that code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, tuple[int, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _READ:
            if is_float(args[0]):
                self.events.append((func, tuple(args[0].shape), out))
        elif is_asked(func, out, flatten((args, kwargs or {}))[0]):
            self.events.append((func, tuple(out.shape), out.detach().cpu().clone()))
        return out


class _Readers(TorchFunctionMode):
    """Notes what torch turns into Python's or numpy's numbers without an operation."""

    def __init__(self, ops: _Listening) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if plausible.reader(func) is None or not args or not is_float(args[0]):
            return func(*args, **(kwargs or {}))
        before = len(self.ops.events)
        out = func(*args, **(kwargs or {}))
        self.ops.events[before:] = [(func, tuple(args[0].shape), out)]
        return out
