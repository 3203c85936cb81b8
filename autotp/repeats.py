"""Repeated blocks are analysed once: a model of 126 equal layers is planned and proved as one of three.

A child of a list-like container is *equal* to a sibling if classes, parameters, buffers and every attribute agree,
except integers that are the child's own position. Every sibling's forward runs while recording; if it then made the
very calls that the second one made (same functions, places, numbers and flow of data), its record is dropped, and
whatever is found for the second holds for it. The first and the last are always kept. That is only done for blocks
that take and give whole tensors and touch nothing outside; whoever uses the record checks that (:func:`whole_edges`),
and records again in full if it is not so. The proof does not run dropped blocks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from autotp.record import Recorder

_OWN = set(nn.Module().__dict__)
_PLAIN = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device)


class NotAlike(Exception):
    """A block that was dropped does something of its own later on: all blocks must be recorded."""


@dataclass(frozen=True)
class Place:
    """A child's class of equal siblings and whether it must run in any case."""

    key: Any
    last: bool


@dataclass
class Repeats:
    """The memory of one recorded run. ``follow`` repeats the decisions of an earlier run instead of making them."""

    recorder: Recorder
    wrap: Callable[[tuple[int, ...], torch.dtype], Tensor]
    places: dict[int, Place] = field(default_factory=dict)
    done: dict[Any, list[int]] = field(default_factory=dict)
    dropped: dict[str, tuple[str, dict[int, int]]] = field(default_factory=dict)  # path -> (like, tensor -> its own)
    kept: set[str] = field(default_factory=set)
    follow: Any = None

    def watch(self, model: nn.Module) -> None:
        """Find equal siblings and let their forwards be skipped."""
        found = [
            (m, Place((id(container), key), m is members[-1]))
            for container in model.modules()
            if isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and len(container) > 3
            for key, members in self._classes(container).items()
            for m in members
        ]
        for m, place in found:
            if id(m) not in self.places:
                self.places[id(m)] = place
                m.forward = self._forward(m, m.forward)

    @staticmethod
    def _classes(container: nn.Module) -> dict[Any, list[nn.Module]]:
        alike: dict[Any, list[tuple[int, nn.Module, list[int]]]] = {}
        for i, child in enumerate(container._modules.values()):
            if child is not None and any(True for _ in child.parameters()):
                numbers: list[int] = []
                alike.setdefault(_signature(child, numbers), []).append((i, child, numbers))
        classes: dict[Any, list[nn.Module]] = {}
        for key, members in alike.items():
            # a number that is every member's own position tells them apart no more than their names do
            own = {j for j in range(len(members[0][2])) if all(numbers[j] == i for i, _, numbers in members)}
            for _, child, numbers in members:
                kept = tuple(n for j, n in enumerate(numbers) if j not in own)
                classes.setdefault((key, kept), []).append(child)
        return {k: ms for k, ms in classes.items() if len(ms) > 3 and len({id(m) for m in ms}) == len(ms)}

    def _forward(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def repeated(*args: Any, **kwargs: Any) -> Any:
            rec = self.recorder
            index = rec.stack[-1]
            if self.follow is not None:
                skip = self.follow.modules[index].same_as if index < len(self.follow.modules) else -1
                return self._skip(index, skip, self.follow, args, kwargs) if skip >= 0 else forward(*args, **kwargs)
            key = (self.places[id(module)].key, sum(rec.turns.values()), self._inputs(args, kwargs))
            seen = self.done.setdefault(key, [])
            out = forward(*args, **kwargs)
            path = rec.trace.modules[index].path
            if len(seen) >= 2 and not self.places[id(module)].last and self._may_drop(path, index, seen[1]):
                rec.trace.forget(index)
                rec.trace.modules[index].same_as = seen[1]
                return out
            if path in self.dropped:
                raise NotAlike
            self.kept.add(path)
            rec.trace.templates[index] = self._template(index, args, kwargs, out)
            seen.append(index)
            return out

        return repeated

    def _may_drop(self, path: str, index: int, like: int) -> bool:
        """Whether a run is like another; one that was dropped before must be so again, with what it has kept."""
        like_path = self.recorder.trace.modules[like].path
        before = self.dropped.get(path, (like_path, {}))
        if path in self.kept or before[0] != like_path or not self._simple(like):
            return False
        same = SameRun(self.recorder.trace, like, index, dict(before[1]))
        if not same.holds():
            return False
        self.dropped[path] = like_path, same.twins
        self.recorder.trace.like.update({b: a for a, b in same.twins.items()})
        return True

    def _inputs(self, args: Any, kwargs: Any) -> Any:
        from autotp.trees import flatten, key_paths

        out: list[Any] = []
        tree = (args, kwargs)
        for path, x in zip(key_paths(tree), flatten(tree)[0], strict=True):
            if isinstance(x, Tensor):
                real = self.recorder.trace.tensors[self.recorder.tid(x)].real
                out.append((path, tuple(x.shape), x.dtype, self.recorder.tid(x) if real else None))
            else:
                out.append((path, x if isinstance(x, _PLAIN) else id(x)))
        return tuple(out)

    def _template(self, index: int, args: Any, kwargs: Any, out: Any) -> Any:
        """The outputs of a run in terms of its inputs: (input path | shape and dtype | the thing itself) per leaf."""
        from autotp.trees import flatten, key_paths

        tree = (args, kwargs)
        given = {id(x): p for p, x in zip(key_paths(tree), flatten(tree)[0], strict=True) if not isinstance(x, _PLAIN)}
        leaves, spec = flatten(out)
        parts: list[Any] = []
        for x in leaves:
            if id(x) in given:
                parts.append(("input", given[id(x)]))
            elif isinstance(x, Tensor):
                if self.recorder.trace.tensors[self.recorder.tid(x)].real:
                    return None
                parts.append(("new", tuple(x.shape), x.dtype))
            elif isinstance(x, _PLAIN):
                parts.append(("same", x))
            else:
                return None
        return parts, spec

    def _simple(self, index: int) -> bool:
        """Whether a run read only its inputs, its own leaves and constants, and wrote to nothing outside."""
        trace = self.recorder.trace
        m = trace.modules[index]
        if trace.templates.get(index) is None:
            return False
        inside: set[int] = set(m.inputs.values())
        for earlier in trace.modules[:index]:  # what the block has kept of its earlier runs, as in a cache
            if earlier.path == m.path:
                calls = trace.calls[earlier.start : earlier.stop]
                inside.update(t for c in calls for op in trace.ops[c.start : c.stop] for t in op.outs if t >= 0)
        for c in trace.calls[m.start : m.stop]:
            for op in trace.ops[c.start : c.stop]:
                for t in op.ins:
                    info = trace.tensors[t]
                    own = info.leaf is not None and info.leaf.startswith(m.path + ".")
                    if t not in inside and not own and info.grad:
                        return False
                inside.update(t for t in op.outs if t >= 0)
                if any(w not in inside or w in m.inputs.values() for w in op.writes):
                    return False
        shared = {t for name, t in trace.leaves.items() if not name.startswith(m.path + ".")}
        return not any(t in shared for name, t in trace.leaves.items() if name.startswith(m.path + "."))

    def _skip(self, index: int, like: int, trace: Any, args: Any, kwargs: Any) -> Any:
        from autotp.trees import flatten, key_paths, rebuild

        tree = (args, kwargs)
        given = dict(zip(key_paths(tree), flatten(tree)[0], strict=True))
        parts, spec = trace.templates[like]
        leaves = []
        for p in parts:
            if p[0] == "new":
                made = self.wrap(p[1], p[2])
                self.recorder.tid(made, grad=True)
                leaves.append(made)
            else:
                leaves.append(given[p[1]] if p[0] == "input" else p[1])
        return rebuild(leaves, spec)


@dataclass
class SameRun:
    """Compares the latest module run with an earlier one, call by call and tensor by tensor."""

    trace: Any
    like: int
    index: int
    twins: dict[int, int] = field(default_factory=dict)

    def holds(self) -> bool:
        """Whether both made the same calls on corresponding tensors."""
        trace, a, b = self.trace, self.trace.modules[self.like], self.trace.modules[self.index]
        if not all(self._twin(t, b.inputs.get(path)) for path, t in a.inputs.items()):
            return False
        mine, theirs = trace.calls[b.start :], trace.calls[a.start : a.stop]
        return len(mine) == len(theirs) and all(self._call(x, y) for x, y in zip(theirs, mine, strict=True))

    def _twin(self, a: int, b: int | None) -> bool:
        if b is None:
            return False
        if a in self.twins:
            return self.twins[a] == b
        x, y = self.trace.tensors[a], self.trace.tensors[b]
        root_a, root_b = (self.trace.modules[i].path + "." for i in (self.like, self.index))
        if x.leaf is not None and x.leaf.startswith(root_a):
            if y.leaf != root_b + x.leaf[len(root_a) :]:
                return False
        elif x.leaf != y.leaf:
            return False
        self.twins[a] = b
        return (x.shape, x.dtype, x.grad, x.real) == (y.shape, y.dtype, y.grad, y.real)

    def _call(self, a: Any, b: Any) -> bool:
        if (a.func, a.site, a.stop - a.start, len(a.leaves)) != (b.func, b.site, b.stop - b.start, len(b.leaves)):
            return False
        if not all(self._leaf(x, y) for x, y in zip(a.leaves, b.leaves, strict=True)):
            return False
        ops = self.trace.ops
        pairs = zip(ops[a.start : a.stop], ops[b.start : b.stop], strict=True)
        return all(
            x.func == y.func
            and len(x.ins) == len(y.ins)
            and all(self._twin(s, t) for s, t in zip((*x.ins, *x.outs), (*y.ins, *y.outs), strict=True) if s >= 0)
            for x, y in pairs
        )

    def _leaf(self, x: Any, y: Any) -> bool:
        if isinstance(x, tuple) and hasattr(x, "tid"):
            return hasattr(y, "tid") and self._twin(x.tid, y.tid)
        return x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and x == y)


