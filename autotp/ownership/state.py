"""What is known of a tensor's owners while ownership is carried through a run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Vec:
    """A parameter dim seen along one dim of a tensor computed from parameters only: ``nodes[i]`` sits at index i."""

    param: int
    param_dim: int
    dim: int
    nodes: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A tensor computed from parameters alone (a parameter, its view, its cast, a product of two)."""

    vecs: tuple[Vec, ...]
    params: frozenset[int]

    def at(self, dim: int) -> list[Vec]:
        return [v for v in self.vecs if v.dim == dim]


@dataclass(frozen=True, slots=True)
class Owned:
    """An activation of which every rank holds the elements it owns."""

    owners: Tensor


@dataclass(frozen=True, slots=True)
class Disjoint:
    """An activation in full size on every rank, of which each rank computes some rows: a sum without overlaps.

    ``rows``: of every element the number of its row; one number, one rank. None: rows were added up, it can only be
    summed. ``elsewhere``: what all ranks but that one have there, None if that is not one value. Only with zeros
    elsewhere it is a sum.
    """

    rows: Tensor | None
    elsewhere: float | None = 0.0

    @property
    def zero(self) -> bool:
        return self.elsewhere == 0


@dataclass(frozen=True, slots=True)
class Count:
    """An integer argument that counts something along ``dim`` of an operand.

    The operand is tensor ``tid``, or the call's first; the argument has a ``name`` in the operation's schema, or is the
    last one of that value.
    """

    value: int
    dim: int
    tid: int | None = None
    name: str | None = None


State = Weights | Owned | Disjoint | None  # None: whole, every rank holds all of it


@dataclass(frozen=True, slots=True)
class Want:
    """How an operation needs one operand.

    ``as``: cut along ``dims`` like what they name, (tensor, dim) or a vector of nodes, and whole along all others.
    ``own``: as it is. ``once``: whole, and only the first rank contributes it to a partial sum.
    """

    tid: int
    kind: str
    dims: tuple[tuple[int, tuple[int, int] | Tensor], ...] = ()
