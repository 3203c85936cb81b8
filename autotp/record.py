"""The record of a model's run, and what writes it.

Nouns
    Traced      a float tensor of the recorded run: a shape, a dtype, and no data
    Tensor ids  every tensor of the run has one; parameters and buffers are *leaves* and keep their name
    Op          one aten operation: the level at which owners are carried (:mod:`autotp.ownership`)
    Call        one torch function as the user's code called it: the level at which a rank's program is edited
    ModuleCall  one run of a module's forward, with the tensors that went in and came out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotp.answers import Asking
from autotp.errors import AutotpError
from autotp.held import is_object, tensors_in
from autotp.trees import Ref, flatten, key_paths, rebuild


class Traced(torch.Tensor):
    """A float tensor without data: it reports a CPU device and carries a meta tensor inside."""

    inner: Tensor  # type: ignore[assignment]  # torch keeps that name for Tensor.inner

    @staticmethod
    def __new__(cls: type[Traced], inner: Tensor) -> Traced:
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cpu"),
        )
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AutotpError(f"{func} was called on a traced tensor outside of the recorded run")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        return self


@dataclass(slots=True)
class Op:
    """One aten operation. ``args``/``kwargs`` hold :class:`Ref` where tensors were; ``outs`` are tensor ids."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: list[int]
    outs: list[int]
    writes: list[int]
    call: int


@dataclass(slots=True)
class Call:
    """One torch function called by the user's code (or by a module of torch itself)."""

    index: int
    func: Any
    site: tuple[Any, ...]
    module: int
    leaves: list[Any]
    spec: Any
    start: int
    stop: int = 0
    outs: list[Any] = field(default_factory=list)
    fixed: bool = False  # a custom autograd function: neither it nor what happens inside of it can be edited
    shut: str = ""  # why nothing is known of it but for whole tensors
    inner: set[tuple[Any, ...]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))


@dataclass(slots=True)
class ModuleCall:
    """One run of a module's forward; ``inputs`` and ``outputs`` map a key path to a tensor id."""

    index: int
    path: str
    parent: int
    inputs: dict[tuple[Any, ...], int]
    start: int
    outputs: dict[tuple[Any, ...], int] = field(default_factory=dict)
    stop: int = 0
    kinds: tuple[Any, ...] = ()
    same_as: int = -1  # this run was skipped: it is like that earlier one


@dataclass(slots=True)
class TensorInfo:
    """What is known of one tensor: shape, dtype, its leaf name, whether a gradient can reach it, its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    leaf: str | None
    grad: bool
    storage: int
    real: bool
    parameter: bool = False


@dataclass(slots=True)
class Trace:
    """The record of one run. ``leaves`` maps a parameter's or buffer's name to its tensor id (tied names share it)."""

    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    tensors: list[TensorInfo] = field(default_factory=list)
    objects: list[Tensor] = field(default_factory=list)
    leaves: dict[str, int] = field(default_factory=dict)
    canonical: dict[str, str] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)  # the outputs' leaves that are no tensors
    random_calls: int = 0
    templates: dict[int, Any] = field(default_factory=dict)
    folds: bool = True
    draws: bool = True  # whether the model draws random numbers, in this mode or in training
    drive: Any = None  # what ran the model, if not one call of it
    held: Any = None  # layouts of the tensors in objects among the inputs
    given: dict[int, Any] = field(default_factory=dict)  # tensors in such objects of which ranks have parts
    kept: dict[Any, int] = field(default_factory=dict)  # what such objects, and results, hold at the end, by its place
    answers: dict[int, list[Any]] = field(default_factory=dict)  # by call: what a real run said of computed integers
    guessed: bool = False  # whether the model's code read computed values that are not known
    like: dict[int, int] = field(default_factory=dict)  # a tensor of a skipped block -> that of the block it is like

    @property
    def shut(self) -> frozenset[int]:
        """The calls of which nothing is known but for whole tensors."""
        return frozenset(c.index for c in self.calls if c.shut)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Paths of skipped blocks, each with the path of the block it is like."""
        return [(m.path, self.modules[m.same_as].path) for m in self.modules if m.same_as >= 0]

    @property
    def given_back(self) -> set[int]:
        """Tensors that the model returns and that nothing else reads afterwards, if it was called once."""
        roots = [m for m in self.modules if m.parent < 0]
        if len(roots) != 1 or self.drive is not None:
            return set()
        return set(roots[0].outputs.values()) - set(Counter(self.outputs) - Counter(roots[0].outputs.values()))

    def forget(self, index: int) -> None:
        """Drop the calls and inner module runs of the latest module run; its tensors stay."""
        start = self.modules[index].start
        if start < len(self.calls):
            del self.ops[self.calls[start].start :]
            del self.calls[start:]
        del self.modules[index + 1 :]

    def module_path(self, call: Call) -> str:
        """The path of the module whose code makes a call; the root's for code outside of the model."""
        return self.modules[call.module].path if call.module >= 0 else ""


