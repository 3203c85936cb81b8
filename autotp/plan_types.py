"""What a plan is: rows of text and numbers, no torch objects.

    Row          one parameter: how it is cut, what rank 0 holds, and why
    Collective   one communication call, on the sample's sizes
    Memory       bytes of the whole model and of one rank
    Finding      something the user should know
    Plan         all of these; frozen, comparable, text in and out

Shapes are global unless a name says `local`; local is rank 0's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_colwise_gather_output",
    "packed_rowwise",
    "embedding_rowwise",
    "embedding_colwise",
    "expertwise",
    "sequence_parallel",
    "gathered_at_use",
    "replicated_with_grad_allreduce",
    "replicate",
)
"""Every style name a row may have. Names are transformers' where it has them."""


TP_NAMES = ("tp", "tensor_parallel")  # what an axis of tensor parallelism may be called; the second is Lightning's


class Axes(Mapping[str, int]):
    """Mesh axes by name, in mesh order: a mapping that cannot change."""

    __slots__ = ("_items",)
    _items: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        object.__setattr__(self, "_items", tuple((str(k), int(v)) for k, v in axes.items()))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Axes is frozen: cannot set {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Axes, (dict(self._items),)

    def __getitem__(self, name: str) -> int:
        return dict(self._items)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(dict(self._items))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self._items)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    style: str
    dim: int | None
    reason: str
    dtype: str = "float32"
    tied_to: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether rank 0 holds less than the whole parameter."""
        return math.prod(self.local_shape) < math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One communication call: `kind` is all_reduce, all_gather, reduce_scatter or broadcast."""

    module: str
    kind: str
    when: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes: `parameters` of the whole model, the others of one rank (optimizer: AdamW)."""

    parameters: int
    local_parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, rows: tuple[Row, ...]) -> Memory:
        """Add up rows; a tied parameter counts once, gradients as large as the local weights, AdamW twice."""
        own = [row for row in rows if row.tied_to is None]
        local = sum(math.prod(row.local_shape) * itemsize(row.dtype) for row in own)
        return cls(
            parameters=sum(row.bytes for row in own), local_parameters=local, gradients=local, optimizer=2 * local
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to know about the plan: `level` is note, warning or error; `where` a name, or empty."""

    code: str
    level: str
    where: str
    message: str

    def __str__(self) -> str:
        where = f" {self.where}" if self.where else ""
        return f"{self.level}: {self.code}{where}: {self.message}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How every parameter of a model is cut over the mesh, what that costs, and why."""

    model: str
    mesh: Mapping[str, int]
    parameters: tuple[Row, ...]
    collectives: tuple[Collective, ...]
    memory: Memory
    findings: tuple[Finding, ...] = ()
    sample: str = ""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Axes(self.mesh))
        for field in ("parameters", "collectives", "findings"):
            object.__setattr__(self, field, tuple(getattr(self, field)))

    @property
    def tp(self) -> int:
        """Number of ranks on the tensor-parallel axis."""
        return next((self.mesh[name] for name in TP_NAMES if name in self.mesh), 1)

    @property
    def cut_share(self) -> float:
        """Share of the bytes of all weight matrices (2 dims or more) that is cut; tied ones count once."""
        matrices = [row for row in self.parameters if len(row.shape) >= 2 and row.tied_to is None]
        total = sum(row.bytes for row in matrices)
        return sum(row.bytes for row in matrices if row.is_cut) / total if total else 0.0

    def row(self, name: str) -> Row:
        """The row of one parameter; an unknown name raises, and names the nearest ones."""
        from autotp.lookup import find_row

        return find_row(self, name)

    def explain(self, name: str) -> str:
        """Why a parameter is cut as it is, and what its neighbours do."""
        from autotp.lookup import explain

        return explain(self, name)

    def diff(self, other: Plan) -> str:
        """What differs from `other`, as lines `name: here -> there`; empty if nothing does."""
        from autotp.plans_io import diff

        return diff(self, other)

    def save(self, path: str | Path, *, command: str | None = None) -> None:
        """Write the plan as a TOML file; `command` is noted in its header."""
        from autotp.plans_io import save

        save(self, path, command=command)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote, or one edited by hand."""
        from autotp.plans_io import load

        return load(path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, `"schema": 1`; what `autotp plan --json` prints."""
        from autotp.plans_io import to_dict

        return to_dict(self)

    def to_tp_plan(self) -> dict[str, str]:
        """The `tp_plan` dict that transformers uses; rows it cannot express raise."""
        from autotp.exports import to_tp_plan

        return to_tp_plan(self)

    def to_python(self) -> str:
        """A script with torch's own `parallelize_module`; rows it cannot express raise."""
        from autotp.exports import to_python

        return to_python(self)

    def __str__(self) -> str:
        from autotp.display import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        cut = sum(row.is_cut for row in self.parameters)
        return (
            f"<Plan {self.model} on {self.mesh}: {cut} of {len(self.parameters)} parameters cut, "
            f"{self.cut_share:.1%} of weight bytes>"
        )

    def __rich__(self) -> Any:
        from autotp.display import plan_renderable

        return plan_renderable(self)

    def _repr_html_(self) -> str:
        from autotp.display import plan_html

        return plan_html(self)


_ITEMSIZES = {"complex128": 16, "complex64": 8, "bool": 1}


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype, by its torch name (without importing torch)."""
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    digits = dtype.removeprefix("torch.").lstrip("abcdefghijklmnopqrstuvwxyz").partition("_")[0]
    return max(1, int(digits) // 8) if digits.isdigit() else 4
