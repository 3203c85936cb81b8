"""`autotp.verify`: run a model sharded and unsharded, and compare all numbers.

Inside a process group it runs in that; otherwise it starts ranks of its own on this machine. Nothing is done to the
model that is passed in.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.errors import MeshError, VerifyError
from autotp.foreign import ForeignPlan, load
from autotp.mesh import resolve_mesh
from autotp.plan_types import Finding, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from autotp.measuring import Figures, Inputs


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What a verification found. Errors are relative: to the largest output, to the largest gradient of the model.

    `gradients` and `input_gradients` hold one error per name, `optimizer_error` is that of parameters and outputs
    after one step of AdamW. `state` says whether names, shapes, sharing and gathered values are the unsharded ones
    bit for bit, `ranks_agree` whether all ranks have the same outputs and the same values of what is not cut.
    """

    model: str
    tp: int
    ok: bool
    dtype: str
    forward_error: float
    gradients: Mapping[str, float] = field(default_factory=dict)
    input_gradients: Mapping[str, float] = field(default_factory=dict)
    optimizer_error: float = 0.0
    state: bool = True
    ranks_agree: bool = True
    first_bad: str | None = None
    cut_share: float = 0.0
    forward_limit: float = 1e-10
    gradient_limit: float = 1e-9
    findings: tuple[Finding, ...] = ()

    @property
    def max_gradient_error(self) -> float:
        """The largest error of a gradient, of parameters and inputs."""
        return max([*self.gradients.values(), *self.input_gradients.values()], default=0.0)

    def __repr__(self) -> str:
        return (
            f"<Report {self.model} on tp={self.tp}: {'PASS' if self.ok else 'FAIL'}, forward error "
            f"{self.forward_error:.1e}, gradient error {self.max_gradient_error:.1e}, {self.cut_share:.1%} cut>"
        )

    def __str__(self) -> str:
        from autotp.display import report_text

        return report_text(self)

    def __rich__(self) -> Any:
        from autotp.display import report_renderable

        return report_renderable(self)

    def _repr_html_(self) -> str:
        from autotp.display import report_html

        return report_html(self)


def verify(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    sample: Any = None,
    rules: Mapping[str, str] | None = None,
    plan: Plan | ForeignPlan | Mapping[str, Any] | str | Path | None = None,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    dropout: bool = False,
    sequence_parallel: bool = False,
    min_bytes: int = 0,
    strict: bool = False,
    timeout: float | None = None,
) -> Report:
    """Shard copies of the model over `tp` ranks (2 unless a mesh says otherwise) and compare with the unsharded one.

    Args:
        model: any module with real weights; it is left as it is.
        tp: number of ranks.
        mesh: run on this mesh of the process group that is there; then all its ranks must call.
        sample: example inputs, as for `autotp.shard`; inferred if left out.
        rules: style overrides, as for `autotp.shard`.
        plan: a plan, a path to one, or a dict of styles that transformers or torch use, as for `autotp.plan`.
        dtype: float64 unless given: there every difference beyond rounding shows.
        backward: whether to compare gradients and an optimizer step too.
        dropout: keep dropout on. Ranks draw their own inside a cut region, so outputs then differ.
        sequence_parallel: as for `autotp.shard`.
        min_bytes: as for `autotp.shard`.
        strict: as for `autotp.shard`.
        timeout: seconds after which ranks of its own are given up.

    Raises:
        AutotpError: if the model does not run on the sample, or sharding refuses it.
    """
    options = {"rules": rules, "sequence_parallel": sequence_parallel, "min_bytes": min_bytes, "strict": strict}
    payload = {"model": model, "sample": sample, "name": type(model).__name__}
    payload["options"] = {**options, "plan": load(plan)}
    payload["settings"] = {"dtype": dtype, "backward": backward, "dropout": dropout}
    _check_values(model)
    if mesh is None and not _in_process_group():
        return _on_own_ranks(payload, tp or 2, timeout)
    mesh = mesh if mesh is not None else _world_mesh(tp)
    return _report({**payload, "model": copy.deepcopy(model)}, mesh)


def verify_spec(
    spec: str,
    tp: int = 2,
    *,
    sample: Any = None,
    rules: Mapping[str, str] | None = None,
    plan: Plan | ForeignPlan | Mapping[str, Any] | str | Path | None = None,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    dropout: bool = False,
    sequence_parallel: bool = False,
    min_bytes: int = 0,
    strict: bool = False,
    timeout: float | None = None,
) -> Report:
    """`verify` for a model spec of the command line: every rank builds the model itself, with seeded weights."""
    from autotp.models import load_spec

    loaded = load_spec(spec)  # mistakes in the spec show here, before any process is started
    options = {"rules": rules, "sequence_parallel": sequence_parallel, "min_bytes": min_bytes, "strict": strict}
    payload = {"spec": spec, "sample": sample, "name": loaded.name}
    payload["options"] = {**options, "plan": load(plan)}
    payload["settings"] = {"dtype": dtype, "backward": backward, "dropout": dropout}
    return _on_own_ranks(payload, tp, timeout)


