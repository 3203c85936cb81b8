"""Run a module's own code on a rank's part.

Around the forward of a module its parameters are swapped for this rank's plain tensors, inputs and outputs cross the
edge of the cut region. Only where the module's own calls must be edited, or may be others than the planned ones, a
function mode sees them.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp import torch_dynamo, torch_frames, torch_hooks
from autotp.errors import AutotpError, NotPlannedError
from autotp.hoisting import ModuleProgram
from autotp.layouts import to_local
from autotp.styles import traced
from autotp.styles.bound import BoundProgram, OwnCode, Running
from autotp.styles.children import check_children
from autotp.styles.comm import Ranks
from autotp.styles.edits import BoundCall
from autotp.trees import edit_at, flatten


class LocalCalls(TorchFunctionMode):
    """Edits the calls that one module's own code makes, found by their place in it, and refuses unplanned ones."""

    def __init__(
        self, local: LocalForward, program: BoundProgram, base: Any, compiling: bool, handed_on: list[Any] | None
    ) -> None:
        super().__init__()
        self.handed_on = handed_on  # all that is cut here, if that is among the inputs
        self.local, self.program, self.base = local, program, base
        self.table, self.sites, self.ranks = program.table, program.sites, local.ranks
        self.seen: dict[Any, int] = {}
        self.compiling = compiling
        self.met: list[str] = []  # the edited calls that were seen, if it may be compiled
        self.times: dict[str, int] = {}

    @torch_dynamo.uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return traced.entered(self, func, args, kwargs)
        if torch_hooks.is_metadata(func):
            return func(*args, **kwargs)
        site = self.sites.here(self.base)
        if not site:
            return func(*args, **kwargs)
        opened = torch_hooks.opened(func)
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        calls = self._in_pieces(site, func) if self.compiling else self.table.get(site)
        if calls is None:
            return self._unplanned(func, args, kwargs, site)
        if not calls:
            return func(*args, **kwargs)
        if len(calls) == 1:
            return calls[0].run(func, args, kwargs, self.ranks)
        n = self.seen[site] = self.seen.get(site, -1) + 1
        if n >= len(calls):
            return self._unplanned(func, args, kwargs, site)
        return calls[n].run(func, args, kwargs, self.ranks)

    def _in_pieces(self, site: Any, func: Any) -> list[BoundCall] | None:
        """The calls of a place in code that may be a piece of compiled code, between two graphs, or of a graph."""
        if torch_dynamo.in_graph(site):
            return []
        here, compiled = self.program.traced, (self.program.when_compiled or self.program).traced
        key = here.keys[site] if site in self.table else compiled.find(torch_dynamo.places_of(site, func), func)
        for calls in (here.by_key, compiled.by_key):
            if key in calls:
                self.met.append(key)
                return calls[key]
        return [] if key == traced.PASS else None

    def _unplanned(self, func: Any, args: Any, kwargs: Any, site: Any) -> Any:
        """A place that no recorded run reached: fine as long as it computes nothing with tensors of a cut model."""
        result = func(*args, **kwargs)
        read = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.is_floating_point()]
        if any(self.handed_on is None or any(x is y for y in self.handed_on) for x in read):
            where, name = torch_frames.describe_site(site), getattr(func, "__name__", str(func))
            raise NotPlannedError(
                f"{self.local.path or 'the model'}: the call of {name} at {where} was not reached when the plan was "
                "made, so it is not known how it acts on a rank's part. Pass a sample that takes this path: "
                "autotp.shard(model, mesh, sample=(args, kwargs)). Where computed values decide on it, which the next "
                "inputs may change, keep the layers before it whole: rules={'LAYER': 'replicate'}."
            )
        return result


