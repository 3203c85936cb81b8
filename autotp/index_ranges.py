"""Layout: which indices of one tensor dim each rank holds. Text only, no torch.

    Layout(0, (((0, 8), (16, 20)), ((8, 16), (20, 24))))

says that dim 0 is cut over two ranks; rank 0 holds rows 0..7 and 16..19, in this order.
Ranks may hold different numbers of rows, none at all, or copies of the same rows
(key/value heads shared by several ranks); together they must hold every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .errors import AutotpError

Range = tuple[int, int]
Pieces = tuple[tuple[Range, ...], ...]


class LayoutError(AutotpError, NotImplementedError):
    """A layout that does not fit, or an operation that a layout cannot take part in."""

    default_code = "TP-LAYOUT"


@dataclass(frozen=True)
class Layout:
    """Per rank, half-open index ranges along `dim`, in local order (kept in shortest form)."""

    dim: int
    pieces: Pieces
    repeats: bool = False  # a rank may hold an index twice (FSDP over ranks that hold copies)

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise LayoutError(f"layout dim must be 0 or more, got {self.dim}: normalise it first")
        if not self.pieces:
            raise LayoutError("a layout needs the ranges of at least one rank")
        pieces = tuple(shortest(rank, ranges, self.repeats) for rank, ranges in enumerate(self.pieces))
        object.__setattr__(self, "pieces", pieces)
        if len(pieces) == 1 and len(pieces[0]) > 1:  # torch skips redistribution on one rank
            raise LayoutError(f"one rank holds everything in order, not as {pieces[0]}")
        held = sorted({piece for ranges in pieces for piece in ranges})
        end = 0
        for start, stop in held:
            if start > end:
                raise LayoutError(f"no rank holds indices {end}..{start - 1} of dim {self.dim}")
            end = max(end, stop)

    @classmethod
    def from_indices(cls, dim: int, per_rank: Iterable[Iterable[int]]) -> Layout:
        """The layout in which rank r holds the r-th list of global indices, in that order."""
        runs = (((i.start, i.stop),) if isinstance(i, range) and i else tuple((j, j + 1) for j in i) for i in per_rank)
        return cls(dim, tuple(runs))

    @classmethod
    def even(cls, dim: int, size: int, ranks: int) -> Layout:
        """Contiguous blocks as torch.chunk cuts them (the last ranks may hold less)."""
        block = -(-size // ranks)
        bounds = [min(rank * block, size) for rank in range(ranks + 1)]
        return cls(dim, tuple((bound,) for bound in pairwise(bounds)))

    @property
    def num_ranks(self) -> int:
        """Number of ranks the dim is dealt out to."""
        return len(self.pieces)

    @cached_property
    def size(self) -> int:
        """Global size of the dim."""
        return max((stop for ranges in self.pieces for _, stop in ranges), default=0)

    @cached_property
    def has_copies(self) -> bool:
        """Whether some index is held by more than one rank."""
        return sum(local_size(self, rank) for rank in range(self.num_ranks)) > self.size

    @cached_property
    def is_partition(self) -> bool:
        """Whether every index is held exactly once and every rank holds something."""
        return not self.has_copies and all(self.pieces)

    @cached_property
    def is_chunked(self) -> bool:
        """Whether this is exactly torch.chunk without an empty rank, i.e. stock `Shard`."""
        if any(not ranges for ranges in self.pieces):
            return False
        return self.pieces == Layout.even(self.dim, self.size, self.num_ranks).pieces

    def __str__(self) -> str:
        ranks = (",".join(f"{a}:{b}" for a, b in ranges) for ranges in self.pieces)
        return f"dim {self.dim}: " + " | ".join(ranks)


def shortest(rank: int, ranges: Sequence[Range], repeats: bool = False) -> tuple[Range, ...]:
    """Drop empty ranges and join neighbours; refuse what is not a set of indices."""
    joined: list[Range] = []
    for start, stop in ranges:
        start, stop = int(start), int(stop)
        if start < 0 or stop < start:
            raise LayoutError(f"rank {rank}: ({start}, {stop}) is not a range 0 <= start <= stop")
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    for (_, stop), (start, _) in pairwise(sorted(joined)):
        if start < stop and not repeats:
            raise LayoutError(f"rank {rank} holds index {start} twice: {tuple(joined)}")
    return tuple(joined)


def indices(layout: Layout, rank: int) -> list[int]:
    """Global indices along `layout.dim` that `rank` holds, in local order."""
    return [i for start, stop in layout.pieces[rank] for i in range(start, stop)]


def local_size(layout: Layout, rank: int) -> int:
    """Number of indices along `layout.dim` that `rank` holds."""
    return sum(stop - start for start, stop in layout.pieces[rank])
