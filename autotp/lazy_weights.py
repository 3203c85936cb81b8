"""A tensor that other people's code makes from tensors in files, of which only a slice is ever computed.

``Lazy`` stands for a stored tensor. Code that stacks, joins, splits, transposes and reshapes such tensors runs on it
as it is, on shapes; what it did is remembered. Reading a slice of the result asks each operation, from the last to
the first, which slice of its operands it needs. An operation that is not known here gets its operands whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.index_ranges import Range, shortest
from autotp.parts import pieces
from autotp.stored import Stored, Want, lengths
from autotp.trees import flatten, rebuild

_aten = torch.ops.aten
Rule = Callable[["Computed", Want], Tensor]
_RULES: dict[Any, Rule] = {}


class Lazy(torch.Tensor):
    """A stored or computed tensor without data; it reports a CPU device."""

    source: Stored

    @staticmethod
    def __new__(cls: type[Lazy], source: Stored) -> Lazy:
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(source.shape), dtype=source.dtype, device=torch.device("cpu")
        )
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            raise NotImplementedError(f"{func} writes into a stored tensor")
        return _computed(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Lazy({self.source.key}, {tuple(self.shape)}, {self.dtype})"


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What one operation made of others: the `output`-th of its results."""

    func: Any
    leaves: list[Any]
    spec: Any
    output: int | None
    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def operands(self) -> list[Lazy]:
        """The tensors that went in."""
        return [x for x in self.leaves if isinstance(x, Lazy)]

    @property
    def dim(self) -> int:
        """The dim that joining operations are given."""
        args, kwargs = rebuild(self.leaves, self.spec)
        dim: int = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return dim % len(self.shape)

    def read(self, want: Want) -> Tensor:
        """The wanted part."""
        shape = lengths(want, self.shape)
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        strided = _strided(self)
        if strided is not None:
            return _read_strided(self, strided, want)
        rule = _RULES.get(self.func.overloadpacket)
        return rule(self, want) if rule is not None else pieces(self.whole(), want)

    def whole(self) -> Tensor:
        """All of it, from whole operands."""
        return self.run(lambda x: x.source.read((None,) * x.dim()))

    def run(self, real: Callable[[Lazy], Tensor]) -> Tensor:
        """The operation on other tensors in place of the lazy ones."""
        args, kwargs = rebuild([real(x) if isinstance(x, Lazy) else x for x in self.leaves], self.spec)
        out = self.func(*args, **kwargs)
        return out if self.output is None else out[self.output]


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves, spec = flatten((args, kwargs))
    meta_args, meta_kwargs = rebuild([_on_meta(x) for x in leaves], spec)
    out = func(*meta_args, **meta_kwargs)
    first = next(x.source for x in leaves if isinstance(x, Lazy))

    def made(result: Any, output: int | None) -> Any:
        if not isinstance(result, Tensor):
            return result
        return Lazy(
            Computed(
                func=func, leaves=leaves, spec=spec, output=output, key=first.key, file=first.file,
                shape=tuple(result.shape), dtype=result.dtype,
            )
        )  # fmt: skip

    if isinstance(out, (tuple, list)):
        return type(out)(made(result, i) for i, result in enumerate(out))
    return made(out, None)


def _on_meta(x: Any) -> Any:
    if isinstance(x, Lazy):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if isinstance(x, torch.device):
        return torch.device("meta")
    return x.to("meta") if isinstance(x, Tensor) else x


# ---------------------------------------------------------------- rules: which slice of the operands


def _rule(*packets: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(packets, rule))
        return rule

    return register


def _ranges(want: Want, shape: Sequence[int], dim: int) -> Sequence[Range]:
    given = want[dim]
    return ((0, shape[dim]),) if given is None else given


def _chosen(want: Want, shape: Sequence[int], dim: int) -> list[int]:
    return [i for a, b in _ranges(want, shape, dim) for i in range(a, b)]


def _runs(held: Iterable[int]) -> Sequence[Range]:
    return shortest(0, [(i, i + 1) for i in held])


@_rule(_aten.clone, _aten._to_copy, _aten.detach, _aten.alias)
def _copied(made: Computed, want: Want) -> Tensor:
    return made.operands[0].source.read(want).to(made.dtype)


@_rule(_aten.cat)
def _cat(made: Computed, want: Want) -> Tensor:
    dim, parts = made.dim, []
    for start, stop in _ranges(want, made.shape, dim):
        offset = 0
        for tensor in made.operands:
            low, high = max(start - offset, 0), min(stop - offset, tensor.shape[dim])
            if low < high:
                parts.append(tensor.source.read((*want[:dim], ((low, high),), *want[dim + 1 :])))
            offset += tensor.shape[dim]
    return torch.cat(parts, dim)