class Enough(Exception):
    """The part of a run that was to be recorded has been."""


class Recorder:
    """Holds the record while the twin runs; the two modes below write into it."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.ids: dict[int, int] = {}
        self.alike: dict[int, list[int]] = {}  # storage -> the tensors that share it
        self.stack: list[int] = []
        self.call: Call | None = None
        self.trains = False  # whether the model is in training, where gradients are on (recording has them off)
        self.wrapped: set[tuple[Any, ...]] = set()  # places of calls under vmap since the last one that was recorded
        self.turns: Counter[str] = Counter()
        self.objects: list[Any] = []
        self.asking = Asking()
        self.most_turns = 0  # how often one module may be called from outside before the recording ends; 0: no limit

    def turn(self, path: str) -> None:
        """Code outside of the model calls a module."""
        self.turns[path] += 1
        if self.most_turns and self.turns[path] > self.most_turns:
            raise Enough

    # ---- tensors
    def tid(self, t: Tensor, leaf: str | None = None, grad: bool = False) -> int:
        known = self.ids.get(id(t))
        if known is not None:
            return known
        inner = t.inner if isinstance(t, Traced) else t
        tid = len(self.trace.tensors)
        grad = grad or (leaf is None and t.requires_grad)
        real, storage = not isinstance(t, Traced), inner.untyped_storage()._cdata
        self.trace.tensors.append(TensorInfo(tuple(inner.shape), inner.dtype, leaf, grad, storage, real))
        self.trace.objects.append(t)
        self.alike.setdefault(storage, []).append(tid)
        self.ids[id(t)] = tid
        return tid

    def note_objects(self, tree: Any) -> None:
        """Remember the objects among the arguments or results of the model."""
        self.objects += [x for x in flatten(tree)[0] if is_object(x)]

    def note_inputs(self, tids: Iterable[int]) -> None:
        """What code outside of the model hands to it may have any content, and may want a gradient."""
        for info in (self.trace.tensors[t] for t in tids):
            if info.leaf is None and (info.dtype.is_floating_point or info.dtype.is_complex):
                info.grad, info.real = True, False

    def note_held(self) -> None:
        """The tensors that the objects hold by now."""
        for x in {id(x): x for x in self.objects}.values():
            self.trace.kept.update({place: self.ids[id(t)] for place, t in tensors_in(x) if id(t) in self.ids})

    def refs(self, tree: Any) -> tuple[list[Any], Any]:
        leaves, spec = flatten(tree)
        return [Ref(self.tid(x)) if isinstance(x, Tensor) else x for x in leaves], spec

    def by_path(self, tree: Any) -> dict[tuple[Any, ...], int]:
        pairs = zip(key_paths(tree), self.refs(tree)[0], strict=True)
        return {path: x.tid for path, x in pairs if isinstance(x, Ref)}

    # ---- ops
    def op(self, func: Any, args: Any, kwargs: Any, out: Any, writes: list[int]) -> None:
        leaves, spec = self.refs((args, kwargs))
        ins = [x.tid for x in leaves if isinstance(x, Ref)]
        grad = any(self.trace.tensors[i].grad for i in ins)
        outs = []
        for o in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(o, Tensor):
                tid = self.tid(o, grad=grad and (o.is_floating_point() or o.is_complex()))
                outs.append(tid)
            else:
                outs.append(-1)
        for w in writes:
            self._written(w, grad, all(self.trace.tensors[i].real for i in ins))
        a, k = rebuild(leaves, spec)
        call = self.call.index if self.call else -1
        self.trace.ops.append(Op(func, a, k, ins, outs, writes, call))

    def _written(self, tid: int, grad: bool, real: bool) -> None:
        """A write through a view reaches all tensors of the storage: what they were made from, and other views."""
        for t in self.alike.get(self.trace.tensors[tid].storage, ()):
            info = self.trace.tensors[t]
            info.grad |= grad
            info.real &= real

    # ---- calls and modules
    def open_call(self, func: Any, args: Any, kwargs: Any, site: tuple[Any, ...]) -> Call:
        leaves, spec = self.refs((args, kwargs))
        module = self.stack[-1] if self.stack else -1
        return Call(len(self.trace.calls), func, site, module, leaves, spec, len(self.trace.ops))

    def close_call(self, call: Call, result: Any) -> None:
        call.stop = len(self.trace.ops)
        if call.stop > call.start or any(isinstance(x, Tensor) for x in flatten(result)[0]):
            call.outs = self.refs(result)[0]
            self.trace.calls.append(call)
