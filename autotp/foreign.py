"""Plans that others wrote: transformers' `tp_plan` dicts, and stock torch plans of name -> ParallelStyle.

    ForeignPlan   rows of text, pattern -> style, and whose way of matching names they follow
    Claim         what a row says of one parameter: along which dim it is cut, in how many equal parts interleaved
    Claims        all of that for one model, and the styles of its modules

A foreign plan says what is cut, summed and gathered; :mod:`autotp.foreign_proof` finds out whether that is so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.errors import PlanError
from autotp.lookup import nearest
from autotp.plan_types import Plan

if TYPE_CHECKING:
    from torch import nn

COLUMN = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
ROW = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
GATHERS = frozenset({"colwise_gather_output", "colwise_rep", "embedding_colwise"})
SPLITS = frozenset({"rowwise_split_input", "rowwise_rep"})
EXPERTS = "moe_tp_experts"
LATENT = "mla_kv_a_proj"
GRADIENTS = "replicated_with_grad_allreduce"
SUMS = ROW | {"embedding_rowwise", EXPERTS, "all_reduce"}
ENTERS = COLUMN | SPLITS | {"packed_colwise", EXPERTS}
KNOWN = SUMS | ENTERS | GATHERS | {"packed_rowwise", LATENT, GRADIENTS, "local_params", "replicate"}


@dataclass(frozen=True, kw_only=True)
class ForeignPlan:
    """Rows (pattern, style) in the order given. `globs`: torch's matching, where `*` stands for any name."""

    rows: tuple[tuple[str, str], ...]
    globs: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is said of one parameter: the row, and the dim it is cut along (None: whole) in `parts` interleaved."""

    key: str = ""
    style: str = ""
    dim: int | None = None
    parts: int = 1

    def ranks(self, size: int, tp: int) -> list[int]:
        """The rank of every index of the cut dim: blocks as `torch.chunk` makes them, in each part anew."""
        length = -(-size // self.parts)
        block = -(-length // tp)
        return [(i % length) // block for i in range(size)]


@dataclass(frozen=True, kw_only=True)
class Claims:
    """A foreign plan applied to a model's names: one claim per parameter, (style, key) per module named."""

    params: dict[str, Claim]
    modules: dict[str, tuple[str, str]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    rope: int | None = None  # width of the part of a latent projection that all heads share


def load(plan: Any) -> ForeignPlan | Plan | None:
    """Whatever a user may pass as a plan: a dict, a JSON file of one, a plan of ours or its file, or nothing.

    Raises:
        PlanError: a file that cannot be read, an unknown style, a layout that there is no support for.
    """
    if isinstance(plan, (str, Path)):
        plan = _from_file(Path(plan)) if str(plan).endswith(".json") else Plan.load(plan)
    if plan is None or isinstance(plan, (Plan, ForeignPlan)):
        return plan
    if not isinstance(plan, Mapping):
        raise PlanError(f"a plan is an autotp.Plan, a path to one or a dict of styles, not a {type(plan).__name__}")
    if not plan:
        raise PlanError("the plan given is an empty dict: it says nothing. Leave it out to have one inferred")
    if all(isinstance(style, str) for style in plan.values()):
        return ForeignPlan(rows=tuple((str(key), _known(str(key), style)) for key, style in plan.items()))
    rows = [(str(key), _stock(str(key), style)) for key, style in plan.items()]
    return ForeignPlan(rows=tuple((key, style) for key, style in rows if style), globs=True)


def _from_file(path: Path) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not JSON: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("parameters"), list):
        return Plan.load(path)
    if not isinstance(data, dict) or not all(isinstance(style, str) for style in data.values()):
        raise PlanError(
            f'{path}: a plan in JSON is {{"layers.*.mlp.up_proj": "colwise", ...}}, or what autotp plan --json prints'
        )
    return data


def _known(key: str, style: str) -> str:
    if style in KNOWN:
        return style
    if style == "sequence_parallel":
        raise PlanError(f"{key}: sequence_parallel is not available in a plan by others; pass sequence_parallel=True")
    hint = ", ".join(nearest(style, sorted(KNOWN)) or sorted(KNOWN))
    raise PlanError(f"{key}: there is no support for style {style!r}. Did you mean: {hint}")


# Stock torch styles


def _stock(key: str, style: Any) -> str | None:
    """The name of a stock style; None for one that changes nothing between whole tensors."""
    if isinstance(style, str):
        return _known(key, style)
    kind = type(style).__name__
    layouts = {name: _placements(getattr(style, name, None)) for name in _LAYOUTS}
    if kind.startswith("PrepareModule") and type(style).__module__.startswith("torch."):
        if all(p == "R" for found in layouts.values() for p in found):
            return None
        raise PlanError(f"{key}: {kind} between other layouts than Replicate() is not available: {_told(layouts)}")
    into, out = layouts["input_layouts"], layouts["output_layouts"]
    name = _STOCK.get((kind, into, out))
    if name is None or not type(style).__module__.startswith("torch."):
        raise PlanError(
            f"{key}: there is no support for {kind} with {_told(layouts)}. "
            "Known are ColwiseParallel and RowwiseParallel between Replicate() and Shard(-1), and PrepareModule* "
            "of Replicate()"
        )
    if not style.use_local_output:
        raise PlanError(f"{key}: {kind}(use_local_output=False) hands DTensors to your code; only local ones are known")
    return name


