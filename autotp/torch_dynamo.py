"""Private corners of torch's compiler: where in the user's code it is while it traces, and what it may overlook.

Dynamo runs the user's bytecode symbolically, so there are no frames to look at; its own stack of translators takes
their place. A place is (code object, positions in the source), because dynamo rewrites the bytecode and offsets move.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch.overrides import TorchFunctionMode

from autotp import torch_frames
from autotp.errors import AutotpError

F = TypeVar("F", bound=Callable[..., Any])
Place = tuple[types.CodeType, tuple[int | None, ...]]


def at_trace(function: F) -> F:
    """Run by dynamo while it traces, on constants and objects that are there already; its result is a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inlined_only(function: F) -> F:
    """Traced as part of what calls it; never compiled by itself."""
    return _not_by_itself(function, _FrameAction.DEFAULT)


def uncompiled(function: F) -> F:
    """Called by Python, neither it nor what it calls is compiled; but it may be traced as part of what calls it."""
    return _not_by_itself(function, _FrameAction.SKIP)


def _not_by_itself(function: F, inside: _FrameAction) -> F:
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, inside))
    return function


def undone(function: Callable[..., Any], *args: Any) -> Any:
    """Call what changes Python objects and is undone in the same forward, also inside of activation checkpoints."""
    return torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


def changing(holder: Any, name: str) -> int | None:
    """An attribute that is another number from call to call (None: it is not there): followed as a tensor's size is.

    Dynamo takes the numbers in modules, and in what hangs on them, for constants, and would compile again for each.
    It reads a number when something depends on it, hence the comparison.
    """
    if not torch.compiler.is_compiling():
        return getattr(holder, name, None)
    with torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True):
        n = getattr(holder, name, None)
        return n if n is not None and n >= 0 else None


def active() -> bool:
    """Whether what Python calls now is being compiled, if it can be."""
    return get_eval_frame_callback() not in (None, False)


# ---------------------------------------------------------------- places


@functools.cache
def _positions(code: types.CodeType) -> list[tuple[int | None, ...]]:
    return list(code.co_positions())


def _origin(code: types.CodeType) -> tuple[types.CodeType, bool]:
    """The code as it was written, of code that dynamo made; and whether it goes on after a graph break."""
    if "torch._dynamo" not in sys.modules:
        return code, False
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.utils import orig_code_map

    goes_on = False
    while True:
        resumed = ContinueExecutionCache.generated_code_metadata.get(code)
        before = resumed.code if resumed is not None else orig_code_map.get(code)
        if before is None:
            return code, goes_on
        code, goes_on = before, goes_on or resumed is not None


def _places(frames: Iterable[tuple[types.CodeType, tuple[int | None, ...]]]) -> tuple[Place, ...]:
    """Frames from the inside out as places in written code. What goes on after a graph break is called by its past."""
    places, past = [], False
    for code, positions in frames:
        if not _is_passage(code):
            written, goes_on = _origin(code)
            if not past:
                places.append((written, positions))
            past = goes_on
    return tuple(places)


