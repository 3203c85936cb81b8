"""What is decided before owners are carried through a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Room:
    """Owners of a tensor that is made to be written into; of size 1 along dims where they do not vary."""

    nodes: Tensor

    def owners(self, shape: tuple[int, ...]) -> Tensor:
        return self.nodes.expand(shape)


@dataclass(frozen=True)
class Experts:
    """An operation that a rank does for its experts only: ``index`` says whose a row is.

    ``rows`` are multiplied, those of one expert after those of another, and ``index`` has the end of each expert's;
    without ``rows``, the index picks what is looked up: a tensor, or None for a number in the code.
    """

    weight: int
    index: int | None
    rows: int | None = None


@dataclass(frozen=True)
class Choices:
    """What is decided before a pass.

    ``dims`` forces a parameter's cut (None: leave whole), ``gather`` lists tensors made whole right where they are
    computed, ``opaque`` calls that only ever see whole tensors, ``tokens`` whole tensors of which each rank then takes
    some tokens only, with their token dim, ``later`` sums over the ranks that are made by the next call, which only
    moves elements, ``room`` tensors made to be written into, cut as what is written (None: whole after all). ``dealt``
    says which index of which dim of the leaves each rank has already, where the layout is not open any more.
    """

    dims: dict[int, int | None] = field(default_factory=dict)
    gather: frozenset[int] = frozenset()
    opaque: frozenset[int] = frozenset()
    tokens: dict[int, int] = field(default_factory=dict)
    later: frozenset[int] = frozenset()
    room: dict[int, Room | None] = field(default_factory=dict)
    dealt: dict[int, tuple[int, tuple[Sequence[int], ...]]] = field(default_factory=dict)
