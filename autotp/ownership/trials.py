"""Run an operation on small real tensors, whole and in pieces, and see whether the pieces give the whole.

Trials are made in float64 where the operation takes it, and in its own dtype too; on several draws of values (ordinary,
large, tied, signed, with zeros and spikes), on several sizes, on several ways to divide the indices; forward, and
backward where there is one. All draws are seeded, so that an answer is always the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp import torch_hooks
from autotp.record import Trace, Traced
from autotp.trees import flatten, rebuild

Places = tuple[int | None, ...]
SIZES = (1, 2, 3, 5, 8, 19, 40)
MIN_SIZES = 4
MAX_NUMEL = 1 << 18


@dataclass(frozen=True)
class Slot:
    """A tensor argument: where it is among the leaves, and what it is like; ``content`` of integers where known."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: Tensor | None = None


@dataclass(frozen=True)
class Trial:
    """An operation with its arguments, and what is claimed of one dim of it.

    ``dims[k]``: the dim of operand k that it is, or None; ``results[j]`` likewise. ``summed``: the result is a sum over
    it. ``counts``: leaves that count its indices. ``thorough``: it must be seen to hold for several sizes.
    """

    func: Any
    leaves: tuple[Any, ...]
    spec: Any
    slots: tuple[Slot, ...]
    dims: Places
    results: Places
    summed: bool = False
    counts: tuple[int, ...] = ()
    thorough: bool = False

    @property
    def size(self) -> int:
        """How many indices the dim has as recorded."""
        return next(s.shape[d] for s, d in zip(self.slots, self.dims, strict=True) if d is not None)

    @property
    def key(self) -> Any:
        """What tells this trial from others."""
        tensors = tuple((s.shape, s.dtype) for s in self.slots)
        others = tuple(repr(x) for i, x in enumerate(self.leaves) if i not in {s.at for s in self.slots})
        claim = self.dims, self.results, self.summed, self.counts, self.thorough
        return self.func, tensors, others, repr(self.spec), *claim

    def call(self, tensors: Sequence[Tensor], size: int) -> list[Any]:
        """The results on these tensors, whose dim has ``size`` indices."""
        leaves = list(self.leaves)
        for slot, t in zip(self.slots, tensors, strict=True):
            leaves[slot.at] = t
        for i in self.counts:
            whole, rest = divmod(leaves[i] * size, self.size)
            if rest:
                raise Indivisible
            leaves[i] = whole
        args, kwargs = rebuild(leaves, self.spec)
        return flatten(self.func(*args, **kwargs))[0]


def slot(trace: Trace, at: int, tid: int) -> Slot:
    """A tensor argument of a recorded operation, with the content of integers where it is known."""
    info, there = trace.tensors[tid], trace.objects[tid]
    known = not info.dtype.is_floating_point and not isinstance(there, Traced) and info.real
    return Slot(at, info.shape, info.dtype, there if known else None)


