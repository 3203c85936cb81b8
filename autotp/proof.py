"""Prove a rank's program: run it on shapes beside the record of the whole model, call by call.

Every call must come in the recorded order with the recorded arguments; every intermediate must have exactly the local
shape that ownership predicts; calls that only move elements must move the right ones; integers must keep their content.
Where a call's own numbers count something that is cut (``view(B, T, 12, 64)``), the number that makes it fit is
solved for here and becomes part of the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp import torch_frames, torch_hooks
from autotp.answers import Known
from autotp.call_edits import CallEdit, ExpertsEdit, NumberEdit
from autotp.numbers import Numbers, Solver, Unsolvable, edited
from autotp.ownership.dealing import Dealing, local_shape
from autotp.ownership.registry import rule_of
from autotp.ownership.rules_movement import cat, movement
from autotp.record import Call, Trace, Traced
from autotp.trace import run
from autotp.trees import Ref, flatten, rebuild
from autotp.twin import make_twin

MAX_TAGS = 1 << 23
MAX_TRIES = 300


class Unproven(Exception):
    """A call of the local program that does not do what the model does."""

    def __init__(self, call: int, why: str, module: str | None = None) -> None:
        super().__init__(why)
        self.call, self.why, self.module = call, why, module


@dataclass
class Prover:
    """One rank's lockstep run."""

    trace: Trace
    dealing: Dealing
    edits: dict[int, CallEdit]
    rank: int
    at: int = -1

    def __post_init__(self) -> None:
        tensors = self.trace.tensors
        self.moves: list[tuple[Call, list[Any], Any]] = []  # calls that move elements of cut tensors, as they were made
        self.compared: set[tuple[int, int]] = set()  # tensors of this run, which all live as long, and of the record
        self.counted: dict[int, list[int]] = {}  # calls with the places of numbers that count what is cut
        self.written = {tensors[t].storage for op in self.trace.ops for t in op.writes}

    # ------------------------------------------------------------ the run
    def prove(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the local program; raises :class:`Unproven` at the first call that is not right."""
        shapes = {}
        for name, tid in self.trace.leaves.items():
            sets = self.dealing.sets(tid)
            if sets:
                shapes[name] = local_shape(self.trace.tensors[tid].shape, sets, self.rank)
        twin = make_twin(model, shapes, fold=self.trace.folds, follow=self.trace)
        self.recorder = twin.recorder
        try:
            with torch_hooks.kept_rng():
                run(
                    twin, args, kwargs, self.step, self.metadata, self.trace.drive, self.trace.held, self.rank,
                    Known(self.trace.answers) if self.trace.answers else None,
                )  # fmt: skip
        except Unproven:
            raise
        except Exception as e:
            stack = twin.recorder.stack
            module = twin.recorder.trace.modules[stack[-1]].path if stack else None
            text = f"the model's own code fails on a rank's part: {type(e).__name__}: {e}"
            raise Unproven(max(self.at, 0), text, module) from e
        pairs = zip(self.recorder.trace.returned, self.trace.returned, strict=False)
        if any(isinstance(x, _PLAIN) and isinstance(y, _PLAIN) and x != y for x, y in pairs):
            raise Unproven(max(self.at, 0), "the model returns other numbers on a rank's part")
        if len(self.recorder.trace.calls) != len(self.trace.calls):
            raise Unproven(max(self.at, 0), "the model's own code takes another path on a rank's part")

    def moves_alike(self, moves: list[tuple[Call, list[Any], Any]]) -> bool:
        """Whether calls that another rank made on parts of the same shapes move this rank's elements right too."""
        for call, leaves, spec in moves:
            tags = self._tags(call, leaves)
            numbers = self.edits[call.index].numbers.get(self.rank, {})
            if tags is not None and self._moved_wrong(call, numbers, leaves, spec, tags) is not None:
                return False
        return True

    def metadata(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """A parameter read from outside its module's forward is a DTensor there: it shows its global shape."""
        known = self.recorder.ids.get(id(args[0])) if args and getattr(args[0], "_is_param", False) else None
        leaf = self.recorder.trace.tensors[known].leaf if known is not None else None
        if leaf is None or not self.recorder.stack:
            return out
        running = self.recorder.trace.modules[self.recorder.stack[-1]].path
        names = [n for n, t in self.recorder.trace.leaves.items() if t == known]
        if any(n.rpartition(".")[0] == running for n in names):
            return out
        shape = self.trace.tensors[self.trace.leaves[leaf]].shape
        return torch_hooks.with_shape(func, args, kwargs, shape, out)

    def step(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """One call: the counterpart of what :class:`autotp.styles.local.LocalProgram` does at run time."""
        expected = self._expected(call)
        if expected is None:
            return self._unrecorded(call, func, args, kwargs)
        self.at = expected.index
        edit = self.edits[expected.index]
        leaves, spec = flatten((args, kwargs))
        leaves = self._operands(expected, edit, leaves)
        wanted = [self._wanted(expected, i, x) for i, x in enumerate(expected.outs)]
        result = self._run(expected, edit, func, leaves, spec, wanted)
        return self._results(expected, edit, result)

    def _expected(self, call: Call) -> Call | None:
        k = len(self.recorder.trace.calls)
        if k >= len(self.trace.calls):
            return None
        expected = self.trace.calls[k]
        return expected if expected.func == call.func and expected.site == call.site else None

    def _unrecorded(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that is not the next one of the record may only be one that touches no tensor's content."""
        before = len(self.recorder.trace.ops)
        result = func(*args, **kwargs)
        if len(self.recorder.trace.ops) > before or any(isinstance(x, Tensor) for x in flatten(result)[0]):
            where = torch_frames.describe_site(call.site)
            raise Unproven(max(self.at, 0), f"the model's own code takes another path ({call.name} at {where})")
        return result

    # ------------------------------------------------------------ operands and results
    def _operands(self, call: Call, edit: CallEdit, leaves: list[Any]) -> list[Any]:
        if len(leaves) != len(call.leaves):
            raise Unproven(call.index, f"{call.name} gets other arguments on a rank's part")
        out = []
        for i, (x, ref) in enumerate(zip(leaves, call.leaves, strict=True)):
            if isinstance(ref, Ref):
                self._check_operand(call, x, ref.tid)
                op = edit.operands.get(i)
                for d, _ in op.gather if op else ():
                    x = _resized(x, d, self.trace.tensors[ref.tid].shape[d])
                for d, per_rank in op.slice if op else ():
                    x = _select(x, d, per_rank[self.rank])
            out.append(x)
        return out

    def _check_operand(self, call: Call, x: Any, tid: int) -> None:
        shape = self.dealing.local_shape(tid, self.rank)
        if 0 in shape:
            return  # nothing in it
        if not isinstance(x, Tensor) or tuple(x.shape) != shape:
            found = tuple(x.shape) if isinstance(x, Tensor) else x
            raise Unproven(call.index, f"{call.name} gets {found} where a rank's part is {shape}")
        there = self.trace.objects[tid]
        changed = self.trace.tensors[tid].storage in self.written
        known = self.trace.tensors[tid].real and not changed and not self.dealing.sets(tid)
        if known and (id(x), tid) not in self.compared and _real(x) and _real(there) and x.numel() <= 65536:
            if not _same(x, there):
                raise Unproven(call.index, f"{call.name} gets other numbers on a rank's part")
            self.compared.add((id(x), tid))  # lists that grow by a tensor per turn hand over the same ones again

    def _wanted(self, call: Call, i: int, x: Any) -> tuple[int, ...] | None:
        """The local shape of a result before its edit."""
        if not isinstance(x, Ref):
            return None
        shape = self.trace.tensors[x.tid].shape
        edit = self.edits[call.index].results.get(i)
        if edit is not None and edit.scatter:
            return shape
        if edit is not None and edit.gather:
            return local_shape(shape, dict(edit.gather), self.rank)
        return self.dealing.local_shape(x.tid, self.rank)

    def _results(self, call: Call, edit: CallEdit, result: Any) -> Any:
        leaves, spec = flatten(result)
        for i, r in edit.results.items():
            for d, _ in r.gather:
                leaves[i] = _resized(leaves[i], d, self.trace.tensors[call.outs[i].tid].shape[d])
            for d, per_rank in r.scatter:
                leaves[i] = _select(leaves[i], d, per_rank[self.rank])
        return rebuild(leaves, spec) if edit.results else result

    # ------------------------------------------------------------ the call itself
    def _run(self, call: Call, edit: CallEdit, func: Any, leaves: list[Any], spec: Any, wanted: list[Any]) -> Any:
        numbers = edit.numbers.setdefault(self.rank, {})
        if call.index in self.dealing.own.scaled and not numbers:
            self._scale_counts(call, edit, leaves, numbers)
        with torch_hooks.no_modes():
            tags = self._tags(call, leaves) if edit.experts is None else None
        if tags is not None:
            self.moves.append((call, leaves, spec))
        error = "no number in its arguments makes it fit"
        for tried in itertools.islice(
            Solver(self.dealing, edit, self.rank).candidates(call, leaves, numbers),
            MAX_TRIES if call.module >= 0 and not call.fixed else 1,
        ):
            try:
                args, kwargs = rebuild(self._numbers(tried, leaves), spec)
                if edit.rows is not None:
                    args, kwargs = self._any_row(args, kwargs)
                if edit.experts is not None:
                    args, kwargs = rebuild(self._any_expert(edit.experts, leaves), spec)
                if edit.shared is not None:
                    result = self._done_together(call, leaves, wanted)
                else:
                    result = func(*args, **kwargs)
            except Unproven:
                raise
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
                continue
            why = self._wrong(call, leaves, tried, result, wanted, tags, spec)
            if why is None:
                numbers.update(tried)
                return result
            error = why
        where = torch_frames.describe_site(call.site)
        raise Unproven(call.index, f"{call.name} at {where} cannot be made to work on a rank's part: {error}")

    def _wrong(
        self,
        call: Call,
        leaves: list[Any],
        tried: dict[int, NumberEdit],
        result: Any,
        wanted: list[Any],
        tags: Any,
        spec: Any,
    ) -> str | None:
        outs = flatten(result)[0]
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in outs]
        if any(w is None or 0 not in w for w in wanted) and any(
            s != w for s, w in zip(shapes, wanted, strict=False) if w is None or 0 not in w
        ):
            return f"gives {shapes} where a rank's part is {wanted}"
        if tags is not None:
            with torch_hooks.no_modes():  # else the numbered elements would be recorded, and kept
                return self._moved_wrong(call, tried, leaves, spec, tags)
        if self._other_numbers(call, self._numbers(tried, leaves), tried):
            return "gets other numbers on a rank's part"
        return None

    def _other_numbers(self, call: Call, leaves: list[Any], tried: Numbers) -> bool:
        """Whether a call gets numbers or flags that differ from the whole model's, and not by an edit.

        Calls that move elements of a cut tensor may: what they do with them was compared, or is too large to compare.
        """
        cut = any(self.dealing.sets(x.tid) for x in call.leaves if isinstance(x, Ref))
        if cut and self._only(call, {movement, cat}):
            return False
        counted = self.counted.get(call.index, [])
        room = self.dealing.own.choices.room
        if any(room.get(t) for op in self.trace.ops[call.start : call.stop] for t in op.outs):
            return False  # its numbers are the sizes of the result
        return any(
            isinstance(g, _PLAIN) and isinstance(x, _PLAIN) and x != g and i not in tried and i not in counted
            for i, (x, g) in enumerate(zip(leaves, call.leaves, strict=True))
        )

    def _only(self, call: Call, rules: set[Any]) -> bool:
        ops = self.trace.ops[call.start : call.stop]
        return bool(ops) and all(rule_of(op.func) in rules for op in ops)

    def _done_together(self, call: Call, leaves: list[Any], wanted: list[Any]) -> Tensor:
        """A call that the ranks replace together: what comes out has the shape and type that the rules say."""
        x = self.dealing.own.shared[call.index][1]
        mine = next(y for y, ref in zip(leaves, call.leaves, strict=True) if isinstance(ref, Ref) and ref.tid == x)
        made: Tensor = mine.new_empty(wanted[0], dtype=self.trace.tensors[call.outs[0].tid].dtype)
        return made

    def _any_row(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Stand-in indices: at run time each rank looks up only rows it has."""
        ids = args[0] if args else kwargs["input"]
        zeros = torch.zeros_like(ids)
        pad = {"padding_idx": None, "max_norm": None}
        rest = {k: v for k, v in kwargs.items() if k not in ("input", *pad)}
        weight = args[1] if len(args) > 1 else rest.pop("weight")
        return (zeros, weight), {}

    def _any_expert(self, edit: ExpertsEdit, leaves: list[Any]) -> list[Any]:
        """Stand-in indices: at run time each rank is given those of its own experts only."""
        index = leaves[edit.index]
        picked = torch.zeros_like(index) if isinstance(index, Tensor) else 0
        given = picked if edit.rows is None else index[: len(edit.parts[self.rank])]
        return [given if i == edit.index else x for i, x in enumerate(leaves)]

    # ------------------------------------------------------------ numbers
    def _numbers(self, tried: dict[int, NumberEdit], leaves: list[Any]) -> list[Any]:
        return [edited(x, tried[i]) if i in tried else x for i, x in enumerate(leaves)]

    def _scale_counts(self, call: Call, edit: CallEdit, leaves: list[Any], numbers: Numbers) -> None:
        try:
            self.counted[call.index] = Solver(self.dealing, edit, self.rank).scale_counts(call, leaves, numbers)
        except Unsolvable as e:
            raise Unproven(call.index, str(e)) from e

    # ------------------------------------------------------------ what moves
    def _tags(self, call: Call, leaves: list[Any]) -> Any:
        """Element numbers of operands and results, for calls that only move elements; None for others."""
        cut = [x.tid for x in call.leaves if isinstance(x, Ref) and self.dealing.sets(x.tid)]
        if not cut or not self._only(call, {movement, cat}) or call.func in torch_hooks.CONTENT_FREE:
            return None
        refs = list(dict.fromkeys(x.tid for x in call.leaves if isinstance(x, Ref)))
        sizes = [self.trace.objects[t].numel() for t in refs]
        if sum(sizes) > MAX_TAGS:
            return None
        out, start = {}, 0
        for t, n in zip(refs, sizes, strict=True):
            out[t] = torch.arange(start, start + n).view(self.trace.tensors[t].shape)
            start += n
        return out

    def _moved_wrong(
        self, call: Call, tried: dict[int, NumberEdit], leaves: list[Any], spec: Any, tags: Any
    ) -> str | None:
        edit = self.edits[call.index]
        local = []
        for i, ref in enumerate(call.leaves):
            if not isinstance(ref, Ref):
                local.append(leaves[i])
                continue
            t = tags[ref.tid]
            if t.numel() == 0:
                local.append(torch.zeros(leaves[i].shape, dtype=torch.int64))
                continue
            sets = dict(self.dealing.sets(ref.tid))
            op = edit.operands.get(i)
            if op is not None:
                sets = {d: s for d, s in sets.items() if d not in dict(op.gather)} | dict(op.slice)
            for d, s in sets.items():
                t = _select(t, d, s[self.rank])
            local.append(t)
        whole_leaves = [tags[x.tid] if isinstance(x, Ref) else x for x in call.leaves]
        func = call.func
        try:
            with torch_hooks.no_modes(), torch.no_grad():
                whole = func(*rebuild(whole_leaves, spec)[0], **rebuild(whole_leaves, spec)[1])
                part_args, part_kwargs = rebuild(self._numbers(tried, local), spec)
                part = func(*part_args, **part_kwargs)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        for i, (w, p) in enumerate(zip(flatten(whole)[0], flatten(part)[0], strict=True)):
            if not isinstance(w, Tensor) or w.numel() == 0:
                continue
            ref = call.outs[i]
            r = edit.results.get(i)
            made = r.gather if r and (r.gather or r.scatter) else self.dealing.sets(ref.tid).items()
            for d, s in made:
                w = _select(w, d, s[self.rank])
            if not torch.equal(w, p):
                return "moves elements to other places on a rank's part"
        return None


_PLAIN = (int, float, complex, str, torch.dtype)


def _real(x: Tensor) -> bool:
    return not isinstance(x, Traced) and not x.is_meta


def _same(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and a.shape == b.shape and bool(torch.isclose(a, b, equal_nan=True).all())


def _select(x: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    if isinstance(x, Traced):
        return _resized(x, dim, len(indices))
    with torch_hooks.no_modes():
        return x.index_select(dim, torch.tensor(indices, dtype=torch.int64))


def _resized(x: Tensor, dim: int, n: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = n
    with torch_hooks.no_modes():
        if isinstance(x, Traced):
            return Traced(torch.empty(shape, dtype=x.dtype, device="meta"))
        return torch.zeros(shape, dtype=x.dtype)