def places_of(site: tuple[Any, ...], func: Any) -> tuple[Place, ...]:
    """A recorded site as the places that dynamo sees: it calls torch's own Python functions without entering them."""
    if site and site[0][0] is getattr(func, "__code__", None):
        site = site[1:]
    return _places((code, _positions(code)[lasti // 2]) for code, lasti in filter(_is_frame, site))


def _is_frame(x: Any) -> bool:
    return isinstance(x, tuple)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_DYNAMO = _TORCH + "_dynamo" + os.sep
_PASSAGES = (_TORCH + "utils" + os.sep, _TORCH + "autograd" + os.sep, _DYNAMO, _TORCH + "_compile.py")


def _is_passage(code: types.CodeType) -> bool:
    """Whether a frame only leads to the user's code: decorators, checkpoints. Dynamo sees some of them, not all."""
    return code.co_filename.startswith(_PASSAGES) or torch_frames.is_machinery(code)


_GRAPHS = tuple(_TORCH + part for part in (f"_functorch{os.sep}_aot", f"_functorch{os.sep}aot", "_inductor", "_dynamo"))


def in_graph(site: tuple[Any, ...]) -> bool:
    """Whether a call comes from a compiled graph, not from the user's code."""
    files = [frame[0].co_filename for frame in site if isinstance(frame, tuple)]
    return any(f.startswith(_GRAPHS) or f.startswith("<eval_with_key>") for f in files)


@dataclass(frozen=True)
class Here:
    """Where dynamo is: the places from the inside out, up to the run of a module's forward, and which run that is."""

    places: tuple[Place, ...]
    run: int  # identity of the frame, or of dynamo's stand-in for it, that runs the nearest forward with hooks
    deeper: bool  # a module without hooks runs inside of that forward


def here() -> Here:
    """Called while dynamo traces."""
    tx = _translator()
    found: list[Place] = []
    modules = len(tx.nn_module_stack)
    while tx is not None:
        if torch_frames.is_boundary(tx.f_code):
            return Here(_places(found), id(tx), modules > len(tx.nn_module_stack))
        found.append((tx.f_code, tuple(tx.current_instruction.positions or ())))
        tx = getattr(tx, "parent", None)
    frame = _above_compiler()  # Python itself has called what is being traced
    while frame is not None and not torch_frames.is_boundary(frame.f_code):
        found.append((frame.f_code, _positions(frame.f_code)[frame.f_lasti // 2]))
        frame = frame.f_back
    return Here(_places(found), id(frame), modules > 0)


def _above_compiler() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "__call__" and _is_converter(frame)):
        frame = frame.f_back
    while frame is not None and _is_converter(frame):
        frame = frame.f_back
    return frame


def _is_converter(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename == _DYNAMO + "convert_frame.py"


def graph() -> weakref.ref[Any]:
    """The graph that dynamo is building."""
    return weakref.ref(_translator().output)


def _translator() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.current_tx


def value_of(name: str) -> Any:
    """A local variable of the function that dynamo is tracing, as it is outside; the graph does not depend on it."""
    return _translator().symbolic_locals[name].realize().value


def told(places: tuple[Place, ...]) -> str:
    """``file.py:123`` of the innermost place."""
    code, positions = places[0] if places else (told.__code__, (0,))
    return f"{os.path.basename(code.co_filename)}:{positions[0] if positions else code.co_firstlineno}"


def refused(message: str) -> AutotpError:
    """An error that dynamo takes for a graph break: where graphs may break, the module runs untraced instead."""
    from torch._dynamo.exc import Unsupported

    class CompileError(AutotpError, Unsupported):
        """Something that torch.compile cannot be told for sure."""

        default_code = "TP-COMPILE"

        def __init__(self, message: str) -> None:
            Unsupported.__init__(self, message, gb_type="autotp")
            self.code = self.default_code

    return CompileError(f"{message}. (torch.compile with fullgraph=False runs it uncompiled)")


# ---------------------------------------------------------------- arguments


class _Marker:
    """Stands for an argument; the first torch function that gets one says how it got its arguments."""

    def __init__(self, name: int | str) -> None:
        self.name = name


class _Found(Exception):
    pass


class _Catch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Found(func, args, kwargs or {})


def as_recorded(func: Any, count: int, names: tuple[str, ...]) -> tuple[Any, Any] | None:
    """How a torch function in Python passes on its arguments when it is overridden, which is how they were recorded.

    Args:
        count, names: how many arguments it is given by position, and the names of the others.

    Returns:
        The arguments by position and by name, each as (given, which) or (not given, its default); None if it is not
        overridden as a whole, but by what it calls.
    """
    given = [_Marker(i) for i in range(count)]
    named = {n: _Marker(n) for n in names}
    try:
        with _Catch():
            func(*given, **named)
    except _Found as found:
        caught, args, kwargs = found.args
        if caught is func:
            return tuple(map(_told, args)), tuple((k, *_told(v)) for k, v in kwargs.items())
    except Exception:
        pass  # it looked into its arguments first
    return None


def _told(x: Any) -> tuple[bool, Any]:
    return (True, x.name) if isinstance(x, _Marker) else (False, x)
