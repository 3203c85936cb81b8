"""A plan in other people's words: the `tp_plan` of transformers, and a stock torch script.

Both are keyed by module, with `*` for layer numbers. What they cannot say is an error that lists
the rows, never a plan that does less.
"""

from __future__ import annotations

from collections.abc import Callable

from autotp.errors import PlanError
from autotp.folding import fold_names, fold_rows, split_pattern, unfold_name
from autotp.plan_types import Plan, Row

WHOLE = "replicate"

# torch's own spelling of a style, and the dim that it cuts.
_STOCK = {
    "colwise": ("ColwiseParallel()", 0),
    "colwise_gather_output": ("ColwiseParallel(output_layouts=Replicate())", 0),
    "rowwise": ("RowwiseParallel()", 1),
    "rowwise_split_input": ("RowwiseParallel(input_layouts=Replicate())", 1),
    "embedding_rowwise": ("RowwiseParallel(input_layouts=Replicate())", 0),
    "embedding_colwise": ("ColwiseParallel(output_layouts=Replicate())", 1),
}
_NOT_IN_TRANSFORMERS = {"packed_colwise_gather_output", "expertwise"}


def to_tp_plan(plan: Plan) -> dict[str, str]:
    """`{"model.layers.*.mlp.up_proj": "colwise", ...}`; weights left whole are not listed.

    Raises:
        PlanError: a style that transformers has no name for, or layers that differ under one `*`.
    """
    if plan.sequence_parallel:
        raise PlanError(
            "transformers cannot express sequence_parallel=True: plan without it to export, or use "
            "autotp.shard(model, mesh, plan=...).",
            code="TP-EXPORT",
        )
    styles = _by_module(plan)
    unknown = [name for name, style in styles.items() if style in _NOT_IN_TRANSFORMERS]
    globs: dict[str, set[str]] = {}
    for name, style in styles.items():
        globs.setdefault(_glob(name), set()).add(style)
    mixed = [name for name in styles if len(globs[_glob(name)]) > 1 and styles[name] != WHOLE]
    if unknown or mixed:
        problems = [f"{name} ({styles[name]}): no such style there" for name in _fold(unknown)]
        problems += [f"{name}: other layers have another style" for name in _fold(mixed)]
        raise PlanError(
            f"transformers cannot express {len(unknown) + len(mixed)} rows of this plan:\n  "
            + "\n  ".join(problems)
            + "\nUse autotp.shard(model, mesh, plan=...) or set these layers to one style with rules={...}.",
            code="TP-EXPORT",
        )
    return {glob: next(iter(found)) for glob, found in globs.items() if found != {WHOLE}}


def _by_module(plan: Plan) -> dict[str, str]:
    """Style by module name for weights (a bias follows its weight), by parameter name for anything else."""
    rows = {row.name: row for row in plan.parameters}
    styles: dict[str, str] = {}
    for row in plan.parameters:
        module, _, kind = row.name.rpartition(".")
        weight = rows.get(f"{module}.weight")
        if kind == "weight" and module:
            styles[module] = _elsewhere(row.style)
        elif not (kind == "bias" and weight and (weight.style != WHOLE or row.style == WHOLE)):
            styles[row.name] = _elsewhere(row.style)
    return styles


def _elsewhere(style: str) -> str:
    """Nobody else keeps in parts what the sample does not reach: it is whole there."""
    return WHOLE if style == "gathered_at_use" else style


def _glob(name: str) -> str:
    """Numbers to `*`, but not in the first place, where transformers does not look for them."""
    first, *rest = name.split(".")
    return ".".join([first, *("*" if part.isdigit() else part for part in rest)])


def _fold(names: list[str]) -> list[str]:
    return [fold.pattern for fold in fold_names([(name, None) for name in names])]


# Stock torch


def to_python(plan: Plan) -> str:
    """A Python module with `styles()` and `parallelize(model, mesh)`, using stock styles only.

    Raises:
        PlanError: rows that stock styles cannot express; each is named with the cause.
    """
    problems = _beyond_stock(plan)
    if problems:
        raise PlanError(
            "stock torch styles cannot express these rows of this plan:\n  "
            + "\n  ".join(problems)
            + "\nUse autotp.shard(model, mesh), or leave these rows whole with rules={...: 'replicate'}.",
            code="TP-EXPORT",
        )
    entries = "\n".join(f'        "{key}": {_STOCK[style][0]},' for key, style in _stock_entries(plan))
    model, sample = (text.replace("\\", "\\\\").replace('"', '\\"') for text in (plan.model, plan.sample))
    return _SCRIPT.format(model=model, tp=plan.tp, sample=sample, entries=entries)


_SCRIPT = '''"""Tensor parallelism for {model} over tp={tp} with torch's own styles.

Written by autotp.Plan.to_python (sample: {sample}). Not proved: code of the model that has head
or feature counts written into it, as in `view(batch, length, 32, 128)`, must use -1 there.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate  # noqa: F401
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def styles() -> dict[str, ParallelStyle]:
    """Style by module; `*` stands for a layer number."""
    return {{
{entries}
    }}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut the model over a 1-D mesh, in place."""
    if mesh.size() != {tp}:
        raise ValueError(f"this plan is for {tp} ranks, the mesh has {{mesh.size()}}")
    return parallelize_module(model, mesh, styles())
'''


def _stock_entries(plan: Plan) -> list[tuple[str, str]]:
    """(glob, style); layers that differ under one `*` are listed one by one."""
    styles = _by_module(plan)
    globs: dict[str, set[str]] = {}
    for name, style in styles.items():
        globs.setdefault(_glob(name), set()).add(style)
    entries = {
        _glob(name) if len(globs[_glob(name)]) == 1 else name: style for name, style in styles.items() if style != WHOLE
    }
    return list(entries.items())


def _beyond_stock(plan: Plan) -> list[str]:
    cut_weights = {row.name for row in plan.parameters if row.name.endswith(".weight") and row.style in _STOCK}
    problems = ["sequence_parallel=True: norms and residuals need styles of ours"] if plan.sequence_parallel else []
    reasons: list[Callable[[Row], str | None]] = [
        lambda row: None if row.style in _STOCK else "no stock style",
        lambda row: f"tied to {row.tied_to}, which stock styles would break" if row.tied_to else None,
        lambda row: _bias_problem(row, cut_weights),
        lambda row: _weight_problem(row, plan.tp),
    ]
    for row, count in fold_rows([row for row in plan.parameters if _elsewhere(row.style) != WHOLE]):
        cause = next(filter(None, (reason(row) for reason in reasons)), None)
        if cause:
            problems.append(f"{row.name} ({row.style}): {cause}" + (f" [{count} rows]" if count > 1 else ""))
    return problems


def _bias_problem(row: Row, cut_weights: set[str]) -> str | None:
    *module, kind = split_pattern(row.name)
    if kind == "weight" and module:
        return None
    weights = {name.rpartition(".")[0] + ".weight" for name in unfold_name(row.name)}
    if kind == "bias" and weights <= cut_weights:
        return None
    return "not the weight or bias of an nn.Linear or nn.Embedding"


def _weight_problem(row: Row, tp: int) -> str | None:
    if len(row.shape) == 1 and row.name.endswith(".bias"):
        return None
    dim = _STOCK[row.style][1]
    if len(row.shape) != 2 or row.dim != dim:
        return f"stock cuts dim {dim} of a matrix, this is dim {row.dim} of {len(row.shape)}"
    if row.local_shape[dim] * tp != row.shape[dim]:
        return f"{row.shape[dim]} is not in {tp} equal parts of {row.local_shape[dim]}"
    return None
