"""The same local programs, traced by torch.compile.

Dynamo inlines the hooks of :class:`autotp.styles.local.LocalForward` and the mode below. What it must know of the
user's code (which call of the plan is this?) is found at trace time, from its own stack, and is a constant of the
graph. A call that cannot be told for sure is refused; where a graph may break, it then runs as usual.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autotp import torch_dynamo, torch_frames, torch_hooks
from autotp.errors import AutotpError
from autotp.hoisting import ModuleProgram
from autotp.styles.children import check_children
from autotp.torch_dynamo import at_trace
from autotp.trees import edit_at, kinds

if TYPE_CHECKING:
    from autotp.styles.bound import BoundProgram, Running
    from autotp.styles.local import LocalCalls, LocalForward

PASS, _OPEN, REFUSE = "pass", "open", "refuse: "
UNPLANNED = "was not reached when the plan was made"
_ATTENTION: Any = torch_hooks.opened(F.multi_head_attention_forward)


class Places:
    """The calls of a module by the places that dynamo sees."""

    def __init__(self, program: ModuleProgram, table: dict[Any, Any], keys: dict[Any, str]) -> None:
        self.program = program
        self.keys = keys  # one per place in the code, the same in all programs of a module
        for site in table:
            keys.setdefault(site, str(len(keys)))
        self.by_key = {keys[site]: calls for site, calls in table.items()}
        self.shown: set[str] = set()  # calls that dynamo has shown in forwards that it did not inline

    @cached_property
    def _sites(self) -> dict[tuple[Any, ...], list[Any]]:
        sites: dict[tuple[Any, ...], list[Any]] = {}
        for site in self.program.calls:
            sites.setdefault(torch_dynamo.places_of(site, self.program.funcs.get(site)), []).append(site)
        return sites

    def find(self, places: tuple[Any, ...], func: Any) -> str:
        """The key of the planned call, or what to do without one."""
        found, name = self._sites.get(places, []), getattr(func, "__name__", str(func))
        edits = [self.program.calls[site] for site in found]
        if not found:
            return self._elsewhere(places, func)
        if not any(any(e) for e in edits):
            return PASS
        if any(e != edits[0] for e in edits[1:]):
            return f"{REFUSE}two calls in one place of the source, {torch_dynamo.told(places)}, are edited differently"
        if not any(func == self.program.funcs.get(site) for site in found):
            return f"{REFUSE}{self._name(found[0])} at {torch_dynamo.told(places)} is traced as {name}"
        return self.keys[found[0]]

    def _elsewhere(self, places: tuple[Any, ...], func: Any) -> str:
        if func is F.multi_head_attention_forward:
            return _OPEN
        code = getattr(func, "__code__", None)
        inside = [p for p in self._sites if code is not None and p[1:] == places and p[0][0] is code]
        if inside and not any(any(self.program.calls[s]) for p in inside for s in self._sites[p]):
            return PASS
        name = getattr(func, "__name__", str(func))
        return f"{REFUSE}the call of {name} at {torch_dynamo.told(places)} {UNPLANNED}"

    def not_met(self, met: set[str]) -> str:
        """Every edited call of a planned run must have been seen: dynamo does not show all calls to a mode."""
        missing = [{s for s in run if self.keys[s] not in met} for run in self.program.runs]
        if not missing or not all(missing):
            return ""
        site = next(iter(sorted(missing, key=len)[0]))
        return (
            f"{self.program.path or 'the model'}: {self._name(site)} at {torch_frames.describe_site(site)} must be "
            "edited on a rank, but torch.compile does not show it, or the compiled code takes another path than the "
            "plan. Leave this module out of what is compiled, with torch.compiler.disable"
        )

    def _name(self, site: Any) -> str:
        return str(getattr(self.program.funcs.get(site), "__name__", "a call"))


@at_trace
def _begin(local: LocalForward) -> str:
    """Which run of which forward this is."""
    running = local.model
    program = local.programs[None]
    if not program.inner:
        running.graph = torch_dynamo.graph()
    elif not running.depth and not torch_hooks.in_backward() and running.graph != torch_dynamo.graph():
        raise torch_dynamo.refused(local.called_alone())
    if not program.reached and (running.depth or running.graph == torch_dynamo.graph()):
        raise torch_dynamo.refused(local.not_reached())
    return str(torch_dynamo.here().run)


def prepare(model: Running) -> None:
    """Find the programs that run when compiled."""
    if any(part.like is None for part in model.parts):
        programs = model.compiled.programs()
        for part in model.parts:
            if part.like is None:
                part.learn_compiled(programs.get(part.path))


@at_trace
def _prepare(model: Running) -> None:
    """Find the programs; what Python itself has entered by now must be entered alike in both."""
    try:
        prepare(model)
    except AutotpError as e:
        raise torch_dynamo.refused(str(e)) from e
    for part in model.parts:
        if part.running and not part.programs[None].edges_alike():
            raise torch_dynamo.refused(part.unlike())


@at_trace
def _find(local: LocalForward, run: str, func: Any, numbers: bool) -> str:
    """What to do with a call that dynamo is tracing."""
    if torch_hooks.is_metadata(func):
        return PASS
    here = torch_dynamo.here()
    if here.deeper or str(here.run) != (run or str(id(torch_dynamo.value_of("mode").base))):
        return PASS  # another module's
    assert local.compiled is not None
    told = local.compiled.traced.find(here.places, func)
    if not told.startswith(REFUSE):
        if not run:
            local.compiled.traced.shown.add(told)
        return told
    if numbers or UNPLANNED not in told:
        raise torch_dynamo.refused(f"{local.path or 'the model'}: {told[len(REFUSE) :]}")
    return PASS


@at_trace
def _arguments(func: Any, count: int, names: tuple[str, ...]) -> Any:
    """The arguments of a call as they were recorded: None if they are as given."""
    if not hasattr(func, "__code__"):
        return None
    found = torch_dynamo.as_recorded(func, count, names)
    if found is None:
        raise torch_dynamo.refused(f"it is not known how {func.__name__} passes its arguments on")
    return found


@at_trace
def _all_met(program: BoundProgram, met: tuple[str, ...]) -> None:
    missing = program.traced.not_met(set(met))
    if missing:
        raise torch_dynamo.refused(missing)


@at_trace
def _check_children(local: LocalForward) -> None:
    try:
        check_children(local.path, torch_dynamo.value_of("module"))
    except AutotpError as e:
        raise torch_dynamo.refused(str(e)) from e


@at_trace
def _known(program: BoundProgram, called: Any) -> bool:
    return program.knows(torch_dynamo.value_of("module"), called)


class TracedCalls(TorchFunctionMode):
    """:class:`autotp.styles.local.LocalCalls` for a forward that dynamo inlines."""

    def __init__(self, local: LocalForward, run: str) -> None:
        super().__init__()
        self.local, self.run = local, run
        self.met: list[str] = []
        self.times: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return edit(self, self.run, func, args, kwargs or {})


def entered(mode: LocalCalls, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that dynamo traces under a mode that Python itself has entered."""
    _prepare(mode.local.model)
    return edit(mode, "", func, args, kwargs)


