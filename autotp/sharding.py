"""Apply a plan to a model, in place, through torch's ``parallelize_module``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from autotp import construction, torch_compat, torch_hooks
from autotp.compiling import CompiledPrograms
from autotp.data_parallel import Fsdp, apply_fsdp, check_fsdp, refuse_ddp
from autotp.errors import MeshError, PlanError
from autotp.extending import Dealt, layouts_of
from autotp.generation import Generation, install
from autotp.hoisting import ModuleProgram
from autotp.layouts import distribute, layout_of
from autotp.lost_ranks import watch
from autotp.mesh import resolve_mesh
from autotp.plan_types import Plan
from autotp.planning import Prepared, prepare
from autotp.styles.bound import Running
from autotp.styles.children import note_children
from autotp.styles.comm import Ranks
from autotp.styles.local import LocalForward
from autotp.styles.random import SharedDraws
from autotp.styles.tokens import Lengths


class LocalStyle(ParallelStyle):
    """Hands one module its part of every parameter of its own, and runs it by its program."""

    def __init__(
        self,
        program: ModuleProgram,
        made: dict[int, nn.Parameter],
        layouts: dict[str, Any],
        ranks: Ranks,
        model: Running,
    ) -> None:
        super().__init__()
        self.program, self.made, self.layouts, self.ranks, self.model = program, made, layouts, ranks, model

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in module._parameters.items():
            if p is not None and not torch_hooks.is_dtensor(p):
                module._parameters[name] = self._parameter(p, f"{self.program.path}.{name}".lstrip("."), device_mesh)
                _replace_in_lists(module, p, module._parameters[name])
        for name, b in module._buffers.items():
            layout = self.layouts.get(f"{self.program.path}.{name}".lstrip("."))
            if b is not None and layout is not None:
                module._buffers[name] = distribute(b, device_mesh, layout)
        cut = {n for n in self.program.params if self.layouts.get(f"{self.program.path}.{n}".lstrip(".")) is not None}
        local = LocalForward(self.program.path, module, cut, self.ranks, self.model)
        local.learn(self.program)
        local.attach(module)
        if local.programs[None].region:
            note_children(module)
        module.register_load_state_dict_pre_hook(_cut_loaded)
        return module

    def _parameter(self, p: nn.Parameter, name: str, mesh: DeviceMesh) -> nn.Parameter:
        """This rank's part of a parameter, with everything the user attached to it; tied ones stay one object."""
        if id(p) not in self.made:
            new = nn.Parameter(distribute(p.data, mesh, self.layouts.get(name)), requires_grad=p.requires_grad)
            torch_hooks.move_attachments(p, new)
            self.made[id(p)] = new
        return self.made[id(p)]


def _cut_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """An ordinary state dict loads into a sharded model: every rank takes its part of each tensor."""
    for name, p in (*module._parameters.items(), *module._buffers.items()):
        full = state.get(prefix + name)
        if not torch_hooks.is_dtensor(p) or full is None or torch_hooks.is_dtensor(full):
            continue
        if tuple(full.shape) == tuple(p.shape) and p.device_mesh.ndim == 1:
            state[prefix + name] = distribute(full.to(p.device), p.device_mesh, layout_of(p))


def _replace_in_lists(module: nn.Module, old: Any, new: Any) -> None:
    for value in module.__dict__.values():
        if type(value) is list:
            value[:] = [new if x is old else x for x in value]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    sample: Any = None,
    rules: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    fsdp: Fsdp = True,
    min_bytes: int = 0,
    strict: bool = False,
) -> nn.Module:
    """Make ``model`` tensor-parallel over ``mesh``, in place; returns the same object.

    All ranks call it with the same model. Afterwards every parameter is a ``DTensor`` (the ones rank 0 had), inputs are
    the ordinary full inputs, equal on all ranks of the group, and outputs are ordinary full tensors. Parameters on
    meta stay there, for :func:`autotp.load` or :func:`autotp.materialize`.

    Args:
        mesh: 1-D (tensor parallel whatever its name), or with an axis named ``tp``. An axis ``dp``, ``fsdp`` or
            ``dp_shard`` beside it gets ``fully_shard``, block by block (HSDP with ``dp_replicate``); each of its ranks
            gets its own part of the batch. ``fsdp=False`` leaves that to you;
            ``fsdp={"mp_policy": ..., "reshard_after_forward": ..., "offload_policy": ...}`` goes to ``fully_shard``.
        plan: a :class:`Plan`, a path to one, or a dict of styles that transformers or torch use; applied as it is,
            after proof.
        sample, rules, min_bytes, strict: as in :func:`autotp.plan`.

    Raises:
        AutotpError: before any communication and on every rank: a mesh axis that is unknown, a model that is sharded
            already or on another device, a rule that matches nothing, inputs that cannot be inferred, an integer
            buffer on meta whose content is not known. After one small exchange, also on every rank: ranks that hold
            different models or rules.
    """
    axes = resolve_mesh(mesh)
    _check_model(model, mesh)
    if fsdp is not False and axes.fsdp > 1:
        check_fsdp(model, fsdp)
    construction.put_buffers(model, construction.buffers_of(model, floats=False), mesh.device_type)
    prepared = prepare(
        model, axes, sample=sample, rules=rules, plan=plan, sequence_parallel=sequence_parallel,
        min_bytes=min_bytes, strict=strict,
    )  # fmt: skip
    return apply(model, mesh, prepared, fsdp=fsdp)


