"""Run a module's own code on a rank's part.

Around the forward of a module its parameters are swapped for this rank's plain tensors, inputs and outputs cross the
edge of the cut region, and, only where the module's own calls must be edited, a function mode edits them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp import torch_hooks
from autotp.errors import AutotpError
from autotp.hoisting import ModuleProgram
from autotp.layouts import to_local
from autotp.numbers import edited
from autotp.program import CallEdit, NormEdit, NumberEdit, OperandEdit, ResultEdit
from autotp.styles import tokens
from autotp.styles.comm import Ranks, enter, gather, leave, once, part
from autotp.styles.random import own_draws
from autotp.styles.shared_norm import shared_norm
from autotp.trees import edit_at, flatten, kinds, rebuild

Change = Callable[[Any], Any]


def operand(edit: OperandEdit, ranks: Ranks, model: Running) -> Change:
    """The function that an operand edit is on this rank."""
    of_tokens = edit.of_tokens

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if of_tokens:
            return tokens.operand(edit, ranks, model.lengths, x)
        for dim, indices in edit.gather:
            x = gather(x, dim, indices, ranks)
        if edit.enter:
            x = enter(x, ranks)
        for dim, indices in edit.slice:
            x = part(x, dim, indices[ranks.rank])
        return once(x, ranks) if edit.once else x

    return change


def outcome(edit: ResultEdit, ranks: Ranks, model: Running) -> Change:
    """The function that a result edit is on this rank."""
    of_tokens = edit.of_tokens

    def change(x: Any) -> Any:
        if edit.scale:
            x = x * edit.scale[ranks.rank]
        if of_tokens:
            return tokens.outcome(edit, ranks, model.lengths, not model.depth, x)
        if edit.leave:
            return leave(x, ranks)
        for dim, indices in edit.gather:
            x = gather(x, dim, indices, ranks)
        return x

    return change


@dataclass(frozen=True)
class BoundCall:
    """A call's edits as functions of this rank."""

    operands: tuple[tuple[int, Change], ...]
    numbers: tuple[tuple[int, NumberEdit], ...]
    results: tuple[tuple[int, Change], ...]
    rows: Sequence[int] | None
    norm: NormEdit | None
    random: bool
    stream: int | None
    model: Running

    @classmethod
    def of(cls, edit: CallEdit, ranks: Ranks, model: Running) -> BoundCall:
        return cls(
            tuple((i, operand(e, ranks, model)) for i, e in edit.operands.items()),
            tuple(edit.numbers.get(ranks.rank, {}).items()),
            tuple((i, outcome(e, ranks, model)) for i, e in edit.results.items()),
            edit.rows[ranks.rank] if edit.rows else None,
            edit.norm,
            edit.random,
            edit.stream,
            model,
        )

    def run(self, func: Any, args: Any, kwargs: Any, ranks: Ranks) -> Any:
        leaves, spec = flatten((args, kwargs))
        leaves = [to_local(x) if torch_hooks.is_dtensor(x) else x for x in leaves]
        for i, change in self.operands:
            leaves[i] = change(leaves[i])
        for i, number in self.numbers:
            if isinstance(leaves[i], int) and number.stream is not None:
                leaves[i] = self.model.lengths.number(leaves[i], number)
            elif isinstance(leaves[i], int):
                leaves[i] = edited(leaves[i], number)
        args, kwargs = rebuild(leaves, spec)
        if self.rows is not None:
            result = look_up(self.rows, func, args, kwargs)
        elif self.norm is not None:
            result = shared_norm(self.norm, func, args, kwargs, ranks)
        elif self.random and self._is_cut() and torch_hooks.draws(func, args, kwargs):
            with own_draws(ranks):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if not self.results:
            return result
        outs, out_spec = flatten(result)
        for i, change in self.results:
            outs[i] = change(outs[i])
        return rebuild(outs, out_spec)

    def _is_cut(self) -> bool:
        return self.stream is None or self.model.lengths.parts(self.stream) is not None


