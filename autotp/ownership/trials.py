"""Run an operation on small real tensors, whole and in pieces, and see whether the pieces give the whole.

Trials are made in float64 where the operation takes it, and in its own dtype too; on several draws of values (ordinary,
large, tied, signed, with zeros and spikes) and of incoming gradients, on several sizes, on several ways to divide the
indices; forward, and backward where there is one. All draws are seeded, so that an answer is always the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp import torch_hooks
from autotp.functions import FunctionOp
from autotp.ownership.claims import Indivisible, Trial
from autotp.ownership.draws import DRAWS, OTHERS, divisions, drawn_all, incoming
from autotp.ownership.watched import Impure, watched
from autotp.structures import differentiable

SIZES = (1, 2, 3, 5, 8, 19, 40)
MIN_SIZES = 4
MAX_NUMEL = 1 << 18
MAX_FULL = 1 << 22

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
            tensors = drawn_all(trial, None, k, wide)
            try:
                results = trial.call(tensors, 0)
            except Exception:
                continue
            return [tuple(y.shape) for y in results] if all(isinstance(y, Tensor) for y in results) else None
    return None


class _Trials:
    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.error = ""
        self.told = 0  # runs whose results say something
        self.sizes: set[int] = set()

    def run(self) -> str:
        t = self.trial
        try:
            wide = self._runs(True)
            if not wide and not self._runs(False):
                return f"it cannot be run on small tensors{self.error}"
        except Impure as e:
            return str(e)
        sizes = [n for n in (*SIZES, 2 * t.size + 1) if n != t.size]
        whys = itertools.chain(
            (self._why(t.size, k, wide) for k in range(len(DRAWS))),
            (self._why(size, k, wide) for size in sizes for k in OTHERS),
            (self._why(t.size, k, False) for k in (0, 2) if wide),
            (self._why(t.size, 0, wide, only=i) for i in range(len(t.slots)) if len(t.slots) > 1),
            (self._why(t.full, 0, wide) for _ in range(t.full > t.size)),
        )
        why = next(filter(None, whys), "")
        if why:
            return why
        if self.told < len(DRAWS) or (t.thorough and len(self.sizes) < MIN_SIZES):
            return "its results on random tensors say too little"
        return ""

    # ------------------------------------------------------------ one trial
    def _runs(self, wide: bool) -> bool:
        """Whether it runs at all; twice, to see that it has no state, and does not write into what it gets."""
        for k in range(3):
            tensors = drawn_all(self.trial, self.trial.size, k, wide)
            before = [t.clone() for t in tensors]
            try:
                self.trial.call(tensors, self.trial.size)
            except Exception as e:
                self.error = f" ({type(e).__name__}: {e})"
                continue
            first, second = (
                watched(self.trial.func, lambda xs: self.trial.call(xs, self.trial.size), tensors, self.trial.asked)
                for _ in range(2)
            )
            if not all(_close(a, b, 0.0) for a, b in zip(tensors, before, strict=True)):
                raise Impure("it writes into its arguments")
            if not all(_close(a, b, 0.0) for a, b in zip(first, second, strict=True)):
                raise Impure("it gives another result each time")
            return True
        return False

    def _why(self, size: int, k: int, wide: bool, only: int | None = None) -> str:
        why = self._compare(size, k, wide, only)
        return why and f"{why} (size {size}{'' if wide else ', in its own dtype'})"

    def _compare(self, size: int, k: int, wide: bool, only: int | None) -> str:
        """What is wrong on draw ``k``, with gradients for all operands or the ``only`` one."""
        t = self.trial
        tensors = drawn_all(t, size, k, wide)
        if sum(x.numel() for x in tensors) > (MAX_FULL if size == t.full else MAX_NUMEL):
            return ""
        for i, x in enumerate(tensors):
            x.requires_grad_(differentiable(x) and only in (None, i))
        try:
            gradients = incoming(t.call(tensors, size), k)[: None if size == t.size else 1 + (k == 0)]
        except Exception:
            return ""  # it does not take such values or sizes: they tell nothing
        for weights in gradients:
            why = self._divided(_Run(t, tensors, size, weights), wide, torch.Generator().manual_seed(7 * size + k))
            if why:
                return why
        return ""

    def _divided(self, run: _Run, wide: bool, g: torch.Generator) -> str:
        tolerance = (
            1e-8 if wide else max([1e-3, *(4 * torch.finfo(x.dtype).eps for x in run.tensors if differentiable(x))])
        )
        whole = run.whole()
        gradients = run.gradients(whole)
        if isinstance(gradients, str):
            return gradients
        for parts in divisions(run.size, g):
            try:
                pieces = [run.piece(p) for p in parts]
            except Indivisible:
                continue
            except Exception as e:
                return f"it fails on {[len(p) for p in parts]} of {run.size} indices: {type(e).__name__}: {e}"
            why = self._forward(whole, pieces, parts, tolerance) or run.backward(gradients, pieces, parts, tolerance)
            if why:
                return why
            if any(_tells(y) for y in whole):
                self.told += 1
                self.sizes.add(run.size)
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


@dataclass(frozen=True)
class _Run:
    """An operation on some tensors, whole and in pieces, with these gradients coming in (by result)."""

    trial: Trial
    tensors: list[Tensor]
    size: int
    weights: dict[int, Tensor]

    def whole(self) -> list[Any]:
        """The results."""
        return self.trial.call(self.tensors, self.size)

    def piece(self, part: Tensor) -> list[Any]:
        """The results on some of the indices."""
        dims = zip(self.tensors, self.trial.dims, strict=True)
        return self.trial.call([_part(x, d, part) for x, d in dims], len(part))

    def gradients(self, whole: list[Any]) -> tuple[Tensor | None, ...] | str:
        """Those of the whole; none where there is no backward, and what is wrong where it fails."""
        own = isinstance(self.trial.func, FunctionOp)  # written by a user: an error in it is no lack of one
        try:
            return self._back(whole, self.weights) if self.weights else ()
        except Exception as e:
            missing = not own and isinstance(e, (RuntimeError, NotImplementedError))
            return () if missing else f"its backward fails: {type(e).__name__}: {e}"

    def backward(
        self, full: tuple[Tensor | None, ...], pieces: list[list[Any]], parts: list[Tensor], tolerance: float
    ) -> str:
        """What is wrong with the gradients of pieces."""
        if not full:
            return ""
        total: list[Any] = [None] * len(full)
        for piece, part in zip(pieces, parts, strict=True):
            sums = self.trial.summed
            here = {j: w if sums else _part(w, self.trial.results[j], part) for j, w in self.weights.items()}
            try:
                got = self._back(piece, here)
            except Exception as e:
                return f"its backward fails on {len(part)} of {self.size} indices: {type(e).__name__}: {e}"
            total = [a if b is None else b if a is None else a + b for a, b in zip(total, got, strict=True)]
        inputs = [x for x in self.tensors if x.requires_grad]
        ok = all(_close(_zero(a, x), _zero(b, x), tolerance) for a, b, x in zip(total, full, inputs, strict=True))
        return "" if ok else "the gradients of pieces are not those of the whole"

    def _back(self, results: list[Any], weights: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
        inputs, given = [x for x in self.tensors if x.requires_grad], [w.clone() for w in weights.values()]
        return torch.autograd.grad([results[j] for j in weights], inputs, given, allow_unused=True)


def _zero(g: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if g is None else g


def _part(x: Tensor, dim: int | None, indices: Tensor) -> Tensor:
    return x if dim is None else x.index_select(dim, indices)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    if torch.equal(a, b):
        return True
    if not differentiable(a):
        return False
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


__all__ = ["mistake", "sizes_of"]
