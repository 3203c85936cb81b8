"""Run a model's forward once, on shapes, and record what it did.

Floats are shapes only; integers and booleans keep their content, so masks, positions and routing indices steer the
model's Python as they would in earnest. Integer results of float operations get plausible content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import torch_frames, torch_hooks, torch_ops
from autotp.caches import find_cached_functions, forget_tensors
from autotp.errors import AutotpError
from autotp.functions import close_function, returned_apart
from autotp.held import Layouts, Place, is_object, with_tensors
from autotp.plausible import integer_outputs, reader, scalar
from autotp.record import Call, Enough, Recorder, Trace, Traced
from autotp.repeats import NotAlike
from autotp.trees import Ref, flatten, rebuild
from autotp.twin import MAX_REAL_NUMEL, Twin, make_twin


@dataclass(frozen=True)
class Drive:
    """Runs a model otherwise than by one call of it: ``run(model, args, kwargs)``.

    Recording ends when code outside of the model has called one module ``most_turns`` times (0: no limit).
    """

    run: Callable[[nn.Module, Any, Any], Any]
    most_turns: int = 0


class _Ops(TorchDispatchMode):
    """The inner mode: runs each aten operation on shapes (or on real integers) and records it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = torch_ops.without_device(func, kwargs or {})
        leaves, spec = flatten((args, kwargs))
        unreal = [x for x in leaves if isinstance(x, Tensor) and (isinstance(x, Traced) or x.is_meta)]
        if not unreal and not torch_ops.is_random(func) and _is_small(func, leaves):
            out = func(*args, **kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            out = scalar(args[0])
        else:
            out = self._on_meta(func, leaves, spec)
        rec = self.recorder
        written = torch_ops.written_args(func, args, kwargs)
        if torch_ops.is_random(func):
            rec.trace.random_calls += 1
        implicit = None
        if rec.call is None:
            implicit = rec.call = rec.open_call(func, args, kwargs, ("implicit",))
            implicit.fixed = any(isinstance(x, Traced) for x in leaves)
            implicit.shut = "is called nowhere in the model's code" if implicit.fixed else ""
            implicit.inner, rec.wrapped = rec.wrapped, set()
        rec.op(func, args, kwargs, out, [rec.tid(w) for w in written])
        if implicit is not None:
            rec.call = None
            rec.close_call(implicit, out)
        return out

    def _on_meta(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        memo: dict[int, Tensor] = {}
        metas = [_to_meta(x, memo) if isinstance(x, Tensor) else _no_device(x) for x in leaves]
        args, kwargs = rebuild(metas, spec)
        known = _memo_key(func, args, kwargs)
        if known is not None and known in _SHAPES:
            out = tuple(torch.empty_strided(size, stride, dtype=d, device="meta") for size, stride, d in _SHAPES[known])
            return _wrap(func, out if len(out) > 1 else out[0], {}, leaves)
        originals = {id(m): x for m, x in zip(metas, leaves, strict=True) if isinstance(x, Tensor)}
        content = {i: x for i, x in originals.items() if not isinstance(x, Traced)}
        out = torch_ops.run_on_meta(func, args, kwargs, content)
        made = out if isinstance(out, tuple) else (out,)
        if known is not None and all(isinstance(o, Tensor) for o in made):
            _SHAPES[known] = tuple((tuple(o.shape), o.stride(), o.dtype) for o in made)
        return _wrap(func, out, originals, leaves)


# What an operation makes of given shapes: many are worked out in Python by torch, and layers repeat them.
_SHAPES: dict[Any, tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]] = {}
_MAX_SHAPES = 1 << 16


def _memo_key(func: Any, args: Any, kwargs: Any) -> Any:
    """A key for operations whose result depends on shapes alone and shares no memory; None for others."""
    if not torch_ops.is_pure(func):
        return None
    if len(_SHAPES) > _MAX_SHAPES:
        _SHAPES.clear()
    key = func, _described(args), tuple((k, _described(v)) for k, v in kwargs.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return "tensor", tuple(x.shape), x.stride(), x.dtype
    if isinstance(x, (tuple, list)):
        return tuple(_described(y) for y in x)
    return type(x), x


def _is_small(func: Any, leaves: list[Any]) -> bool:
    if any(isinstance(x, Tensor) for x in leaves):
        return True
    size = 1
    for x in leaves:
        if isinstance(x, int) and not isinstance(x, bool):
            size *= max(abs(x), 1)
    return size <= MAX_REAL_NUMEL or func.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.scalar_tensor)


def _no_device(x: Any) -> Any:
    return torch.device("meta") if isinstance(x, torch.device) else x


def _to_meta(t: Tensor, memo: dict[int, Tensor]) -> Tensor:
    if isinstance(t, Traced):
        return t.inner
    if id(t) not in memo:
        memo[id(t)] = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
    return memo[id(t)]


def _wrap(func: Any, out: Any, originals: dict[int, Tensor], leaves: list[Any]) -> Any:
    """Meta results -> Traced floats and plausible real integers; an argument returned as it is stays itself."""
    if isinstance(out, (tuple, list)):
        ints = integer_outputs(func, out, leaves)
        return type(out)(_wrap_one(o, originals, i) for o, i in zip(out, ints, strict=True))
    return _wrap_one(out, originals, integer_outputs(func, (out,), leaves)[0])


def _wrap_one(o: Any, originals: dict[int, Tensor], plausible: Tensor | None) -> Any:
    if not isinstance(o, Tensor):
        return o
    same = originals.get(id(o))
    if same is not None:
        return same
    return plausible if plausible is not None else Traced(o)


class _Calls(TorchFunctionMode):
    """The outer mode: notes each torch function that Python code calls, with its place in that code."""

    def __init__(
        self, recorder: Recorder, intercept: Callable[..., Any] | None, metadata: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.intercept = intercept
        self.metadata = metadata

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_hooks.asks_for_gradients(func) and self._has_gradients(args[0]):
            return True
        if torch_hooks.is_metadata(func):
            if func is Tensor.retain_grad:
                return None
            out = func(*args, **kwargs)
            return self.metadata(func, args, kwargs, out) if self.metadata is not None else out
        opened = torch_hooks.opened(func)
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        rec = self.recorder
        if rec.call is None and torch_hooks.is_wrapped((*args, *kwargs.values())):
            rec.wrapped.add(torch_frames.call_site())
            return func(*args, **kwargs)
        if rec.call is not None:
            if rec.call.fixed:
                rec.call.inner.add(torch_frames.call_site())
            return func(*args, **kwargs)
        if torch_hooks.reads_gradients(func):
            raise AutotpError(
                f"{func.__name__} at {torch_frames.describe_site(torch_frames.call_site())} acts on gradients inside "
                "of the forward, where a rank may have a part of one, or a term of a sum. Do it outside of the model, "
                "or in a torch.autograd.Function, which is tried on pieces"
            )
        return self.noted(rec.open_call(func, args, kwargs, torch_frames.call_site()), func, args, kwargs)

    def _has_gradients(self, x: Any) -> bool:
        """What ``x.requires_grad`` says in training: recording has gradients off."""
        rec = self.recorder
        tid = rec.ids.get(id(x))
        return rec.trains and rec.call is None and tid is not None and rec.trace.tensors[tid].grad

    def noted(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call and add it to the record."""
        rec = self.recorder
        rec.call = call
        func = (reader(func) if args and isinstance(args[0], Traced) else None) or func
        try:
            if self.intercept is not None:
                result = self.intercept(call, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        finally:
            rec.call = None
        rec.close_call(call, result)
        return result


def _custom(recorder: Recorder, calls: _Calls, function: Any, apply: Any, args: Any, kwargs: Any) -> Any:
    """A custom autograd function is one call and one operation, whatever its forward does: its gradient is its own."""
    if recorder.call is not None:
        return apply(*args, **kwargs)
    if torch_hooks.is_wrapped((*args, *kwargs.values())):
        recorder.wrapped.add(torch_frames.call_site())
        return apply(*args, **kwargs)
    if torch_hooks.recomputes(function):
        return _recomputed(recorder, apply, args, kwargs)
    call = recorder.open_call(function, args, kwargs, torch_frames.call_site())
    call.fixed, known = True, len(recorder.trace.tensors)
    out = calls.noted(call, lambda *a, **k: returned_apart(recorder, call, apply(*a, **k), a), args, kwargs)
    close_function(recorder, call, known)
    return out


def _recomputed(recorder: Recorder, apply: Any, args: Any, kwargs: Any) -> Any:
    """Reentrant checkpointing of whole modules is recomputed right; a module's own code, outside of it, would not."""
    calls, running = recorder.trace.calls, recorder.stack[-1] if recorder.stack else -1
    before = len(calls)
    out = apply(*args, **kwargs)
    own = next((c for c in calls[before:] if c.module == running), None)
    if own is not None:
        raise AutotpError(
            f"{own.name} at {torch_frames.describe_site(own.site)} is recomputed by torch.utils.checkpoint outside of "
            "the module that calls it, where a rank's part of it is not known: checkpoint whole modules"
        )
    return out


@contextmanager
def recording(
    recorder: Recorder, intercept: Callable[..., Any] | None = None, metadata: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Both modes on, gradients and inference mode off, attention in its plain form, torch's inference fast path off."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # in which torch does not take composite operations apart
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch_hooks.plain_attention())
        calls = stack.enter_context(_Calls(recorder, intercept, metadata))
        stack.enter_context(torch_hooks.custom_functions(lambda *a: _custom(recorder, calls, *a)))
        stack.enter_context(_Ops(recorder))
        yield


def as_inputs(tree: Any, recorder: Recorder, held: Layouts | None = None, rank: int | None = None) -> Any:
    """Example inputs -> traced ones: floats lose their data, integers keep it.

    Objects among them (caches) are copied, with their tensors. Those at a place of ``held`` are parts of this rank;
    they are given the shape of the whole, or of a ``rank``'s part.
    """
    leaves, spec = flatten(tree)
    out = []
    for x in leaves:
        if isinstance(x, Tensor):
            x = _input(x, tuple(x.shape), recorder)
        elif is_object(x):
            x = with_tensors(x, lambda place, t: _held_input(place, t, recorder, held or {}, rank))
        out.append(x)
    return rebuild(out, spec)


def _input(x: Tensor, shape: tuple[int, ...], recorder: Recorder) -> Tensor:
    number = x.is_floating_point() or x.is_complex()
    if not number:
        x = torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x.detach().cpu().clone()
    elif shape == tuple(x.shape):
        x = Traced(torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta"))
    else:
        x = Traced(torch.empty(shape, dtype=x.dtype, device="meta"))
    recorder.tid(x, grad=number)
    return x


def _held_input(place: Place, x: Tensor, recorder: Recorder, held: Layouts, rank: int | None) -> Tensor:
    layout, shape = held.get(place), list(x.shape)
    if layout is None or not x.numel():
        return _input(x, tuple(shape), recorder)
    for dim, parts in layout.items():
        shape[dim] = len(set().union(*parts)) if rank is None else len(parts[rank])
    made = _input(x, tuple(shape), recorder)
    recorder.trace.given[recorder.tid(made)] = layout
    return made


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fold: bool = True,
    drive: Drive | None = None,
    held: Layouts | None = None,
) -> Trace:
    """Record one run of ``model(*args, **kwargs)``; the model and the inputs are left as they were.

    With ``fold``, repeated blocks are run once; the leaves of a skipped block then are those of the block it is like.
    ``drive`` runs the model otherwise than by one call of it. ``held``: see :func:`as_inputs`.
    """
    find_cached_functions()
    twin = make_twin(model, fold=fold)
    try:
        with torch_hooks.kept_rng():
            record = run(twin, args, kwargs, drive=drive, held=held)
    except NotAlike:
        return trace(model, args, kwargs, False, drive, held)
    record.folds = fold
    for path, like in record.skipped:
        inside = [name for name in record.leaves if name.startswith(path + ".")]
        record.leaves.update({name: record.leaves[like + name[len(path) :]] for name in inside})
    return record


def draws(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Trace) -> bool:
    """Whether a model draws random numbers, in the mode that was recorded or in training."""
    if record.random_calls or model.training:
        return record.random_calls > 0
    if not any(torch_hooks.may_be_random(c.func) for c in record.calls):
        return False
    twin = make_twin(model, fold=record.folds, follow=record)
    twin.model.train()
    try:
        with torch_hooks.kept_rng():
            return run(twin, args, kwargs, drive=record.drive, held=record.held).random_calls > 0
    except Exception:
        return True  # it does not run in training as it is: be prepared


def run(
    twin: Twin,
    args: Any,
    kwargs: Any,
    intercept: Callable[..., Any] | None = None,
    metadata: Callable[..., Any] | None = None,
    drive: Drive | None = None,
    held: Layouts | None = None,
    rank: int | None = None,
) -> Trace:
    """Run a twin on example inputs under the recorder and return the record."""
    rec = twin.recorder
    rec.trains = twin.model.training
    a, k = as_inputs((args, kwargs), rec, held, rank)
    rec.trace.held = held
    before, built = _bound(twin.model), dict(twin.model.named_modules())
    rec.trace.drive = drive
    rec.most_turns = drive.most_turns if drive is not None else 0
    out = None
    forget_tensors()
    try:
        with recording(rec, intercept, metadata), suppress(Enough):
            out = drive.run(twin.model, a, k) if drive is not None else twin.model(*a, **k)
    finally:
        forget_tensors()
    _refuse_rebuilt(twin.model, built)
    rec.note_held()
    # what the forward leaves behind in buffers and attributes is there for anyone to read, like an output
    left = [t for key, t in _bound(twin.model).items() if before.get(key) is not t and id(t) in rec.ids]
    if drive is not None:
        given = [t for m in rec.trace.modules if m.parent < 0 for t in m.outputs.values()]
    else:
        leaves = rec.refs(out)[0]
        rec.trace.returned = [x for x in leaves if not isinstance(x, Ref)]
        given = [x.tid for x in leaves if isinstance(x, Ref)]
    rec.trace.outputs = [*given, *(rec.ids[id(t)] for t in left)]
    return rec.trace


def _refuse_rebuilt(model: nn.Module, before: dict[str, nn.Module]) -> None:
    """What is applied to modules is lost with them."""
    after = dict(model.named_modules())
    lost = next((path for path, m in before.items() if after.get(path) is not m), None)
    if lost is not None:
        raise AutotpError(
            f"{lost}: the forward puts another module in its place ({type(before[lost]).__name__} before, "
            f"{type(after.get(lost)).__name__} after). Run the model once on inputs of the kind that it will get, so "
            "that it takes its final form, then plan or shard it"
        )


def _bound(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """The tensors that modules hold as buffers or plain attributes."""
    return {
        (path, name): x
        for path, m in model.named_modules()
        for name, x in (*m._buffers.items(), *m.__dict__.items())
        if isinstance(x, Tensor)
    }