def look_up(rows: Sequence[int], func: Any, args: Any, kwargs: Any) -> Tensor:
    """An embedding of which this rank has some rows: the others give zeros."""
    given = torch_hooks.embedding_arguments(func, args, kwargs)
    ids, weight, padding = given["ids"], given["weight"], given["padding_idx"]
    if not rows:
        return weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum() * 0
    if isinstance(rows, range):
        local, missing = ids - rows[0], (ids < rows[0]) | (ids > rows[-1])
    else:
        place = torch.full((int(max(rows[-1], int(ids.max()))) + 1,), -1, dtype=ids.dtype, device=ids.device)
        place[torch.tensor(rows, device=ids.device)] = torch.arange(len(rows), dtype=ids.dtype, device=ids.device)
        local = place[ids]
        missing = local < 0
    local = local.masked_fill(missing, 0)
    at = rows.index(padding) if padding is not None and padding in rows else None
    out = torch.nn.functional.embedding(local, weight, padding_idx=at)
    return out.masked_fill(missing.unsqueeze(-1), 0)


class LocalCalls(TorchFunctionMode):
    """Edits the calls that one module's own code makes, found by their place in that code."""

    def __init__(self, table: dict[Any, list[BoundCall]], ranks: Ranks, path: str, base: Any) -> None:
        super().__init__()
        self.table, self.ranks, self.path, self.base = table, ranks, path, base
        self.seen: dict[Any, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_hooks.is_metadata(func):
            return func(*args, **kwargs)
        site = torch_hooks.call_site(2, self.base)
        if not site:
            return func(*args, **kwargs)
        opened = torch_hooks.opened(func)
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        calls = self.table.get(site)
        if calls is None:
            return self._unplanned(func, args, kwargs, site)
        if len(calls) == 1:
            return calls[0].run(func, args, kwargs, self.ranks)
        n = self.seen[site] = self.seen.get(site, -1) + 1
        if n >= len(calls):
            return self._unplanned(func, args, kwargs, site)
        return calls[n].run(func, args, kwargs, self.ranks)

    def _unplanned(self, func: Any, args: Any, kwargs: Any, site: Any) -> Any:
        """A place that no recorded run reached: fine as long as it computes nothing with tensors of a cut model."""
        result = func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in flatten((args, kwargs))[0]):
            where, name = torch_hooks.describe_site(site), getattr(func, "__name__", str(func))
            raise NotPlannedError(
                f"{self.path or 'the model'}: the call of {name} at {where} was not reached when the plan was made, so "
                "it is not known how it acts on a rank's part. Pass a sample that takes this path: "
                "autotp.shard(model, mesh, sample=(args, kwargs))."
            )
        return result


class NotPlannedError(AutotpError):
    """A sharded model took a path that was not seen when its program was made."""


@dataclass
class Running:
    """Where a sharded model is in this process; its parts share one.

    ``depth`` counts the forwards around the running code that take and give whole tensors, ``turns`` how often one
    was called from outside of the model. ``mode`` names the programs that run (None: those of ``forward``).
    """

    lengths: tokens.Lengths
    depth: int = 0
    turns: int = 0
    mode: Any = None

    def enter(self) -> None:
        """A forward begins that takes and gives whole tensors."""
        if not self.depth:
            self.lengths.known.clear()
            self.turns += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return self


class BoundProgram:
    """A module's program as functions of this rank."""

    def __init__(self, program: ModuleProgram, ranks: Ranks, model: Running, guarded: bool) -> None:
        self.inner, self.reached = program.inner, program.reached
        self.params = [(n, operand(e, ranks, model) if e else None) for n, e in program.params.items()]
        self.inputs = [(p, operand(e, ranks, model)) for p, e in program.inputs.items()]
        self.outputs = [(p, outcome(e, ranks, model)) for p, e in program.outputs.items()]
        self.table = {s: [BoundCall.of(e, ranks, model) for e in edits] for s, edits in program.calls.items()}
        self.edits_calls = program.edits_calls
        self.known = set(program.kinds) if program.holds_cut and guarded else None


