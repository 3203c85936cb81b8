"""Edits: what a rank does differently from the user's code, at a call (one torch function) or at a module's edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from autotp.ownership.dealing import Tokens
from autotp.ownership.rules_shared_classes import SharedClasses
from autotp.ownership.rules_shared_norm import SharedNorm

Indices = tuple[Sequence[int], ...]
Cuts = tuple[tuple[int, Indices], ...]


@dataclass(frozen=True)
class OperandEdit:
    """What happens to an operand: gathered along ``gather``, entered, sliced along ``slice``, kept on one rank.

    With ``sum``, it is a term of a sum over the ranks, which is made first. With ``stream``, only where the tokens of
    that stream are cut. Entered, ``unless`` the tokens of that one are.
    """

    gather: Cuts = ()
    enter: bool = False
    slice: Cuts = ()
    once: bool = False
    sum: bool = False
    stream: int | None = None
    unless: int | None = None

    def __bool__(self) -> bool:
        return bool(self.gather or self.enter or self.slice or self.once or self.sum)

    @property
    def of_tokens(self) -> bool:
        """Whether it depends on how many tokens there are."""
        return self.stream is not None or self.unless is not None or _of_tokens(self.gather)


@dataclass(frozen=True)
class ResultEdit:
    """What happens to a result: summed over the ranks (each first scaled by ``scale[rank]``), or gathered.

    ``scatter``: each rank keeps some tokens of it. ``summed``: its gradients are partial, and summed into the parts.
    """

    leave: bool = False
    scale: tuple[float, ...] = ()
    gather: Cuts = ()
    scatter: Cuts = ()
    summed: bool = False

    @property
    def of_tokens(self) -> bool:
        """Whether it depends on how many tokens there are."""
        return bool(self.scatter) or _of_tokens(self.gather)


@dataclass(frozen=True)
class SharedEdit:
    """What the ranks do together in place of a call, and who holds which index of the cut dim of its input."""

    what: SharedNorm | SharedClasses
    parts: Indices


@dataclass(frozen=True)
class ExpertsEdit:
    """A call that a rank makes with its experts only: where its tensors are, and who has which experts.

    Of the ``rows`` that are multiplied, those of the rank's experts: the ``index`` says where each expert's end.
    Without ``rows``, the index (a tensor or a number) picks, and what other ranks have is zero.
    """

    weight: int
    index: int
    rows: int | None
    parts: Indices


@dataclass
class CallEdit:
    """All edits of one call. ``numbers[rank]`` maps a leaf to how its number is changed."""

    operands: dict[int, OperandEdit] = field(default_factory=dict)
    results: dict[int, ResultEdit] = field(default_factory=dict)
    numbers: dict[int, dict[int, NumberEdit]] = field(default_factory=dict)
    rows: Indices | None = None
    shared: SharedEdit | None = None
    experts: ExpertsEdit | None = None
    random: bool = False
    noise: Cuts = ()  # drawn whole, as the unsharded model draws it: the dims of which ranks take their indices
    stream: int | None = None  # its tensors are cut by the tokens of this stream
    local: bool = False  # an operand is a parameter of another module: its local tensor is taken here

    def __bool__(self) -> bool:
        return bool(
            self.operands
            or self.results
            or any(self.numbers.values())
            or self.rows
            or self.shared
            or self.experts
            or self.random
            or self.local
        )


@dataclass(frozen=True)
class NumberEdit:
    """Scale an integer by ``ratio``; or, where ``seen`` is given, put ``value`` in place of exactly that number.

    With ``stream`` it counts tokens: a rank's are turned into all (``up``) or all into a rank's; ``ratio`` is the
    sample's.
    """

    ratio: Fraction | None = None
    seen: int | float | None = None
    value: int | float | None = None
    stream: int | None = None
    up: bool = False


class CannotEdit(Exception):
    """A call whose inside needs more than edits of its operands and results."""

    def __init__(self, call: int, why: str) -> None:
        super().__init__(why)
        self.call, self.why = call, why


def _of_tokens(cuts: Cuts) -> bool:
    return any(isinstance(s, Tokens) for _, s in cuts)
