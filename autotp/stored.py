"""Tensors in files, of which any slice can be read.

    stored.read((((0, 8), (16, 24)), None))   # rows 0..7 and 16..23

A slice of a safetensors file is read straight into the tensor that is returned: nothing else takes memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from autotp.errors import WeightsError
from autotp.index_ranges import Range

Want = tuple[Sequence[Range] | None, ...]  # for each dim the half-open ranges to read, in this order; None is all

_LONG_RUN = 1 << 16  # bytes; runs of this length are read one by one, shorter ones copied from a mapping


class Stored(Protocol):
    """A tensor in a file (or made from tensors in files), of which slices can be read."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        ...

    @property
    def file(self) -> Path:
        """Where it lies."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in the file."""
        ...

    def read(self, want: Want) -> Tensor:
        """The wanted ranges of every dim as a new contiguous CPU tensor."""
        ...


def lengths(want: Want, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what `want` reads."""
    return tuple(n if ranges is None else sum(b - a for a, b in ranges) for ranges, n in zip(want, shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class InSafetensors:
    """A tensor of a safetensors file: `size` bytes from `start`, row-major."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int

    def read(self, want: Want) -> Tensor:
        """Only the wanted bytes are read; nothing but the result takes memory."""
        out = torch.empty(lengths(want, self.shape), dtype=self.dtype)
        if not out.numel():
            return out
        try:
            with self.file.open("rb", buffering=0) as file:
                if self._shortest_run(want) >= _LONG_RUN or self.start % self.dtype.itemsize:
                    self._read_runs(file, want, out)
                else:
                    self._copy_mapped(file, want, out)
        except (OSError, ValueError) as error:  # mmap says ValueError where the file has become shorter
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{self.key} cannot be read from {self.file}: {error}") from error
        return out

    def _bytes_inside(self, dim: int) -> int:
        """Bytes from one index of a dim to the next."""
        return math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize

    def _shortest_run(self, want: Want) -> int:
        """Bytes of the shortest stretch that is contiguous in the file; as good as endless if there is one alone."""
        last = max((d for d, ranges in enumerate(want) if ranges is not None), default=-1)
        if last < 0 or (last == 0 and len(want[0] or ()) == 1):
            return _LONG_RUN
        return min(b - a for a, b in want[last] or () if b > a) * self._bytes_inside(last)

    def _runs(self, want: Want) -> Iterator[tuple[int, int]]:
        """Offset and size of these stretches, in the order of the result."""
        last = max((d for d, ranges in enumerate(want) if ranges is not None), default=-1)
        if last < 0:
            yield 0, self.size
            return
        outer = [_indices(want[d], self.shape[d]) for d in range(last)]
        steps = [self._bytes_inside(d) for d in range(last)]
        inside = self._bytes_inside(last)
        for at in product(*outer):
            base = sum(i * step for i, step in zip(at, steps, strict=True))
            for a, b in want[last] or ():
                yield base + a * inside, (b - a) * inside

    def _read_runs(self, file: BinaryIO, want: Want, out: Tensor) -> None:
        bytes_of: Any = out.reshape(-1).view(torch.uint8).numpy()
        memory = memoryview(bytes_of)
        done = 0
        for offset, size in self._runs(want):
            file.seek(self.start + offset)
            end = done + size
            while done < end:
                got = file.readinto(memory[done:end])  # type: ignore[attr-defined]
                if not got:
                    raise WeightsError(f"{self.file} ended while {self.key} was read: it has become shorter")
                done += got

    def _copy_mapped(self, file: BinaryIO, want: Want, out: Tensor) -> None:
        before = self.start % mmap.ALLOCATIONGRANULARITY
        # A private copy, because torch only takes memory that could be written; nothing is.
        mapped = mmap.mmap(file.fileno(), before + self.size, offset=self.start - before, access=mmap.ACCESS_COPY)
        try:
            whole = torch.frombuffer(mapped, dtype=self.dtype, count=math.prod(self.shape), offset=before)
            copy_ranges(whole.view(self.shape), want, out)
            del whole
        finally:
            mapped.close()


@dataclass(frozen=True, kw_only=True)
class InPickle:
    """A tensor of a file that torch.save wrote, mapped into memory."""

    key: str
    file: Path
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, want: Want) -> Tensor:
        """A copy of the wanted part; only its pages are read."""
        out = torch.empty(lengths(want, self.shape), dtype=self.dtype)
        copy_ranges(self.tensor, want, out)
        return out


def copy_ranges(whole: Tensor, want: Want, out: Tensor) -> None:
    """Copy the wanted ranges of `whole` into `out`, block by block."""
    ranges = [((0, n),) if r is None else r for r, n in zip(want, whole.shape, strict=True)]
    starts = [[sum(b - a for a, b in r[:i]) for i in range(len(r))] for r in ranges]
    for block in product(*(range(len(r)) for r in ranges)):
        source, target = whole, out
        for dim, i in enumerate(block):
            a, b = ranges[dim][i]
            source = source.narrow(dim, a, b - a)
            target = target.narrow(dim, starts[dim][i], b - a)
        target.copy_(source)


def _indices(ranges: Sequence[Range] | None, size: int) -> Iterable[int]:
    return range(size) if ranges is None else [i for a, b in ranges for i in range(a, b)]