def apply(model: nn.Module, mesh: DeviceMesh, prepared: Prepared, *, fsdp: Fsdp = True) -> nn.Module:
    """Apply what was prepared; communicates: the ranks compare their plans, and take the first one's values."""
    axes = resolve_mesh(mesh)
    data = fsdp is not False and axes.fsdp > 1
    if axes.tp == 1:
        return apply_fsdp(model, mesh, axes, fsdp) if data else model
    tp_mesh = mesh if mesh.ndim == 1 else mesh[axes.tp_name or "tp"]
    alone = torch_compat.root_mesh(tp_mesh).size() == axes.tp
    ranks = Ranks(tp_mesh.get_group(), tp_mesh.get_local_rank(), axes.tp, alone)
    watch()
    with torch_hooks.outside_inference((*model.parameters(), *model.buffers())):
        _agree(prepared.plan, replace(ranks, at="autotp.shard"))
        _share_first(model, replace(ranks, at="autotp.shard"))
        _cut(model, prepared, tp_mesh, ranks)
        return apply_fsdp(model, mesh, axes, fsdp) if data else model


def _cut(model: nn.Module, prepared: Prepared, mesh: DeviceMesh, ranks: Ranks) -> nn.Module:
    assert prepared.analysis is not None
    trace = prepared.analysis.trace
    layouts = {name: prepared.layout(name) for name in trace.leaves}
    made: dict[int, nn.Parameter] = {}
    running = Running(Lengths(ranks), compiled=CompiledPrograms(model, prepared, resolve_mesh(mesh)))
    styles: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        program = prepared.programs.get(path)
        if program is not None and program.does_something:
            styles[path] = LocalStyle(program, made, layouts, ranks, running)
        elif module._parameters or not path:
            styles[path] = LocalStyle(ModuleProgram(path), made, layouts, ranks, running)
    for path, style in styles.items():
        if path:
            parallelize_module(model, mesh, {path: style}, src_data_rank=None)
        else:
            parallelize_module(model, mesh, style, src_data_rank=None)
    refuse_ddp(model)
    install(model, Generation(ranks, running, Dealt.by(prepared.analysis), layouts_of(prepared.analysis)))
    if trace.draws:
        draws = SharedDraws(ranks, always=trace.random_calls > 0)
        model.register_forward_pre_hook(draws.before, with_kwargs=True, prepend=True)
        model.register_forward_hook(draws.after, with_kwargs=True, always_call=True)
    return model


def _check_model(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, p in model.named_parameters():
        if torch_hooks.is_dtensor(p):
            raise PlanError(
                f"{name} is a DTensor already (placements {tuple(p.placements)}): the model was sharded before. "
                "Call autotp.shard once, before fully_shard."
            )
        if p.device.type not in (mesh.device_type, "meta"):
            raise MeshError(
                f"{name} is on {p.device} but the mesh is of {mesh.device_type} devices: move the model there first, "
                f"as in model.to('{mesh.device_type}')"
            )


def _agree(plan: Plan, ranks: Ranks) -> None:
    """Compare the plans of all ranks by their digest; where they differ, say where and which ranks."""
    digest = hashlib.sha256(repr((plan.parameters, plan.collectives, tuple(plan.mesh.items()))).encode()).digest()
    device = "cuda" if dist.get_backend(ranks.group) == "nccl" else "cpu"
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    parts = ranks.all_parts(mine)
    if all(torch.equal(p, parts[0]) for p in parts):
        return
    plans: list[Any] = [None] * ranks.size
    rows = [(r.name, r.shape, r.style, r.dim) for r in plan.parameters]
    ranks.calls.run("all_gather_object", ranks.at, None, dist.all_gather_object, plans, rows)
    other = next((i for i, p in enumerate(plans) if p != plans[0]), 0)
    pairs = zip(plans[0], plans[other], strict=False)
    first = next(((a, b) for a, b in pairs if a != b), None)
    where = (
        f"first at {first[0][0]}: {first[0][1:]} against {first[1][0]}: {first[1][1:]}"
        if first
        else (f"{len(plans[0])} against {len(plans[other])} parameters")
    )
    raise PlanError(f"the ranks hold different models, rules or inputs: rank 0 and rank {other} differ, {where}")


@torch.no_grad()
def _share_first(model: nn.Module, ranks: Ranks) -> None:
    """Every rank starts from the first one's values."""
    tensors: dict[int, Tensor] = {id(t): t for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    for t in tensors.values():
        whole = t.detach().contiguous()
        ranks.broadcast_(whole)
        if whole.data_ptr() != t.data_ptr():
            t.detach().copy_(whole)