class LocalForward(torch_hooks.Hook):
    """The two hooks around a module's forward. Holds no module, so copies of a module share it."""

    def __init__(self, path: str, module: nn.Module, cut: set[str], ranks: Ranks, model: Running) -> None:
        self.path, self.ranks, self.model, self.cut = path, ranks, model, cut
        self.names = list(inspect.signature(module.forward).parameters)
        # torch's own layers have one way to run; code of others may branch on what it is given
        self.guarded = not type(module).__module__.startswith("torch.nn.modules.")
        self.programs: dict[Any, BoundProgram] = {}
        self.running: list[tuple[list[tuple[Any, Any, Any]], LocalCalls | None, Any, BoundProgram]] = []

    def attach(self, module: nn.Module) -> None:
        """Hook it up."""
        module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def learn(self, program: ModuleProgram, mode: Any = None) -> None:
        """Run by a program while the model is in this mode."""
        self.programs[mode] = BoundProgram(program, self.ranks, self.model, self.guarded)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Swap parameters, cross the edge inwards, start editing calls."""
        program = self.programs.get(self.model.mode, _EMPTY)
        if not program.inner:
            self.model.enter()
        elif not self.model.depth and not torch_hooks.in_backward():
            raise AutotpError(
                f"{self.path} works on a rank's part and was called by itself, outside of the model's forward: call "
                "the whole model, or shard this module by itself"
            )
        if not program.reached and self.model.depth:
            raise NotPlannedError(
                f"{self.path} was not reached when the plan was made, so it is not known whether it gets a "
                "rank's part. Pass a sample that takes this path: autotp.shard(model, mesh, sample=(args, kwargs))."
            )
        self._check_parameters(module)
        kept: list[tuple[Any, Any, Any]] = []
        for name, change in program.params:
            for slots in (module._parameters, module._buffers):
                full = slots.get(name)
                if full is not None and torch_hooks.is_dtensor(full):
                    local = to_local(full)
                    local = change(local) if change is not None else local
                    kept.append((slots, name, full))
                    slots[name] = local  # type: ignore[assignment]
                    _swap_in_lists(module, full, local, kept)
        mode, new = None, None
        if program.known is not None and not program.edits_calls:
            called = kinds(module, args, kwargs)
            new = None if called in program.known else called
        if program.edits_calls or new is not None:
            mode = LocalCalls(program.table, self.ranks, self.path, sys._getframe(1))
        self.running.append((kept, mode, new, program))
        self.model.depth += program.reached
        for path, change in program.inputs:
            args, kwargs = edit_at((args, kwargs), self._given(path, args, kwargs), change)
        if mode is not None:
            mode.__enter__()
        return args, kwargs

    def _check_parameters(self, module: nn.Module) -> None:
        for name in self.cut:
            now = module._parameters.get(name)
            if now is not None and not torch_hooks.is_dtensor(now):
                raise AutotpError(
                    f"{self.path}.{name} was replaced by an ordinary tensor {list(now.shape)}, where a rank's part "
                    "is expected: use load_state_dict, or give a DTensor"
                )

    def _given(self, path: Any, args: Any, kwargs: Any) -> Any:
        """The place of a planned input when it is given by name instead of by position, or the other way round."""
        where, key = path[0], path[1]
        if where == 0 and key >= len(args) and key < len(self.names) and self.names[key] in kwargs:
            return (1, self.names[key], *path[2:])
        if where == 1 and key not in kwargs and key in self.names and self.names.index(key) < len(args):
            return (0, self.names.index(key), *path[2:])
        return path

    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Undo what :meth:`before` did, also after an exception, and cross the edge outwards."""
        if not self.running:
            return out  # it did not get as far as to start
        kept, mode, new, program = self.running.pop()
        self.model.depth -= program.reached
        if mode is not None:
            mode.base = None
            mode.__exit__(None, None, None)
        for slots, key, full in kept:
            slots[key] = full
        if out is not None:
            if new is not None and program.known is not None:
                program.known.add(new)  # called in a new way, and every call it made was a planned one
            for path, change in program.outputs:
                out = edit_at(out, path, change)
            if not self.path:
                self.model.lengths.remember(out)
        return out


_EMPTY = BoundProgram(ModuleProgram(""), None, None, False)  # type: ignore[arg-type]  # no edits, so no ranks


def _swap_in_lists(module: nn.Module, full: Any, local: Any, kept: list[tuple[Any, Any, Any]]) -> None:
    """Recurrent layers keep their weights in a list as well."""
    for value in module.__dict__.values():
        if type(value) is list:
            for i, x in enumerate(value):
                if x is full:
                    kept.append((value, i, full))
                    value[i] = local