def _on_own_ranks(payload: dict[str, Any], tp: int, timeout: float | None) -> Report:
    from autotp.ranks import run_once

    report: Report = run_once(tp, rank_task, payload, timeout=timeout, imports=("autotp.sharding",))[0]
    return report


def rank_task(payload: dict[str, Any]) -> Report:
    """What each rank that `verify` starts runs."""
    if "spec" in payload:
        from autotp.models import load_spec, materialize

        loaded = load_spec(payload["spec"])
        payload["model"] = materialize(loaded)
        payload["sample"] = loaded.sample if payload["sample"] is None else payload["sample"]
    return _report(payload, _world_mesh(None))


def _report(payload: dict[str, Any], mesh: DeviceMesh) -> Report:
    import torch

    from autotp.measuring import Settings, measure

    wanted = payload["settings"]
    dtype = wanted["dtype"] or torch.float64
    settings = Settings(**{**wanted, "dtype": dtype, "promote": dtype is torch.float64})
    inputs = _inputs(payload["model"], payload["sample"])
    apply = functools.partial(_apply, options=payload["options"])
    figures = measure(payload["model"], inputs, mesh, apply, settings)
    return _as_report(figures, payload["name"], resolve_mesh(mesh).tp)


def _apply(model: nn.Module, mesh: DeviceMesh, inputs: Inputs, *, options: dict[str, Any]) -> nn.Module:
    from autotp.sharding import shard

    return shard(model, mesh, sample=inputs, **options)


def _inputs(model: nn.Module, sample: Any) -> Inputs:
    """Inputs with values: `sample`, or the first guess that the model runs on."""
    import torch

    from autotp.inputs import resolve

    trial = copy.deepcopy(model)

    def attempt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        try:
            with torch.no_grad():
                trial(*args, **kwargs)
        except Exception as error:
            return error
        return None

    return resolve(model, sample, attempt)


def _as_report(figures: Figures, name: str, tp: int) -> Report:
    used = figures.settings
    return Report(
        model=name,
        tp=tp,
        ok=figures.ok,
        dtype=str(used.dtype).removeprefix("torch."),
        forward_error=figures.forward_error,
        gradients=dict(figures.gradients),
        input_gradients=dict(figures.input_gradients),
        optimizer_error=figures.optimizer_error,
        state=not figures.problems,
        ranks_agree=figures.ranks_agree,
        first_bad=figures.first_bad or None,
        cut_share=figures.cut_share,
        forward_limit=used.forward_limit,
        gradient_limit=used.gradient_limit,
        findings=tuple(_findings(figures)),
    )


def _findings(figures: Figures) -> list[Finding]:
    used = figures.settings
    found = [Finding(code="TP-DIFFERS", level="error", where="", message=text) for text in figures.problems]
    if not figures.ranks_agree:
        text = f"ranks differ by {figures.spread:.1e} in outputs or in values that every rank has whole"
        found.append(Finding(code="TP-RANKS", level="error", where="", message=text))
    if figures.optimizer_error > used.gradient_limit:
        text = f"parameters or outputs after one AdamW step are off by {figures.optimizer_error:.1e}"
        found.append(Finding(code="TP-STEP", level="error", where="", message=text))
    if used.obstacle:
        limits = f"with limits of {used.forward_limit:.0e} and {used.gradient_limit:.0e}"
        text = f"compared in float32, {limits}, because the model does not run in float64: {used.obstacle}"
        found.append(Finding(code="TP-FLOAT32", level="warning", where="", message=text))
    found += [Finding(code="TP-VERIFY", level="note", where="", message=text) for text in figures.notes]
    return found


def _check_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise VerifyError(
                f"{name} is on the meta device and has no values to compare. "
                "Build the model with weights, or use autotp.plan, which needs none."
            )


def _in_process_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _world_mesh(tp: int | None) -> DeviceMesh:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    if tp is not None and tp != size:
        raise MeshError(f"tp={tp}, but the process group has {size} ranks. Pass mesh= with an axis of {tp} ranks.")
    return init_device_mesh("cuda" if dist.get_backend() == "nccl" else "cpu", (size,), mesh_dim_names=("tp",))
