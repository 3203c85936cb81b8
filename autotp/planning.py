"""From a model to a plan: example inputs, analysis, and the rows that say what was cut and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autotp import inputs, sequence, torch_hooks, trace
from autotp.analysis import analyse
from autotp.at_rest import cut_at_rest
from autotp.construction import with_buffers
from autotp.errors import InputError, PlanError, StrictError
from autotp.foreign import ForeignPlan, load
from autotp.foreign_proof import as_text, by_hand, judge
from autotp.hoisting import Hoisting, ModuleProgram
from autotp.layouts import Layout
from autotp.mesh import MeshAxes, as_mesh_axes
from autotp.plan_types import Finding, Memory, Plan, Row
from autotp.reasons import rows_of
from autotp.rules import Forced, choices_of, resolve
from autotp.search import Analysis
from autotp.traffic import collectives_of


@dataclass(frozen=True)
class Prepared:
    """Everything that applying a plan needs."""

    plan: Plan
    analysis: Analysis | None
    programs: dict[str, ModuleProgram]
    sample: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def layout(self, name: str) -> Layout | None:
        """How a parameter (or a statistics buffer) is laid out over the ranks; None if whole."""
        if self.analysis is None:
            return None
        sets = self.analysis.dealing.sets(self.analysis.trace.leaves[name])
        for dim, per_rank in sets.items():
            return Layout.from_indices(dim, per_rank)
        return None


def plan(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: Any = None,
    sample: Any = None,
    rules: Mapping[str, str] | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    sequence_parallel: bool = False,
    min_bytes: int = 0,
    strict: bool = False,
) -> Plan:
    """Work out how ``model`` would be cut, without touching its weights and without a process group.

    Args:
        model: any module; its parameters may be on meta.
        tp: number of tensor-parallel ranks; or give ``mesh`` as ``"tp=8,dp=4"`` or a ``DeviceMesh``.
        sample: example inputs, ``(args, kwargs)``, a dict of keyword inputs or a tensor; only shapes, dtypes and
            integer values matter. Or a function that runs the model as you will (some calls with a cache, say): it is
            called with a copy of the model on shapes. Inferred where left out.
        rules: ``{"glob": "style"}``, choices of your own; they win, the last one that matches counts.
        sequence_parallel: between the cut layers, each rank works on a slice of the tokens (norms, dropouts, residual
            adds), where the analysis finds that it can.
        plan: choices to follow, all of them, after proof: a :class:`Plan` or a path to one, a dict of transformers'
            styles (``model.tp_plan``) or a JSON file of one, or a dict of torch's own ``ParallelStyle`` objects.
        min_bytes: parameters smaller than this stay whole.
        strict: raise if a weight matrix that could hold data is left whole.

    Raises:
        AutotpError: no example inputs, a rule that matches nothing or cannot be followed, an unknown mesh axis, a
            plan that does not fit the model or is unsound: then each wrong row is named, with what would be wrong.
    """
    axes = axes_of(tp, mesh)
    return prepare(
        model, axes, sample=sample, rules=rules, plan=plan, sequence_parallel=sequence_parallel,
        min_bytes=min_bytes, strict=strict,
    ).plan  # fmt: skip


def axes_of(tp: int | None, mesh: Any) -> MeshAxes:
    """The mesh from either way of giving it."""
    if (tp is None) == (mesh is None):
        raise PlanError("give either tp=N or mesh=..., as in autotp.plan(model, tp=8)")
    return as_mesh_axes(mesh if mesh is not None else tp)


def prepare(
    model: nn.Module,
    axes: MeshAxes,
    *,
    sample: Any = None,
    rules: Mapping[str, str] | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    sequence_parallel: bool = False,
    min_bytes: int = 0,
    strict: bool = False,
) -> Prepared:
    """Plan, and keep the proved program that the plan stands for."""
    if not any(True for _ in model.parameters()):
        raise PlanError(f"{type(model).__name__} has no parameters: there is nothing to cut")
    _check_plain(model)
    given = load(plan)
    foreign = given if isinstance(given, ForeignPlan) else None
    own = given if isinstance(given, Plan) else None
    sequence_parallel = sequence_parallel or (own is not None and own.sequence_parallel)
    forced = resolve(model, rules, own, min_bytes)
    if axes.tp == 1:
        return _alone(model, axes)
    told: tuple[str, ...] = ()
    with with_buffers(model) as unknown:
        args, kwargs, record = example(model, sample, tokens=axes.tp if sequence_parallel else 1)
        if foreign is not None:
            record = _follow(model, args, kwargs, record, foreign, axes.tp, forced, sequence_parallel)
        force = partial(choices_of, model, forced) if forced.styles or forced.by_size else None
        analysis = analyse(model, args, kwargs, axes.tp, force, record, forced.closed)
        if sequence_parallel:
            whole = sequence.unfolded(model, args, kwargs, force, analysis)
            analysis, told = sequence.cut_tokens(model, args, kwargs, whole)
    forced.check(analysis)
    cut_at_rest(analysis, forced.at_rest)
    programs = Hoisting(analysis).run()
    rows = forced.named(rows_of(model, analysis))
    made = Plan(
        model=type(model).__name__,
        mesh=dict(axes.axes),
        parameters=rows,
        collectives=collectives_of(analysis, programs),
        memory=Memory.of(rows),
        findings=(
            *forced.findings(),
            *(by_hand(analysis, forced.counted) if foreign else ()),
            *_path(record),
            *_tokens(told),
            *_whole(rows),
            *map(_unknown, unknown),
        ),
        sample="a function" if record.drive is not None else inputs.format_sample(args, kwargs),
        sequence_parallel=sequence_parallel,
    )
    if strict:
        _refuse_whole(made)
    return Prepared(made, analysis, programs, (args, kwargs))


def _follow(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: trace.Trace,
    plan: ForeignPlan,
    tp: int,
    forced: Forced,
    sequence_parallel: bool,
) -> trace.Trace:
    """Make a foreign plan's choices ours, if it is sound; the record to plan by."""
    if forced.styles or forced.by_size or sequence_parallel:
        raise PlanError("rules, min_bytes and sequence_parallel cannot be joined with a plan that autotp did not make")
    verdict, record = judge(model, args, kwargs, record, plan, tp)
    if verdict.faults:
        raise PlanError(as_text(verdict.faults, tp), code=verdict.faults[0].code)
    forced.follow(verdict.dims, verdict.notes, closed=verdict.closed, counted=verdict.counted)
    return record