@_rule(_aten.stack)
def _stack(made: Computed, want: Want) -> Tensor:
    dim, tensors = made.dim, made.operands
    out = torch.empty(lengths(want, made.shape), dtype=made.dtype)
    for place, i in enumerate(_chosen(want, made.shape, dim)):
        out.select(dim, place).copy_(tensors[i].source.read((*want[:dim], *want[dim + 1 :])))
    return out


@dataclass(frozen=True)
class _Strided:
    """A view whose every dim steps along one dim of the operand."""

    starts: tuple[int, ...]  # per dim of the operand
    steps: dict[int, tuple[int, int]]  # dim of the view (longer than 1) -> dim of the operand, step


def _strided(made: Computed) -> _Strided | None:
    """What a view does, read off the strides that it gives a tensor whose strides are far apart."""
    if len(made.operands) != 1 or all(r.alias_info is None for r in made.func._schema.returns):
        return None
    shape = tuple(made.operands[0].shape)
    base = max(shape, default=1) + 1
    unit = tuple(base ** (len(shape) - 1 - d) for d in range(len(shape)))
    try:
        view = made.run(lambda x: torch.empty_strided(shape, unit, dtype=x.dtype, device="meta"))
    except RuntimeError:
        return None  # it joins or splits dims
    steps: dict[int, tuple[int, int]] = {}
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size == 1:
            continue
        source = next((d for d, u in enumerate(unit) if stride >= u and stride % u == 0), None)
        if source is None or stride // unit[source] >= base:
            return None
        steps[dim] = source, stride // unit[source]
    offset, starts = view.storage_offset(), []
    for u in unit:
        starts.append(offset // u)
        offset %= u
    if len({source for source, _ in steps.values()}) < len(steps):
        return None
    return _Strided(tuple(starts), steps)


def _read_strided(made: Computed, view: _Strided, want: Want) -> Tensor:
    source = made.operands[0]
    inside: list[Sequence[Range] | None] = [((start, start + 1),) for start in view.starts]
    for dim, (of, step) in view.steps.items():
        everything = want[dim] is None and made.shape[dim] == source.shape[of]
        held = (view.starts[of] + step * i for i in _chosen(want, made.shape, dim))
        inside[of] = None if everything else _runs(held)
    order = [of for of, _ in view.steps.values()]
    rest = [d for d in range(source.dim()) if d not in order]
    read = source.source.read(tuple(inside)).permute(*order, *rest)
    return read.reshape(lengths(want, made.shape)).contiguous()


@_rule(_aten.view, _aten._unsafe_view, _aten.reshape, _aten._reshape_alias)
def _reshaped(made: Computed, want: Want) -> Tensor:
    """Dims that are split or joined form groups; of each, the leading dim is read only where it is needed."""
    source = made.operands[0]
    inside: list[Sequence[Range] | None] = []
    sizes: list[int] = []
    places: list[Tensor | None] = []
    for ins, outs in groups(tuple(source.shape), made.shape):
        size = math.prod(source.shape[d] for d in ins[1:])
        if not ins or all(want[d] is None for d in outs):
            inside += [None] * len(ins)
            sizes.append(size * source.shape[ins[0]] if ins else 1)
            places.append(None)
            continue
        flat = _flat([_chosen(want, made.shape, d) for d in outs], [made.shape[d] for d in outs])
        leading = torch.unique(flat // size)
        inside += [_runs(leading.tolist()), *[None] * (len(ins) - 1)]
        sizes.append(len(leading) * size)
        places.append(torch.searchsorted(leading, flat // size) * size + flat % size)
    read = source.source.read(tuple(inside)).reshape(sizes)
    for dim, place in enumerate(places):
        if place is not None and not torch.equal(place, torch.arange(read.shape[dim])):
            read = read.index_select(dim, place)
    return read.reshape(lengths(want, made.shape))


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of dims with equal products, as short as can be: (4, 6) and (2, 2, 6) give [0] with [0, 1], [1] with [2]."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        ins, outs = [i], [j]
        m, n = before[i], after[j]
        i, j = i + 1, j + 1
        while m != n:
            if m < n:
                ins.append(i)
                m, i = m * before[i], i + 1
            else:
                outs.append(j)
                n, j = n * after[j], j + 1
        found.append((ins, outs))
    if i < len(before) or j < len(after):  # trailing dims of size 1
        found.append((list(range(i, len(before))), list(range(j, len(after)))))
    return found


def _flat(chosen: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Row-major numbers of all combinations of the chosen indices."""
    flat = torch.zeros(1, dtype=torch.long)
    for held, size in zip(chosen, sizes, strict=True):
        flat = (flat[:, None] * size + torch.tensor(held, dtype=torch.long)).flatten()
    return flat