def edit(mode: TracedCalls | LocalCalls, run: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one call that dynamo traces, edited if it is the module's own and planned so."""
    like: Any = mode.local.like
    key = _find(like, run, func, _has_numbers(args, kwargs))
    if key == PASS:
        return func(*args, **kwargs)
    if key == _OPEN:
        with mode:
            return _ATTENTION(*args, **kwargs)
    calls = like.compiled.traced.by_key[key]
    if run:
        mode.met.append(key)
    n = 0
    if len(calls) > 1:
        n = mode.times.get(key, 0)
        mode.times[key] = n + 1
        if n >= len(calls):
            _too_often(like, key)
    recorded = _arguments(func, len(args), tuple(kwargs))
    if recorded is not None:
        args, kwargs = _rearranged(recorded, args, kwargs)
    return calls[n].run(func, args, kwargs, like.ranks)


def _has_numbers(args: Any, kwargs: Any) -> bool:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (tuple, list)):
            if _has_numbers(x, {}):
                return True
        elif isinstance(x, torch.Tensor) and x.is_floating_point():
            return True
    return False


@at_trace
def _too_often(local: LocalForward, key: str) -> None:
    raise torch_dynamo.refused(f"{local.path or 'the model'}: call {key} is reached more often than planned")


def _rearranged(recorded: Any, args: Any, kwargs: Any) -> Any:
    given = [*enumerate(args), *kwargs.items()]

    def value(is_given: bool, x: Any) -> Any:
        return next(v for k, v in given if k == x) if is_given else x

    return tuple(value(*x) for x in recorded[0]), {k: value(g, x) for k, g, x in recorded[1]}


def before(local: LocalForward, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """As LocalForward.before, for dynamo. What it looks up is the same for all modules that run alike."""
    _prepare(local.model)
    like: Any = local.like
    run, program = _begin(like), like.compiled
    if program.region:
        _check_children(like)
    kept = local.swap(module, program)
    called = kinds(module, args, kwargs) if program.known is not None else None
    mode: Any = None
    if program.edits_calls or not _known(program, called):
        mode = TracedCalls(like, run)
    local.running.append((kept, mode, None, program))
    for path, change in program.inputs:
        args, kwargs = edit_at((args, kwargs), local.given(path, args, kwargs), change)
    if mode is not None:
        mode.__enter__()
    return args, kwargs


def after(local: LocalForward, out: Any) -> Any:
    """As LocalForward.after, for dynamo."""
    kept, mode, _, program = local.running.pop()
    if mode is not None:
        mode.__exit__(None, None, None)
        _all_met(program, tuple(mode.met))
    for slots, key, full in kept:
        slots[key] = full
    for path, change in program.outputs:
        out = edit_at(out, path, change)
    return out
