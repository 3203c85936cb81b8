"""Run a model's forward once, on shapes, and record what it did.

Floats are shapes only; integers and booleans keep their content, so masks, positions and routing indices steer the
model's Python as they would in earnest. Integer results of float operations get plausible content.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp import torch_frames, torch_hooks
from autotp.answers import Heard, Known, is_float, listen
from autotp.caches import find_cached_functions, forget_tensors
from autotp.errors import AutotpError
from autotp.functions import close_function, returned_apart
from autotp.held import Layouts, Place, is_object, with_tensors
from autotp.operations import Operations
from autotp.plausible import reader
from autotp.record import Call, Enough, Recorder, Trace, Traced
from autotp.repeats import NotAlike
from autotp.trees import Ref, flatten, rebuild
from autotp.twin import Twin, make_twin


@dataclass(frozen=True)
class Drive:
    """Runs a model otherwise than by one call of it: ``run(model, args, kwargs)``.

    Recording ends when code outside of the model has called one module ``most_turns`` times (0: no limit).
    """

    run: Callable[[nn.Module, Any, Any], Any]
    most_turns: int = 0


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
        read = reader(func) if args and is_float(args[0]) else None
        if read is not None:
            unreal = isinstance(args[0], Traced)
            func = rec.asking.reading(call.index, func, args[0], read if unreal else func, unreal=unreal)
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
        stack.enter_context(Operations(recorder))
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
    asking, failed, record = twin.recorder.asking, None, None
    try:
        record = _recorded(twin, args, kwargs, drive, held)
    except NotAlike:
        return trace(model, args, kwargs, False, drive, held)
    except Exception as e:
        if not (asking.guessed or asking.guesses):
            raise
        failed = e
    if (asking.guessed or failed is not None) and held is None and not (drive is not None and drive.most_turns):
        record = _answered(model, args, kwargs, drive) or record
    if record is None:
        assert failed is not None
        raise failed
    return record


def _answered(model: nn.Module, args: Any, kwargs: Any, drive: Drive | None) -> Trace | None:
    """The record of a run that reads what a real one gives; None if that cannot be had."""

    def run_really(twin: nn.Module) -> Any:
        a, k = copy.deepcopy((args, kwargs))
        return drive.run(twin, a, k) if drive is not None else twin(*a, **k)

    heard = listen(model, run_really)
    if heard is None:
        return None
    try:
        return _recorded(make_twin(model, fold=False), args, kwargs, drive, None, heard)
    except Exception:
        return None


def _recorded(
    twin: Twin, args: Any, kwargs: Any, drive: Drive | None, held: Layouts | None, source: Heard | None = None
) -> Trace:
    with torch_hooks.kept_rng():
        record = run(twin, args, kwargs, drive=drive, held=held, source=source)
    record.folds = twin.folds
    for path, like in record.skipped:
        inside = [name for name in record.leaves if name.startswith(path + ".")]
        record.leaves.update({name: record.leaves[like + name[len(path) :]] for name in inside})
    record.guessed = twin.recorder.asking.guessed
    if source is not None:
        record.answers = twin.recorder.asking.used
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
    source: Heard | Known | None = None,
) -> Trace:
    """Run a twin on example inputs under the recorder and return the record."""
    rec = twin.recorder
    rec.trains = twin.model.training
    a, k = as_inputs((args, kwargs), rec, held, rank)
    rec.trace.held = held
    before, built = _bound(twin.model), dict(twin.model.named_modules())
    rec.trace.drive, rec.asking.source = drive, source
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