class LocalForward(torch_hooks.Hook):
    """The two hooks around a module's forward. Holds no module, so copies of a module share it."""

    def __init__(self, path: str, module: nn.Module, cut: set[str], ranks: Ranks, model: Running) -> None:
        self.path, self.ranks, self.model, self.cut = path, replace(ranks, at=path or "the model"), model, cut
        self.names, self.kind = list(inspect.signature(module.forward).parameters), type(module)
        self.code = OwnCode.of(module)
        self.programs: dict[Any, BoundProgram] = {}
        self.compiled: BoundProgram | None = None  # the program of forward as the compiler runs it
        self.like: LocalForward | None = None  # stands for all that run alike, where the compiler looks something up
        self.keys: dict[Any, str] = {}  # of places in the code, the same in all programs
        self.running: list[tuple[list[tuple[Any, Any, Any]], LocalCalls | None, Any, BoundProgram]] = []

    def attach(self, module: nn.Module) -> None:
        """Hook it up."""
        self.model.parts.append(self)
        torch_hooks.hook_forward(module, self.before, self.after)

    def learn(self, program: ModuleProgram, mode: Any = None) -> None:
        """Run by a program while the model is in this mode."""
        self.programs[mode] = self._bound(program)

    def learn_compiled(self, program: ModuleProgram | None) -> None:
        """Run by a program where forward is compiled."""
        usual, program = self.programs[None], program or ModuleProgram(self.path)
        self.compiled = usual.when_compiled = usual if program is usual.program else self._bound(program)
        known = (part.like for part in self.model.parts if part.like is not None and self._runs_like(part))
        self.like = next(known, None) or self._standin()
        assert self.like.compiled is not None
        usual.traced.shown = self.compiled.traced.shown = self.like.compiled.traced.shown

    def _standin(self) -> LocalForward:
        """Not itself: that it is the same object would be a condition for the compiler."""
        new = object.__new__(LocalForward)
        new.__dict__.update(self.__dict__, like=new)
        return new

    def _runs_like(self, other: LocalForward) -> bool:
        """Whether the compiler may use for this module what it has made of another."""
        assert self.compiled is not None and other.compiled is not None
        for name in ("kind", "names", "cut", "code", "keys"):
            if getattr(self, name) != getattr(other, name):
                return False
        mine, others = [(x.programs[None].program, x.compiled.program) for x in (self, other)]  # type: ignore[union-attr]
        return all(replace(a, path=b.path) == b for a, b in zip(mine, others, strict=True))

    def _bound(self, program: ModuleProgram) -> BoundProgram:
        return BoundProgram(program, self.ranks, self.model, self.code, self.keys)

    def __reduce__(self) -> Any:
        raise AutotpError(
            "a sharded model cannot be pickled, as it holds the process group of its ranks: save model.state_dict(), "
            "or use copy.deepcopy within the process"
        )

    @torch_dynamo.inlined_only
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Swap parameters, cross the edge inwards, start editing calls."""
        if torch.compiler.is_compiling():
            return torch_dynamo.undone(traced.before, self, module, args, kwargs)
        return self._before(module, args, kwargs, torch_dynamo.active(), sys._getframe(1))

    @torch_dynamo.uncompiled
    def _before(self, module: nn.Module, args: Any, kwargs: Any, compiling: bool, base: Any) -> Any:
        program = self.programs.get(self.model.mode, _EMPTY)
        if compiling and program is self.programs.get(None):
            traced.prepare(self.model)
            if not program.edges_alike():
                raise AutotpError(self.unlike())
        self._check(program, module)
        kept = self._swap(module, program)
        mode, new = self._mode(program, module, args, kwargs, compiling, base)
        self.running.append((kept, mode, new, program))
        self.model.depth += program.reached
        for path, change in program.inputs:
            args, kwargs = edit_at((args, kwargs), self.given(path, args, kwargs), change)
        if mode is not None:
            mode.__enter__()
        return args, kwargs

    def _check(self, program: BoundProgram, module: nn.Module) -> None:
        """Raise if it cannot run by this program, called as it is."""
        if not program.inner:
            self.model.enter()
        elif not self.model.depth and not torch_hooks.in_backward():
            raise AutotpError(self.called_alone())
        if not program.reached and self.model.depth:
            raise NotPlannedError(self.not_reached())
        if program.program.recomputed and torch.is_grad_enabled():
            raise AutotpError(self.recomputed_alone(program))
        if program.region and module._modules:
            check_children(self.path, module)

    def _mode(
        self, program: BoundProgram, module: nn.Module, args: Any, kwargs: Any, compiling: bool, base: Any
    ) -> tuple[LocalCalls | None, Any]:
        """What edits its calls, or watches them; and how it is called, if in a way that is not known to be planned."""
        either = [program, program.when_compiled or program] if compiling else [program]
        edits_calls, new = any(x.edits_calls for x in either), None
        if not edits_calls:
            called = [x.called(module, args, kwargs) for x in either]
            new = next((c for c in called if c is not None), None)
        if not edits_calls and new is None:
            return None, None
        touched = edits_calls or program.inputs or self.cut or any(x.program.touches_cut for x in either)
        handed_on = None if touched else self._handed_on(either, args, kwargs)
        return LocalCalls(self, program, base, compiling, handed_on), new

    def _handed_on(self, programs: list[BoundProgram], args: Any, kwargs: Any) -> list[Any]:
        """The cut tensors among the inputs."""
        found: list[Any] = []

        def note(x: Any) -> Any:
            found.append(x)
            return x

        for path in set().union(*(x.program.cut_inputs for x in programs)):
            edit_at((args, kwargs), self.given(path, args, kwargs), note)
        return found

    def unlike(self) -> str:
        """Why it cannot be compiled in pieces."""
        return (
            f"{self.path or 'the model'} branches on being compiled, and is cut differently then; it cannot be "
            "compiled in pieces (torch.compile with fullgraph=True shows where the graph breaks)"
        )

    def recomputed_alone(self, program: BoundProgram) -> str:
        """Why its own code cannot be checkpointed."""
        return (
            f"{self.path or 'the model'}: {program.program.recomputed} is recomputed in the backward by "
            "torch.utils.checkpoint, outside of the module that calls it, where a rank's part of it is not known: "
            "checkpoint whole modules, or compile the model"
        )

    def not_reached(self) -> str:
        """Why a module that did not run when the plan was made cannot run."""
        return (
            f"{self.path} was not reached when the plan was made, so it is not known whether it gets a "
            "rank's part. Pass a sample that takes this path: autotp.shard(model, mesh, sample=(args, kwargs))."
        )

    def called_alone(self) -> str:
        """Why this module cannot be called from outside of the model's forward."""
        return (
            f"{self.path} works on a rank's part and was called by itself, outside of the model's forward: call "
            "the whole model, or shard this module by itself"
        )

    def swap(self, module: nn.Module, program: BoundProgram) -> list[tuple[Any, Any, Any]]:
        """Put this rank's plain tensors in place of parameters; what stood where, to be put back."""
        self._check_parameters(module)
        kept: list[tuple[Any, Any, Any]] = []
        for name, change in program.params:
            for slots in (module._parameters, module._buffers):
                there = slots.get(name)
                full: Any = self.model.real(there)
                if full is not None and torch_hooks.is_dtensor(full):
                    local = to_local(full)
                    local = change(local) if change is not None else local
                    kept.append((slots, name, there))
                    slots[name] = local  # type: ignore[assignment]
                    _swap_in_lists(module, full, local, kept)
        return kept

    _swap = torch_hooks.unwatched(swap)  # the modes of modules around it need not see it

    def _check_parameters(self, module: nn.Module) -> None:
        for name in self.cut:
            now = self.model.real(module._parameters.get(name))
            if now is not None and not torch_hooks.is_dtensor(now):
                raise AutotpError(
                    f"{self.path}.{name} was replaced by an ordinary tensor {list(now.shape)}, where a rank's part "
                    "is expected: use load_state_dict, or give a DTensor"
                )

    def given(self, path: Any, args: Any, kwargs: Any) -> Any:
        """The place of a planned input when it is given by name instead of by position, or the other way round."""
        where, key = path[0], path[1]
        if where == 0 and key >= len(args) and key < len(self.names) and self.names[key] in kwargs:
            return (1, self.names[key], *path[2:])
        if where == 1 and key not in kwargs and key in self.names and self.names.index(key) < len(args):
            return (0, self.names.index(key), *path[2:])
        return path

    @torch_dynamo.inlined_only
    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Undo what :meth:`before` did, also after an exception, and cross the edge outwards."""
        if torch.compiler.is_compiling():
            return torch_dynamo.undone(traced.after, self, out)
        return self._after(out)

    @torch_dynamo.uncompiled
    def _after(self, out: Any) -> Any:
        if not self.running:
            return out  # it did not get as far as to start
        kept, mode, new, program = self.running.pop()
        self.model.depth -= program.reached
        missing = ""
        if mode is not None:
            mode.base = None
            mode.__exit__(None, None, None)
            missing = program.not_met(set(mode.met)) if mode.compiling and out is not None else ""
        for slots, key, full in kept:
            slots[key] = full
        if missing:
            raise AutotpError(missing)
        if out is not None:
            if new is not None:
                program.followed(new)
            for path, change in program.outputs:
                out = edit_at(out, path, change)
            if not self.path:
                self.model.lengths.remember(out)
        return out


_EMPTY = BoundProgram(ModuleProgram(""), None, None, None, {})  # type: ignore[arg-type]  # no edits, so no ranks


def _swap_in_lists(module: nn.Module, full: Any, local: Any, kept: list[tuple[Any, Any, Any]]) -> None:
    """Recurrent layers keep their weights in a list as well."""
    for value in module.__dict__.values():
        if type(value) is list:
            for i, x in enumerate(value):
                if x is full:
                    kept.append((value, i, full))
                    value[i] = local