_LAYOUTS = (
    "input_layouts", "desired_input_layouts", "output_layouts", "desired_output_layouts", "input_kwarg_layouts",
    "desired_input_kwarg_layouts",
)  # fmt: skip
_STOCK: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = {
    ("ColwiseParallel", ("R",), ("S-1",)): "colwise",
    ("ColwiseParallel", ("R",), ("R",)): "colwise_gather_output",
    ("RowwiseParallel", ("S-1",), ("R",)): "rowwise",
    ("RowwiseParallel", ("R",), ("R",)): "rowwise_split_input",
}


def _placements(found: Any) -> tuple[str, ...]:
    """Placements as short texts: R, S-1; what is not given is left out."""
    if found is None:
        return ()
    if isinstance(found, Mapping):
        found = tuple(found.values())
    given = [p for p in (found if isinstance(found, (tuple, list)) else (found,)) if p is not None]
    return tuple("R" if p.is_replicate() else f"S{p.dim}" if p.is_shard() else str(p) for p in given)


def _told(layouts: Mapping[str, tuple[str, ...]]) -> str:
    words = {"R": "Replicate()"}
    shown = {
        name: ", ".join(words.get(p, f"Shard({p[1:]})") for p in found) for name, found in layouts.items() if found
    }
    return ", ".join(f"{name}={text}" for name, text in shown.items()) or "no layouts"


# Names


def resolve(model: nn.Module, plan: ForeignPlan) -> Claims:
    """What the rows say of every parameter and module of `model`.

    A parameter goes by its own row, else by that of its module. Keys of a plan for the base model alone are found too.

    Raises:
        PlanError: no row matches anything; two rows of a torch plan match one module; tied names are cut differently.
    """
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = dict(model.named_modules())
    rows = _rebased(plan, model, [*params, *modules])
    styles: dict[str, tuple[str, str]] = {}
    used: set[str] = set()
    for name in dict.fromkeys([*modules, *params]):
        key = _match(name, rows, plan.globs)
        if key is not None:
            used.add(key)
            styles[name] = rows[key], key
    if not used:
        tried = ", ".join(list(rows)[:3])
        raise PlanError(f"no row of the plan given matches anything in {type(model).__name__}: {tried}, ...")
    claims = {name: _claim(name, modules, styles) for name in params}
    _check_ties(model, claims)
    return Claims(
        params=claims,
        modules={name: style for name, style in styles.items() if name in modules},
        unused=tuple(key for key in rows if key not in used),
        rope=getattr(_text_config(model), "qk_rope_head_dim", None),
    )


def _rebased(plan: ForeignPlan, model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The rows by key; those of a base model with its name put before them."""
    rows = dict(plan.rows)
    base = getattr(model, "base_model_prefix", "")
    found = [name for name in names if _match(name, rows, plan.globs)]
    longer = {f"{base}.{key}": style for key, style in rows.items()}
    if found or not base or not any(_match(name, longer, plan.globs) for name in names):
        return rows
    return longer


def _match(name: str, rows: Mapping[str, str], globs: bool) -> str | None:
    """The key that stands for a name: its own, that with `*` for numbers, or (torch) a glob for each piece."""
    if name in rows:
        return name
    if not globs:
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        return general if general in rows else None
    parts = name.split(".")
    found = [key for key in rows if _fits(parts, key.split("."))]
    if len(found) > 1:
        raise PlanError(f"{name} is matched by {len(found)} rows of the plan given: {', '.join(found)}. Keep one")
    return found[0] if found else None


def _fits(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(fnmatchcase(p, q) for p, q in zip(parts, pattern, strict=True))


def _claim(name: str, modules: Mapping[str, nn.Module], styles: Mapping[str, tuple[str, str]]) -> Claim:
    path, _, attr = name.rpartition(".")
    style, key = styles.get(name) or styles.get(path) or ("", "")
    owner = modules[path]
    ndim = getattr(owner, attr).ndim
    dim, parts = _placement(style, attr, ndim, _is_embedding(owner))
    return Claim(key=key, style=style, dim=dim, parts=parts)


def _placement(style: str, attr: str, ndim: int, embedding: bool) -> tuple[int | None, int]:
    """The dim that a style cuts, and in how many parts interleaved; as transformers and torch place it."""
    if ndim == 0:
        return None, 1
    if embedding and style in COLUMN | ROW:
        return (1 if style in COLUMN else 0), 1
    if style in COLUMN or style == "packed_colwise":
        return max(ndim - 2, 0), 2 if style == "packed_colwise" and ndim > 1 else 1
    if style in ROW:
        return (None if attr == "bias" else ndim - 1), 1
    if style == "packed_rowwise":
        return (None, 1) if ndim == 1 else (ndim - 1, 2)
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style), 1


def _is_embedding(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.Embedding)


def _check_ties(model: nn.Module, claims: Mapping[str, Claim]) -> None:
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(p), name)
        if claims[other].key and claims[name].key and claims[other].dim != claims[name].dim:
            raise PlanError(
                f"{name} is {other}: one tensor, but the plan given cuts it along dim {claims[name].dim} "
                f"({claims[name].key!r}: {claims[name].style}) and along dim {claims[other].dim} "
                f"({claims[other].key!r}: {claims[other].style})"
            )


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return find() if callable(find) else config