class Indivisible(Exception):
    """A count that is not whole for this size."""


Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _normal(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _spike(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    x = _normal(shape, g) * 0.1
    if x.numel():
        x.view(-1)[int(torch.randint(x.numel(), (), generator=g))] = 1e4
    return x


DRAWS: tuple[Draw, ...] = (
    _normal,
    lambda s, g: torch.rand(s, generator=g, dtype=torch.float64) * 0.9 + 0.05,
    lambda s, g: _normal(s, g) * 30,
    lambda s, g: torch.randint(-2, 3, s, generator=g).double(),
    lambda s, g: _normal(s, g).clamp(min=0) * 5,
    lambda s, g: -torch.rand(s, generator=g, dtype=torch.float64) * 3,
    _spike,
    lambda s, g: _normal(s, g) * 1e-6,
    lambda s, g: torch.zeros(s, dtype=torch.float64),
)


_KNOWN: dict[Any, str] = {}


def mistake(trial: Trial) -> str:
    """What is wrong with a claim; empty if all trials agree with it. Each is tried once in a process."""
    key = trial.key
    if key not in _KNOWN:
        _KNOWN[key] = _tried(trial)
    return _KNOWN[key]


def _tried(trial: Trial) -> str:
    with torch_hooks.no_modes(), torch_hooks.kept_rng(), torch.enable_grad(), torch.device("cpu"):
        return _Trials(trial).run()


def sizes_of(trial: Trial) -> list[tuple[int, ...]] | None:
    """The shapes of the results, if all are tensors and the operation runs at all."""
    with torch_hooks.no_modes(), torch_hooks.kept_rng(), torch.no_grad():
        for k, wide in itertools.product(range(3), (True, False)):
            tensors = _drawn_all(trial, None, k, wide)
            try:
                results = trial.call(tensors, 0)
            except Exception:
                continue
            return [tuple(y.shape) for y in results] if all(isinstance(y, Tensor) for y in results) else None
    return None


class _Trials:
    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.told = 0  # runs whose results say something
        self.sizes: set[int] = set()

    def run(self) -> str:
        t = self.trial
        try:
            wide = self._runs(True)
            if not wide and not self._runs(False):
                return "it cannot be run on small tensors"
        except Impure as e:
            return str(e)
        sizes = [t.size, *(n for n in (*SIZES, 2 * t.size + 1) if n != t.size)]
        for n, size in enumerate(sizes):
            draws = range(len(DRAWS)) if n == 0 else (0, 2, 3)
            for k in draws:
                why = self._compare(size, k, wide)
                if why:
                    return f"{why} (size {size})"
        own = next((self._compare(t.size, k, False) for k in (0, 2)), "") if wide else ""
        if own:
            return f"{own} (in its own dtype)"
        if self.told < len(DRAWS) or (t.thorough and len(self.sizes) < MIN_SIZES):
            return "its results on random tensors say too little"
        return ""

    # ------------------------------------------------------------ one trial
    def _runs(self, wide: bool) -> bool:
        """Whether it runs at all; twice, to see that it has no state, and does not write into what it gets."""
        for k in range(3):
            tensors = _drawn_all(self.trial, self.trial.size, k, wide)
            before = [t.clone() for t in tensors]
            try:
                first, second = (self.trial.call(tensors, self.trial.size) for _ in range(2))
            except Exception:
                continue
            if not all(_close(a, b, 0.0) for a, b in zip(tensors, before, strict=True)):
                raise Impure("it writes into its arguments")
            if not all(_close(a, b, 0.0) for a, b in zip(first, second, strict=True)):
                raise Impure("it gives another result each time")
            return True
        return False

    def _compare(self, size: int, k: int, wide: bool) -> str:
        t = self.trial
        tensors = _drawn_all(t, size, k, wide)
        if sum(x.numel() for x in tensors) > MAX_NUMEL:
            return ""
        tensors = [x.requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]
        try:
            whole = t.call(tensors, size)
        except Exception:
            return ""  # it does not take such values or sizes: they tell nothing
        tolerance = 1e-8 if wide else 1e-3
        g = torch.Generator().manual_seed(7 * size + k)
        for parts in _divisions(size, g):
            try:
                pieces = [t.call([_part(x, d, p) for x, d in zip(tensors, t.dims, strict=True)], len(p)) for p in parts]
            except Indivisible:
                continue
            except Exception as e:
                return f"it fails on {[len(p) for p in parts]} of {size} indices: {type(e).__name__}: {e}"
            why = self._forward(whole, pieces, parts, tolerance) or self._backward(
                tensors, whole, pieces, parts, tolerance
            )
            if why:
                return why
            if any(_tells(y) for y in whole):
                self.told += 1
                self.sizes.add(size)
        return ""

    def _forward(self, whole: list[Any], pieces: list[list[Any]], parts: list[Tensor], tolerance: float) -> str:
        if any(len(p) != len(whole) for p in pieces):
            return "pieces give another number of results"
        for j, d in enumerate(self.trial.results):
            y = whole[j]
            if not isinstance(y, Tensor):
                if any(p[j] != y for p in pieces):
                    return "it returns other numbers on pieces"
            elif self.trial.summed:
                if not _close(sum(p[j] for p in pieces), y, tolerance):
                    return "the results of pieces do not add up to the result"
            elif not all(_close(p[j], _part(y, d, i), tolerance) for p, i in zip(pieces, parts, strict=True)):
                return "pieces do not give the pieces of the result"
        return ""

    def _backward(
        self, tensors: list[Tensor], whole: list[Any], pieces: list[list[Any]], parts: list[Tensor], tolerance: float
    ) -> str:
        g = torch.Generator().manual_seed(5)
        asked = [y for y in whole if isinstance(y, Tensor) and y.requires_grad]
        inputs = [x for x in tensors if x.requires_grad]
        if not asked:
            return ""
        weights = {j: _normal(tuple(y.shape), g).to(y.dtype) for j, y in enumerate(whole) if _asks(y)}
        try:
            full = torch.autograd.grad(
                [whole[j] for j in weights], inputs, list(weights.values()), allow_unused=True, retain_graph=True
            )
        except (RuntimeError, NotImplementedError):
            return ""  # it has no backward
        total: list[Any] = [None] * len(inputs)
        for piece, part in zip(pieces, parts, strict=True):
            here = {j: w if self.trial.summed else _part(w, self.trial.results[j], part) for j, w in weights.items()}
            got = torch.autograd.grad(
                [piece[j] for j in here], inputs, list(here.values()), allow_unused=True, retain_graph=True
            )
            total = [a if b is None else b if a is None else a + b for a, b in zip(total, got, strict=True)]
        ok = all(_close(_zero(a, x), _zero(b, x), tolerance) for a, b, x in zip(total, full, inputs, strict=True))
        return "" if ok else "the gradients of pieces are not those of the whole"


class Impure(Exception):
    """An operation with effects besides its result."""


def _asks(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad


def _zero(g: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if g is None else g


def _drawn_all(t: Trial, size: int | None, k: int, wide: bool) -> list[Tensor]:
    """Draw ``k`` of all operands, with the dim in question of this size (None: as recorded)."""
    g = torch.Generator().manual_seed(1000 * (size or 0) + k)
    shapes = [
        tuple(size if i == d and size is not None else n for i, n in enumerate(s.shape))
        for s, d in zip(t.slots, t.dims, strict=True)
    ]
    low = min((n for shape in shapes for n in shape if n > 1), default=1)
    return [_drawn(s, shape, k, g, wide, low) for s, shape in zip(t.slots, shapes, strict=True)]


def _drawn(s: Slot, shape: tuple[int, ...], k: int, g: torch.Generator, wide: bool, low: int) -> Tensor:
    if s.dtype.is_floating_point:
        x = DRAWS[k](shape, g)
        return x if wide else x.to(s.dtype)
    if s.dtype.is_complex:
        x = torch.complex(DRAWS[k](shape, g), DRAWS[k](shape, g))
        return x if wide else x.to(s.dtype)
    if s.dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if s.content is not None and shape == s.shape and k % 2:
        return s.content.clone()
    return torch.randint(0, low, shape, generator=g).to(s.dtype)


def _divisions(size: int, g: torch.Generator) -> Iterator[list[Tensor]]:
    """Ways to deal indices out: halves, and shares at random, kept in order as ranks keep theirs."""
    if size < 2:
        return
    indices = torch.arange(size)
    yield [indices[: size // 2], indices[size // 2 :]]
    if size > 2:
        taken = torch.zeros(size, dtype=torch.bool)
        taken[torch.randperm(size, generator=g)[: max(1, size // 3)]] = True
        yield [indices[taken], indices[~taken]]
        yield [indices[i :: min(size, 4)] for i in range(min(size, 4))]


def _part(x: Tensor, dim: int | None, indices: Tensor) -> Tensor:
    return x if dim is None else x.index_select(dim, indices)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = a.detach(), b.detach()
    finite = b[torch.isfinite(b)]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return bool(torch.isclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True).all())


def _tells(y: Any) -> bool:
    """Whether a result has more than one value in it, and numbers."""
    if not isinstance(y, Tensor) or y.numel() < 2:
        return False
    y = torch.view_as_real(y.detach()) if y.is_complex() else y.detach()
    y = y.double().reshape(-1)
    return bool(torch.isfinite(y).any()) and bool((y != y[0]).any())


__all__ = ["Slot", "Trial", "mistake", "sizes_of", "slot"]