def _check_plain(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if torch_hooks.is_packed(p):
            raise PlanError(
                f"{name} {list(p.shape)} is a {type(p).__name__}, which packs values and scales (a quantised weight): "
                "how it may be cut is not known. Shard the model with ordinary weights"
            )


def example(model: nn.Module, sample: Any, tokens: int = 1) -> tuple[tuple[Any, ...], dict[str, Any], trace.Trace]:
    """The user's example inputs, or the first inferred ones that run, and the record of that run.

    They are made longer if they have fewer ``tokens`` and the model then still runs.
    """
    if callable(sample) and not isinstance(sample, Tensor):
        return (), {}, _driven(model, sample)
    records: list[trace.Trace] = []

    def attempt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        try:
            records[:] = [trace.trace(model, args, kwargs)]
        except Exception as e:
            return e
        return None

    args, kwargs = inputs.resolve(model, sample, attempt)
    if sample is not None:
        failed = attempt(args, kwargs)
        if failed is not None:
            raise InputError(
                f"{type(model).__name__}.forward does not run on the sample given: {type(failed).__name__}: {failed}"
            ) from failed
    longer = inputs.longer(args, kwargs, tokens)
    if longer[0] is not args:
        before = records[0]
        if attempt(*longer) is None:
            return (*longer, records[0])
        records[:] = [before]
    return args, kwargs, records[0]


def _driven(model: nn.Module, run: Any) -> trace.Trace:
    """The record of a function of the user's that runs the model."""
    try:
        record = trace.trace(model, (), {}, drive=trace.Drive(lambda m, *_: run(m)))
    except Exception as e:
        raise InputError(
            f"{type(model).__name__} does not run on shapes by the function given as sample: {type(e).__name__}: {e}"
        ) from e
    if not record.modules:
        raise InputError(f"the function given as sample does not call the {type(model).__name__} that it is given")
    return record


def _path(record: trace.Trace) -> list[Finding]:
    """By which values the path through the model's code was chosen, if it depends on computed ones."""
    text = "the model's code reads values that it computes"
    if record.guessed:
        text += (
            ", which are not known here (on meta, or where it does not run in earnest): comparisons were taken to hold "
            "and numbers to be one. Calls on another path are refused by name in cut regions"
        )
        return [Finding(code="TP-PATH", level="warning", where="", message=text)]
    text += ": planned is the path that it takes on the sample"
    return [Finding(code="TP-PATH", level="note", where="", message=text)] if record.answers else []


def _tokens(told: tuple[str, ...]) -> list[Finding]:
    return [Finding(code="TP-TOKENS", level="warning", where="", message=text) for text in told]


def _alone(model: nn.Module, axes: MeshAxes) -> Prepared:
    """One rank: every parameter whole."""
    from autotp.reasons import whole_rows

    rows = whole_rows(model, "there is one tensor-parallel rank")
    mesh = dict(axes.axes)
    return Prepared(
        Plan(model=type(model).__name__, mesh=mesh, parameters=rows, collectives=(), memory=Memory.of(rows)), None, {}
    )


def _whole(rows: tuple[Row, ...]) -> list[Finding]:
    return [
        Finding(
            code="TP-WHOLE",
            level="warning",
            where=r.name,
            message=f"{list(r.shape)} is whole on every rank: {r.reason}",
        )
        for r in rows
        if len(r.shape) >= 2 and not r.is_cut and r.tied_to is None and math.prod(r.shape) > 1
    ]


def _unknown(buffer: str) -> Finding:
    return Finding(
        code="TP-BUFFER",
        level="warning",
        where=buffer,
        message="is on meta and was taken to be zero; if its content steers the model, the plan may be another one",
    )


def _refuse_whole(made: Plan) -> None:
    found = [f for f in made.findings if f.code == "TP-WHOLE"]
    if found:
        shown = "; ".join(f"{f.where} {f.message}" for f in found[:5])
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise StrictError(f"strict: {len(found)} weight matrices would be whole on every rank: {shown}{more}")