def whole_edges(trace: Any, is_cut: Callable[[int], bool]) -> bool:
    """Whether every skipped run, and the run it stands for, gets and gives whole tensors only.

    What a block returns and nobody reads (attention weights, often) does not count.
    """
    readers: dict[int, list[int]] = {}
    for op in trace.ops:
        for t in op.ins:
            readers.setdefault(t, []).append(op.call)
    returned = set(trace.outputs)

    def used(m: Any, t: int) -> bool:
        return t in returned or any(not m.start <= c < m.stop for c in readers.get(t, ()))

    for m in trace.modules:
        if m.same_as >= 0:
            for run in (m, trace.modules[m.same_as]):
                if any(map(is_cut, run.inputs.values())):
                    return False
                if any(is_cut(t) and used(run, t) for t in run.outputs.values()):
                    return False
    return True


def _signature(module: nn.Module, numbers: list[int]) -> Any:
    """All that tells one module from another, but for the integers in its attributes, which are added to `numbers`."""
    params = tuple(
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module._parameters.items() if p is not None
    )
    buffers = tuple((n, _buffer(b)) for n, b in module._buffers.items() if b is not None)
    attributes = tuple((k, _value(v, numbers, 0)) for k, v in module.__dict__.items() if k not in _OWN)
    children = tuple((n, _signature(c, numbers)) for n, c in module._modules.items() if c is not None)
    return type(module), params, buffers, attributes, children, module.training


def _buffer(b: Tensor) -> Any:
    small = not b.is_meta and type(b) is Tensor and b.numel() <= 4096
    return tuple(b.shape), b.dtype, b.numpy().tobytes() if small and b.dtype != torch.bfloat16 else None


def _value(v: Any, numbers: list[int], depth: int) -> Any:
    if type(v) is int:
        numbers.append(v)
        return "a number"
    if isinstance(v, _PLAIN):
        return type(v), v
    if isinstance(v, (list, tuple, set, frozenset)) and depth < 3:
        return type(v), tuple(_value(x, numbers, depth + 1) for x in v)
    if isinstance(v, dict) and depth < 3:
        return tuple((str(k), _value(x, numbers, depth + 1)) for k, x in v.items())
    if isinstance(v, types.FunctionType):
        cells = tuple(_value(c.cell_contents, numbers, depth + 1) for c in v.__closure__ or ()) if depth < 3 else id(v)
        return v.__code__, cells
    if isinstance(v, functools.partial) and depth < 3:
        return tuple(_value(x, numbers, depth + 1) for x in (v.func, v.args, v.keywords))
    return v if isinstance(v, type) else id(v)
